"""States across real processes: they leave once the prompt is computed, and decode begins with them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_death import goes_on_after_a_kill
from tests.cluster.test_exact import complete_all, complete_once
from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import LiveCluster
from tests.support.engines import assert_all_same, make_core, random_prompt
from tests.support.hybrids import HYBRIDS

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
    """All at once, then again from the prefix caches."""
    rng = random.Random(3)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    complete_all(cluster, folder, prompts)
    complete_once(cluster, folder, prompts)
    cluster.assert_home()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "dist"])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_every_hybrid(tmp_path: Path, architecture: str, transport: str) -> None:
    """Five turns of a conversation, too; what came over is counted to the byte."""
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
@pytest.mark.parametrize("architecture", ["qwen3_next", "kimi_linear", "bamba", "falcon_h1", "lfm2", "nemotron_h"])
def test_ranks_of_other_numbers(tmp_path: Path, architecture: str, sizes: tuple[int, int]) -> None:
    """Heads of states, and channels of each part of a convolution, come from the ranks that have them."""
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
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_kill_in_mid_request(cluster: LiveCluster, folder: Path, role: str) -> None:
    goes_on_after_a_kill(cluster, folder, role, 450)
