"""Logits processors across real processes: splits, two ranks, gloo, deaths, and errors over HTTP.

`pytest -m slow tests/cluster/test_processors.py`, three minutes on two cores.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pd_cluster.types import RequestSpec, Sampling
from tests.cluster.test_death import Streaming
from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import LiveCluster
from tests.support.engines import random_prompt, shared_core
from tests.support.engines import together as alone
from tests.support.processors import HERE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NAMES = (f"{HERE}:Rolling", f"{HERE}:OnlyOne", f"{HERE}:Fails")
LONG = 600
FLAGS = ["--block-size=16", "--num-blocks=400", "--max-num-batched-tokens=64"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("processed") / "model", "llama", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Yields a prefill instance of two ranks, and decode instances of one and two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
        flags = [*FLAGS, "--logits-processors", ",".join(NAMES)]
        sizes = {"prefill-0": 2, "decode-1": 2}
        own = {"decode-1": ["--kv-transport=dist"]}
        folder = tmp_path_factory.mktemp("cluster")
        with LiveCluster(folder, model, 1, 2, arguments=flags, member_arguments=own, tp_sizes=sizes) as running:
            yield running


def expected_of(model: Path, prompt: list[int], **fields: Any) -> list[int]:
    """Returns the tokens of a one-rank engine in one process."""
    core = shared_core(model, block_size=16, num_blocks=400, logits_processors=NAMES)
    (found,) = alone(core, [RequestSpec(prompt, Sampling(**{"ignore_eos": True, **fields}))])
    return found


def test_tokens_over_splits_are_those_of_one_process(cluster: LiveCluster, model: Path) -> None:
    rng = random.Random(2)
    for length in (1, 16, 70, 100):
        prompt = random_prompt(rng, length)
        for own in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5}):
            expected = expected_of(model, prompt, max_tokens=40, **own)
            for _ in range(2):  # the second time with a cached prompt
                assert cluster.complete(prompt, 40, ignore_eos=True, **own) == expected
    cluster.assert_home()


@pytest.mark.parametrize("victim", ["decode-0", "decode-1", "prefill-0"])
def test_kill_9_in_mid_answer(cluster: LiveCluster, model: Path, victim: str) -> None:
    prompts = [[5, 6, 7, at] for at in range(4)]
    expected = [expected_of(model, prompt, max_tokens=LONG, temperature=0.0) for prompt in prompts]
    running = [Streaming(cluster.url, LONG, prompt=prompt) for prompt in prompts]
    first = [[*stream.some(), *stream.some()] for stream in running]
    cluster.kill(victim)
    for tokens, stream, whole in zip(first, running, expected, strict=True):
        assert tokens + stream.to_the_end()[0] == whole
    cluster.restart(victim)
    cluster.assert_home()


def asked(cluster: LiveCluster, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0, "ignore_eos": True, **fields}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60, trust_env=False)


def test_arguments_and_faults_over_http(cluster: LiveCluster) -> None:
    only = asked(cluster, vllm_xargs={"target": 70}, return_token_ids=True).json()["choices"][0]
    assert only["token_ids"] == [70] * 20
    refused = asked(cluster, vllm_xargs={"target": "x"})
    assert refused.status_code == 400
    assert "OnlyOne: ValueError: target 'x' is not a token id" in refused.json()["error"]["message"]
    for position in (0, 1, 9):  # at P, at D's first token, and later
        failed = asked(cluster, vllm_xargs={"fails_at": position})
        assert failed.status_code == 500
        assert f"Fails: ZeroDivisionError: at {position}" in failed.json()["error"]["message"]
    stream = Streaming(cluster.url, 200, prompt=[1, 2], vllm_xargs={"fails_at": 100})
    assert "ZeroDivisionError: at 100" in stream.until_error()[1]["message"]
    assert asked(cluster).status_code == 200
    cluster.assert_home()


def test_a_processor_that_does_not_return_ends_its_request_alone(cluster: LiveCluster, model: Path) -> None:
    """After the limit of 30 s the request fails; another request's tokens equal those of a single process."""
    prompt = [5, 6, 7, 8]
    other = Streaming(cluster.url, LONG, prompt=prompt)
    stays = Streaming(cluster.url, 200, prompt=[1, 2], vllm_xargs={"stays_at": 100})

    def ended() -> list[str]:
        return [name for name in ("decode-0", "decode-1") if cluster.processes[name].poll() is not None]

    cluster.wait_until("its instance ends", lambda: bool(ended()), 90)
    why = stays.until_error()[1]["message"]
    assert f"logits processor {NAMES[2]}: has not returned for 30 s" in why
    assert other.to_the_end()[0] == expected_of(model, prompt, max_tokens=LONG, temperature=0.0)
    (victim,) = ended()
    assert f"logits processor {NAMES[2]}: has not returned" in cluster.log_file(victim).read_text()
    cluster.restart(victim)
    cluster.assert_home()


def test_an_instance_with_other_processors_is_not_paired(cluster: LiveCluster) -> None:
    numerics = [each["numerics"] for each in cluster.instances() if "numerics" in each]
    assert all(each["logits_processors"] == ", ".join(NAMES) for each in numerics)
    before = cluster.member_arguments
    cluster.member_arguments = {**before, "decode-0": [f"--logits-processors={NAMES[0]}"]}
    cluster.kill("decode-0")
    cluster.await_exit("decode-0")
    cluster.start_member("decode-0")
    try:

        def is_refused() -> bool:
            links = json.dumps(cluster.instance("prefill-0")["links"])
            return "refused" in links and "--logits-processors" in links

        cluster.wait_until("the link is refused", is_refused, 60)
    finally:
        cluster.member_arguments = before
        cluster.kill("decode-0")
        cluster.restart("decode-0")
