"""Windowed layers across real processes: only the tokens in their window are sent."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pd_cluster.kv.layer_groups import first_token_of
from tests.cluster.test_death import goes_on_after_a_kill
from tests.support.cluster import LiveCluster
from tests.support.engines import assert_all_same, make_core, random_prompt

MAX_TOKENS, BLOCK_SIZE = 40, 16
LENGTHS = (1, 16, 24, 41, 70, 300)
ARGUMENTS = ["--max-num-batched-tokens=40", "--num-blocks=256", f"--block-size={BLOCK_SIZE}"]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "dist"])
@pytest.mark.parametrize("architecture", ["gpt_oss", "mimo_v2_flash", "gemma4_text"])
def test_the_split_sends_what_is_seen(
    checkpoint: Callable[[str], Path], tmp_path: Path, architecture: str, transport: str
) -> None:
    """Checks the sent bytes exactly; then sends all prompts again, at once and from the prefix caches."""
    rng, folder = random.Random(4), checkpoint(architecture)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    with LiveCluster(tmp_path, folder, arguments=[*ARGUMENTS, f"--kv-transport={transport}"]) as running:
        outputs = [running.complete(prompt, MAX_TOKENS) for prompt in prompts]
        assert_all_same(folder, prompts, outputs, MAX_TOKENS)
        core = make_core(folder, block_size=BLOCK_SIZE, num_blocks=64, max_model_len=256)
        whole, near = (pool.layout for pool in core.runner.pools)  # type: ignore[attr-defined]
        assert near.window == 24
        expected = 0
        for length in LENGTHS:
            stop = -(-length // BLOCK_SIZE) * BLOCK_SIZE  # whole blocks
            expected += stop * whole.token_nbytes
            expected += (stop - first_token_of(near.holds, length, BLOCK_SIZE)) * near.token_nbytes
        running.wait_until(
            "all blocks are counted",
            lambda: running.instance("decode-0")["kv_received_nbytes"] == expected,
        )
        assert_all_same(folder, prompts, running.complete_together(prompts, MAX_TOKENS), MAX_TOKENS)
        running.assert_home()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2), (4, 2)])
@pytest.mark.parametrize("architecture", ["gemma2", "gemma3_text"])
def test_windows_of_ranks_of_other_numbers(
    checkpoint: Callable[[str], Path], tmp_path: Path, architecture: str, sizes: tuple[int, int]
) -> None:
    """Also covers five turns of a conversation."""
    rng, folder = random.Random(5), checkpoint(architecture)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    by_role = dict(zip(("prefill-0", "decode-0"), sizes, strict=True))
    arguments = [*ARGUMENTS, "--kv-transport=dist"]
    with LiveCluster(tmp_path, folder, arguments=arguments, tp_sizes=by_role) as running:
        assert_all_same(folder, prompts, running.complete_together(prompts, MAX_TOKENS), MAX_TOKENS)
        turn = prompts[-2]
        for _ in range(5):
            answer = running.complete(turn, MAX_TOKENS)
            assert_all_same(folder, [turn], [answer], MAX_TOKENS)
            turn = [*turn, *answer, *random_prompt(rng, 9)]
        running.assert_home()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt_oss", "gemma3_text", "mimo_v2_flash", "gemma4_text"])
def test_a_kill_of_each_role(checkpoint: Callable[[str], Path], tmp_path: Path, architecture: str) -> None:
    folder = checkpoint(architecture)
    with LiveCluster(tmp_path, folder, num_decode=2, arguments=ARGUMENTS) as running:
        for role in ("prefill", "decode"):
            goes_on_after_a_kill(running, folder, role, 450)


@pytest.mark.slow
def test_an_instance_with_a_host_cache_and_one_without(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """A host cache needs windowed layers in the common pool; a flag gives decode, without a host cache, that pool."""
    rng, folder = random.Random(6), checkpoint("gpt_oss")
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    own = {"prefill-0": ["--kv-host-cache=0.01"], "decode-0": ["--disable-hybrid-kv-cache-manager"]}
    with LiveCluster(tmp_path, folder, arguments=ARGUMENTS, member_arguments=own) as running:
        for _ in range(2):
            assert_all_same(folder, prompts, running.complete_together(prompts, MAX_TOKENS), MAX_TOKENS)
        running.assert_home()
