"""Units in clusters of real processes: instances of one role whose experts are spread over all of them."""

from __future__ import annotations

import random
from pathlib import Path

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import LiveCluster
from tests.support.engines import assert_all_same, random_prompt

MAX_TOKENS = 12


def test_a_unit_on_either_side(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_moe")
    rng = random.Random(5)
    prompts = [random_prompt(rng, length) for length in (1, 17, 41, 90)]
    arguments = ["--data-parallel-size=2", "--max-num-batched-tokens=40", "--num-blocks=128", "--max-model-len=240"]
    with LiveCluster(tmp_path, folder, 2, 2, arguments) as cluster:
        outputs = cluster.complete_together(prompts, MAX_TOKENS)
        assert_all_same(folder, prompts, outputs, MAX_TOKENS)
        outputs = [cluster.complete(prompt, MAX_TOKENS) for prompt in prompts]
        assert_all_same(folder, prompts, outputs, MAX_TOKENS)
        cluster.assert_home()
