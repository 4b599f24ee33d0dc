"""Recurrent states across real processes: they are sent once the prompt is computed, and decode begins from them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.types import Guide, Request, RequestSpec, Sampling
from tests.cluster.test_death import goes_on_after_a_kill
from tests.cluster.test_exact import complete_all, complete_once
from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import LiveCluster
from tests.support.engines import assert_all_same, make_core, random_prompt, run
from tests.support.hybrids import HYBRIDS

BY_MODULES = ("bailing_hybrid", "olmo_hybrid")  # architectures that run on one rank only
MAX_TOKENS = 16
BLOCK_SIZE = 16
LENGTHS = (1, 16, 17, 41, 70, 100)
ARGUMENTS = ["--max-num-batched-tokens=40", "--num-blocks=256"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_next")


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    with LiveCluster(tmp_path_factory.mktemp("states"), folder, num_decode=2, arguments=ARGUMENTS) as running:
        yield running


def test_the_split_says_what_generate_says(cluster: LiveCluster, folder: Path) -> None:
    """Sends all prompts at once, then again from the prefix caches."""
    rng = random.Random(3)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    complete_all(cluster, folder, prompts)
    complete_once(cluster, folder, prompts)
    cluster.assert_home()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "dist"])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_every_hybrid(tmp_path: Path, architecture: str, transport: str) -> None:
    """Also covers five turns of a conversation; checks the number of received bytes exactly."""
    rng = random.Random(4)
    folder = make_checkpoint(tmp_path / "model", architecture)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    arguments = [*ARGUMENTS, f"--kv-transport={transport}"]
    with LiveCluster(tmp_path, folder, arguments=arguments) as running:
        outputs = [running.complete(prompt, MAX_TOKENS) for prompt in prompts]
        assert_all_same(folder, prompts, outputs, MAX_TOKENS)
        pools = make_core(folder, block_size=BLOCK_SIZE, num_blocks=64, max_model_len=256).runner.pools  # type: ignore[attr-defined]
        num_tokens = sum(-(-length // BLOCK_SIZE) * BLOCK_SIZE for length in LENGTHS)  # whole blocks
        of_states = len(LENGTHS) * pools[-1].layout.block_nbytes
        expected = num_tokens * pools[0].layout.token_nbytes + of_states
        running.wait_until(
            "all blocks and states are counted",
            lambda: running.instance("decode-0")["kv_received_nbytes"] == expected,
        )
        turn = prompts[-1]
        for _ in range(5):
            answer = running.complete(turn, MAX_TOKENS)
            assert_all_same(folder, [turn], [answer], MAX_TOKENS)
            turn = [*turn, *answer, *random_prompt(rng, 9)]
        running.assert_home()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("architecture", [name for name in HYBRIDS if name not in BY_MODULES])
def test_ranks_of_other_numbers(tmp_path: Path, architecture: str, sizes: tuple[int, int]) -> None:
    """State heads, and channels of each part of a convolution, come from the ranks that have them."""
    rng = random.Random(5)
    folder = make_checkpoint(tmp_path / "model", architecture)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    by_role = dict(zip(("prefill-0", "decode-0"), sizes, strict=True))
    with LiveCluster(tmp_path, folder, arguments=[*ARGUMENTS, "--kv-transport=dist"], tp_sizes=by_role) as running:
        outputs = [running.complete(prompt, MAX_TOKENS) for prompt in prompts]
        assert_all_same(folder, prompts, outputs, MAX_TOKENS)
        assert_all_same(folder, prompts, running.complete_together(prompts, MAX_TOKENS), MAX_TOKENS)
        running.assert_home()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_kill_of_each_role(tmp_path: Path, architecture: str) -> None:
    folder = make_checkpoint(tmp_path / "model", architecture)
    with LiveCluster(tmp_path, folder, num_decode=2, arguments=ARGUMENTS) as running:
        for role in ("prefill", "decode"):
            goes_on_after_a_kill(running, folder, role, 450)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_the_split_has_the_sequences_of_one_process(tmp_path: Path, architecture: str) -> None:
    """Covers several sequences and beams of a chunked prompt, guided tokens, and 32 concurrent requests."""
    rng, folder = random.Random(6), make_checkpoint(tmp_path / "model", architecture)
    prompt, schema = random_prompt(rng, 70), {"type": "object", "properties": {"a": {"enum": ["forced"]}}}
    cases: list[tuple[dict[str, Any], Sampling]] = [
        (
            {"n": 3, "temperature": 1.0, "seed": 5, "ignore_eos": True},
            Sampling(n=3, max_tokens=MAX_TOKENS, temperature=1.0, seed=5, ignore_eos=True),
        ),
        (
            {"n": 2, "best_of": 3, "use_beam_search": True, "ignore_eos": True},
            Sampling(n=2, beam_width=3, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True),
        ),
        (
            {"guided_json": schema},
            Sampling(max_tokens=MAX_TOKENS, temperature=0.0, guide=Guide("json", json.dumps(schema))),
        ),
    ]
    many = [random_prompt(rng, rng.randrange(1, 90)) for _ in range(32)]
    core = make_core(folder, block_size=BLOCK_SIZE, num_blocks=256, max_num_batched_tokens=40)
    with LiveCluster(tmp_path, folder, arguments=ARGUMENTS) as running:
        for fields, sampling in cases:
            alone = run(core, [Request("r", RequestSpec(prompt, sampling))])["r"]
            expected = [[token.token_id for token in alone[index]] for index in sorted(alone)]
            assert running.complete_choices(prompt, MAX_TOKENS, **fields) == expected, fields
        assert_all_same(folder, many, running.complete_together(many, MAX_TOKENS), MAX_TOKENS)
        running.assert_home()
