"""Across the split a request's numbers do not depend on its batch, as in one process; the model is 2,048 wide."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.offline.offline_service import OfflineConfig, OfflineService
from pd_cluster.settings.engine_config import EngineConfig
from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import LiveCluster, together
from tests.support.engines import random_prompt

WIDE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 2304,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 2,
    "initializer_range": 0.05,
}
LENGTHS = (5, 1, 33, 16, 2, 60)
NUM_TOKENS, NUM_TOKENS_UNDER_PRESSURE = 8, 70
MOST_ROUNDS = 5  # on a busy machine fewer requests share a step on the decode instance
ENGINE = ["--num-blocks=128", "--max-model-len=200"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("wide"), "llama", **WIDE)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Starts a cluster without prefix caching, so that every answer is computed."""
    place = tmp_path_factory.mktemp("company")
    with LiveCluster(place, model, arguments=[*ENGINE, "--no-enable-prefix-caching"]) as running:
        yield running


def numbers(cluster: LiveCluster, prompt: list[int], num_tokens: int = NUM_TOKENS) -> Any:
    """Returns an answer's tokens and logprobs as in its JSON, where a float's text determines its bits."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "logprobs": 4, "ignore_eos": True}
    answer = cluster.client.post(f"{cluster.url}/v1/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert len(choice["token_ids"]) == num_tokens
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def test_alone_and_among_eight_split_and_not(cluster: LiveCluster, model: Path) -> None:
    rng = random.Random(4)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    alone = [numbers(cluster, prompt) for prompt in prompts]
    assert together([partial(numbers, cluster, prompt) for prompt in prompts]) == alone
    cluster.await_received("decode-0")
    assert in_one_process(model, prompts) == alone


@pytest.mark.slow
def test_swapped_out_and_in_again_on_the_decode_instance(model: Path, tmp_path: Path) -> None:
    """In a pool for a few of eight sequences, preempted ones continue with the same bits."""
    rng = random.Random(5)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    pressed = ["--num-blocks=26", "--growth-tokens=8", "--preemption-mode=swap", "--swap-space=0.5"]
    arguments = ["--max-model-len=200", "--no-enable-prefix-caching"]
    with LiveCluster(tmp_path, model, arguments=[*arguments, *pressed]) as cluster:
        alone = [numbers(cluster, prompt, NUM_TOKENS_UNDER_PRESSURE) for prompt in prompts]
        assert cluster.instance("decode-0")["num_preemptions"] == 0
        for _ in range(MOST_ROUNDS):
            assert together([partial(numbers, cluster, each, NUM_TOKENS_UNDER_PRESSURE) for each in prompts]) == alone
            cluster.assert_home()  # afterwards the instance has reported its steps
            if cluster.instance("decode-0")["num_preemptions"] > 0:
                break
        else:
            raise AssertionError("no sequence was preempted")


def in_one_process(model: Path, prompts: list[list[int]]) -> list[Any]:
    """Returns the same answers from an engine in this process, computed together."""
    from pd_cluster.service.schema.completion_protocol import CompletionRequest

    engine = EngineConfig(model=str(model), num_blocks=128, max_model_len=200, enable_prefix_caching=False)
    with OfflineService(OfflineConfig(engine=engine)) as offline:

        async def work() -> list[Any]:
            request = CompletionRequest(prompt="", max_tokens=NUM_TOKENS, temperature=0, logprobs=4, ignore_eos=True)
            generations = [await offline.service.completion(request, prompt) for prompt in prompts]
            pieces = await offline.service.complete(generations)
            return [
                (piece.token_ids, [told.logprobs.logprob for told in piece.logprobs if told.logprobs is not None])
                for piece in pieces
            ]

        return offline.run(work())
