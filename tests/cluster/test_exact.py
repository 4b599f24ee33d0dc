"""Across real processes, greedy output equals transformers', over every transport, with and without fused layers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.cluster.placement.routing_policy import POLICIES
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.checkpoints import CONFIGS
from tests.support.cluster import SAME_HOST, SETTLE_TIMEOUT_S, LiveCluster, together
from tests.support.engines import assert_all_same, assert_same, make_core, random_prompt, run
from tests.support.more_checkpoints import MORE
from tests.support.reference_beams import assert_same_beams

BLOCK_SIZE = 16
MAX_BATCHED = 40
MAX_TOKENS = 16
FLAGS = [f"--block-size={BLOCK_SIZE}", f"--max-num-batched-tokens={MAX_BATCHED}", "--num-blocks=128"]

Checkpoints = Callable[..., Path]


QUICK = ("llama",)  # tests/model compares other architectures' layers and handover within one process


@pytest.fixture(
    params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CONFIGS], scope="module"
)
def model(request: pytest.FixtureRequest, checkpoint: Checkpoints) -> Path:
    return checkpoint(request.param)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Yields a prefill instance, a decode instance over host or device memory, and one over gloo."""
    transports = {"decode-0": [f"--kv-transport={SAME_HOST}"], "decode-1": ["--kv-transport=dist"]}
    folder = tmp_path_factory.mktemp("exact")
    with LiveCluster(folder, model, num_decode=2, arguments=FLAGS, member_arguments=transports) as running:
        links = {peer.partition("@")[0]: state for peer, state in running.instance("prefill-0")["links"].items()}
        assert links == {"decode-0": f"up ({SAME_HOST})", "decode-1": "up (dist)"}
        yield running


def complete_all(cluster: LiveCluster, model: Path, prompts: list[list[int]]) -> None:
    """Sends all prompts at once and compares each answer with the reference; both decode instances must serve.

    An instance that answers before the next request is sent may get that request, too; then sends other prompts.
    """
    before = {name: cluster.instance(name)["kv_received_nbytes"] for name in ("decode-0", "decode-1")}

    def have_received() -> bool:
        return all(cluster.instance(name)["kv_received_nbytes"] > nbytes for name, nbytes in before.items())

    for attempt in range(10):
        complete_once(cluster, model, [[(prompt[0] + attempt) % 256, *prompt[1:]] for prompt in prompts])
        with contextlib.suppress(AssertionError):
            cluster.wait_until("KV cache came to both", have_received, 2.0 if attempt < 9 else SETTLE_TIMEOUT_S)
            return
    raise AssertionError("one decode instance never received KV cache")


def complete_once(cluster: LiveCluster, model: Path, prompts: list[list[int]]) -> None:
    assert_all_same(model, prompts, cluster.complete_together(prompts, MAX_TOKENS), MAX_TOKENS)


@pytest.mark.parametrize("length", [1, BLOCK_SIZE + 1, 100])
def test_prompt_of_length(cluster: LiveCluster, model: Path, length: int) -> None:
    """Sends two requests at once, one for each decode instance."""
    rng = random.Random(length)
    complete_all(cluster, model, [random_prompt(rng, length), random_prompt(rng, length)])


def test_32_at_once(cluster: LiveCluster, model: Path) -> None:
    rng = random.Random(8)
    complete_all(cluster, model, [random_prompt(rng, rng.randrange(1, 90)) for _ in range(32)])
    cluster.assert_home()


def test_beams_are_those_of_the_reference(cluster: LiveCluster, model: Path) -> None:
    """Covers both transports, prompts of one block and of more than a step, and a cached prompt."""
    rng = random.Random(12)
    prompts = [random_prompt(rng, length) for length in (1, BLOCK_SIZE, MAX_BATCHED + 1, 100)]
    fields = {"use_beam_search": True, "n": 3, "best_of": 4, "stop_token_ids": list(range(1, 256, 4))}
    sampling = Sampling(
        n=3, beam_width=4, max_tokens=MAX_TOKENS, temperature=0.0, stop_token_ids=tuple(range(1, 256, 4))
    )
    prompts.append(prompts[-1])
    found = together([partial(cluster.complete_choices, prompt, MAX_TOKENS, **fields) for prompt in prompts], 2)
    for prompt, beams in zip(prompts, found, strict=True):
        assert_same_beams(model, prompt, beams, sampling)


def test_sampled_output_is_the_same_alone_and_in_a_crowd(cluster: LiveCluster) -> None:
    fields: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 11}
    prompt = random_prompt(random.Random(9), 30)
    alone = cluster.complete(prompt, MAX_TOKENS, **fields)
    assert cluster.complete_together([prompt] * 8, MAX_TOKENS, **fields) == [alone] * 8
    hot = {**fields, "temperature": 3.0, "top_p": 1.0, "top_k": -1}
    assert len({tuple(cluster.complete(prompt, MAX_TOKENS, **{**hot, "seed": seed})) for seed in range(3)}) == 3


def test_the_split_gives_what_one_process_gives(cluster: LiveCluster, model: Path) -> None:
    """Covers seeds, several choices and penalties, over both transports, with and without a cached prefix."""
    prompt = random_prompt(random.Random(10), 3 * BLOCK_SIZE + 5)
    sampling = Sampling(
        n=3, max_tokens=MAX_TOKENS, temperature=1.0, seed=5, presence_penalty=0.5, repetition_penalty=1.2, top_k=50
    )
    core = make_core(model, block_size=BLOCK_SIZE, num_blocks=64)
    found = run(core, [Request("one process", RequestSpec(prompt, sampling))])["one process"]
    expected = [[token.token_id for token in found[index]] for index in range(sampling.n)]
    names = ("n", "temperature", "seed", "presence_penalty", "repetition_penalty", "top_k")
    fields = {name: getattr(sampling, name) for name in names}
    for _ in range(2):
        assert together([partial(cluster.complete_choices, prompt, MAX_TOKENS, **fields)] * 4) == [expected] * 4
    cluster.wait_until("hits are told", lambda: cluster.instance("prefill-0")["num_prefix_hit_tokens"] > 0)
    cluster.assert_home()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MORE)
def test_more_architectures(checkpoint: Checkpoints, tmp_path: Path, architecture: str) -> None:
    """Sends prompts of one token, one block and several steps, all at once, then again from the prefix caches."""
    model, rng = checkpoint(architecture), random.Random(3)
    prompts = [random_prompt(rng, length) for length in (1, 16, 17, 41, 70, 100)]
    with LiveCluster(tmp_path, model, arguments=FLAGS) as cluster:
        for _ in range(2):
            complete_once(cluster, model, prompts)
        cluster.await_received("decode-0")
        cluster.assert_home()


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_the_routing(checkpoint: Checkpoints, tmp_path: Path, policy: str) -> None:
    """Many concurrent conversations and new prompts get the same tokens, wherever they are computed."""
    model = checkpoint("llama")
    rng = random.Random(31)
    flags = ["--num-blocks=200", "--max-model-len=256", f"--routing-policy={policy}"]
    with LiveCluster(tmp_path, model, 2, 2, flags) as cluster:

        def talk(prompt: list[int], name: str) -> None:
            for _ in range(3):
                output = cluster.complete(prompt, 12, prompt_cache_key=name)
                assert_same(model, prompt, output, 12)
                prompt = [*prompt, *output, *random_prompt(random.Random(name), 20)]

        prompts = [random_prompt(rng, rng.randrange(1, 120)) for _ in range(30)]
        together([partial(talk, prompt, f"u{at}") for at, prompt in enumerate(prompts)], 10)
        cluster.assert_home()
        hits = sum(instance["num_prefix_hit_tokens"] for instance in cluster.instances())
        assert hits > 0
