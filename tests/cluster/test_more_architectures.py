"""Architectures of tests/support/more_checkpoints.py across real processes: prefilled by one, decoded by another."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import LiveCluster
from tests.support.engines import assert_all_same, random_prompt
from tests.support.more_checkpoints import MORE

pytestmark = pytest.mark.slow

MAX_TOKENS = 16
FLAGS = ["--block-size=16", "--max-num-batched-tokens=40", "--num-blocks=128"]
LENGTHS = (1, 16, 17, 41, 70, 100)


@pytest.mark.parametrize("architecture", MORE)
def test_the_split_says_what_generate_says(tmp_path: Path, architecture: str) -> None:
    """Prompts of one token, of a block, of several steps; all at once, then again from the prefix caches."""
    model = make_checkpoint(tmp_path / "model", architecture)
    rng = random.Random(3)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    with LiveCluster(tmp_path, model, arguments=FLAGS) as cluster:
        for _ in range(2):
            assert_all_same(model, prompts, cluster.complete_together(prompts, MAX_TOKENS), MAX_TOKENS)
        cluster.await_received("decode-0")
        cluster.assert_home()
