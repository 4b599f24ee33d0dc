"""Units of different shapes, many models: random arrivals, pressure, and numbers independent of other members."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import assert_greedy, make_checkpoint
from tests.support.cluster import LiveCluster, together
from tests.support.engines import assert_all_same, random_prompt
from tests.support.units import UnitShape, at_random_times, members_of, numbers, prompts_of, unit_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Checkpoints = Callable[..., Path]
SHAPES = [
    (UnitShape(2), UnitShape(2, tp_size=2)),
    (UnitShape(2, tp_size=2), UnitShape(4)),
    (UnitShape(4), UnitShape(2)),
]
NUM_REQUESTS, MAX_TOKENS = 64, 24
MEAN_S = 0.1  # mean time between two requests
MOST_ROUNDS = 6  # on a busy machine fewer requests overlap
FLAGS = ["--block-size=8", "--max-model-len=160"]
PRESSED = ["--max-num-batched-tokens=40", "--num-blocks=40", "--growth-tokens=8"]  # chunks; two long answers fit
LONG = 90  # length of an answer in tokens
FULL = {"qwen3_moe": {"use_sliding_window": False}}  # with windows in all layers, few blocks would be needed


def transport_of(name: str) -> list[str]:
    """Returns the transport flags of a decode instance, which cover both kinds of links."""
    return [f"--kv-transport={'dist' if int(name[-1]) % 2 else 'shm'}"] if name.startswith("decode") else []


def num_preemptions(cluster: LiveCluster) -> int:
    return sum(i["num_preemptions"] for i in cluster.instances())


@pytest.mark.parametrize(("prefill", "decode"), SHAPES, ids=lambda shape: str(shape))
@pytest.mark.parametrize("architecture", ["deepseek_v3", "glm4_moe", "qwen3_moe", "gpt_oss"])
def test_64_requests_while_members_fall_idle(
    checkpoint: Checkpoints, tmp_path: Path, architecture: str, prefill: UnitShape, decode: UnitShape
) -> None:
    """Requests arrive at random, over shm and dist; then more come at once than the pools hold, and are preempted."""
    folder, rng = checkpoint(architecture, **FULL.get(architecture, {})), random.Random(64)
    shared = random_prompt(rng, 48)
    prompts = [
        [*(shared if at % 3 == 0 else []), *random_prompt(rng, rng.randrange(1, 60))] for at in range(NUM_REQUESTS)
    ]
    limits = [rng.randrange(1, MAX_TOKENS) for _ in prompts]
    swaps = decode.size == 4
    mode = ["--preemption-mode=swap", "--swap-space=0.1"] if swaps else ["--preemption-mode=recompute"]
    with unit_cluster(tmp_path, folder, prefill, decode, [*FLAGS, *PRESSED, *mode], own=transport_of) as cluster:
        assert {state for i in cluster.instances() for state in i["links"].values()} == {"up (shm)", "up (dist)"}
        outputs = at_random_times(cluster, rng, prompts, limits, MEAN_S)
        assert_all_same(folder, prompts, outputs, limits)
        cluster.assert_home()
        for name in members_of("decode", decode):
            assert 0 < cluster.instance(name)["num_idle_rounds"] < cluster.instance(name)["num_rounds"], name
        crowd = [random_prompt(rng, rng.randrange(30, 60)) for _ in range(6 * decode.size)]
        for _ in range(MOST_ROUNDS):
            outputs = cluster.complete_together(crowd, LONG, ignore_eos=True)
            for prompt, output in zip(crowd, outputs, strict=True):
                assert len(output) == LONG
                assert_greedy(folder, prompt, output)
            cluster.assert_home()  # afterwards the instances have reported their steps
            if num_preemptions(cluster) > 0:
                break
        else:
            raise AssertionError("no sequence was preempted")


WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 2,
    "initializer_range": 0.05,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 8,
}


@pytest.mark.parametrize("shape", [UnitShape(2), UnitShape(2, tp_size=2)], ids=lambda shape: str(shape))
def test_numbers_are_the_same_alone_and_beside_busy_mates(tmp_path: Path, shape: UnitShape) -> None:
    """Both units have the same shape, because it determines the order of sums and so the last bits.

    Prompts are computed in one chunk, because a one-row chunk would be computed like a decode step.
    """
    folder = make_checkpoint(tmp_path / "model", "qwen3_moe", **WIDE)
    prompts = prompts_of(4, (5, 1, 33, 16, 2, 60, 90, 41))
    flags = [*FLAGS, "--num-blocks=256", "--no-enable-prefix-caching"]
    with unit_cluster(tmp_path, folder, shape, shape, flags) as cluster:
        alone = [numbers(cluster, prompt, 8) for prompt in prompts]
        for _ in range(2):
            assert together([partial(numbers, cluster, prompt, 8) for prompt in prompts]) == alone
        cluster.assert_home()
