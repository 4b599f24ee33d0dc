"""Contexts beyond a model's training length, across the split: P, D and every replay rotate positions alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_death import PROMPT, caught
from tests.model.test_rope_lengths import DYNAMIC, SHAPES, TRAINED, assert_by_length
from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import LiveCluster
from tests.support.engines import random_prompt

NUM_TOKENS = 700


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    return make_checkpoint(place, "llama", rope_parameters=DYNAMIC, max_position_embeddings=TRAINED)


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Yields a one-rank prefill instance, and decode instances of two ranks and of one."""
    arguments = ["--max-model-len=1024", "--num-blocks=256"]
    place = tmp_path_factory.mktemp("rope")
    sizes = {"decode-0": 2}
    with LiveCluster(place, folder, num_decode=2, arguments=arguments, tp_sizes=sizes) as running:
        yield running


def test_answers_of_all_lengths_across_the_split(cluster: LiveCluster, folder: Path) -> None:
    """The second round finds its prefixes in both sides' caches, under the roots for their lengths."""
    rng = random.Random(8)
    prompts, limits = [random_prompt(rng, length) for length, _ in SHAPES], [limit for _, limit in SHAPES]
    for _ in range(2):
        found = cluster.complete_together(prompts * 2, limits * 2, concurrency=6)
        for prompt, output, limit in zip(prompts * 2, found, limits * 2, strict=True):
            assert_by_length(folder, prompt, output, limit)
    cluster.assert_home()
    assert any(cluster.instance(name)["kv_received_nbytes"] for name in ("decode-0", "decode-1"))


@pytest.mark.slow
def test_a_replay_keeps_the_length(cluster: LiveCluster, folder: Path) -> None:
    """A replayed request has fewer remaining tokens, but the same length for rope."""
    expected = cluster.complete(PROMPT, NUM_TOKENS)
    assert_by_length(folder, PROMPT, expected, NUM_TOKENS)
    stream, begun, victim = caught(cluster, NUM_TOKENS)
    cluster.kill(victim)
    (rest,) = stream.to_the_end()
    assert begun[0] + rest == expected
    cluster.restart(victim)
    cluster.assert_home()
