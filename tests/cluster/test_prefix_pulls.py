"""Prefill instances pull cached prefixes from each other: the same tokens, and nothing stays held when an end dies."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import LiveCluster
from tests.support.engines import random_prompt

Checkpoints = Callable[..., Path]
NUM_TOKENS = 3000  # of a prompt: computing them takes longer than copying them


@pytest.fixture(scope="module")
def cluster(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    model = checkpoint("llama", max_position_embeddings=16384)
    flags = ["--num-blocks=1024", "--prefix-pull", "--routing-policy=prefix-aware", "--dead-after=6"]
    with LiveCluster(tmp_path_factory.mktemp("pulls"), model, 2, 1, flags) as running:
        yield running


def steer(cluster: LiveCluster, target: str) -> None:
    """Drains the other prefill instance, which keeps its cache."""
    other = "prefill-0" if target == "prefill-1" else "prefill-1"
    for name, command, wanted in ((target, "undrain", "ready"), (other, "drain", "drained")):
        if cluster.instance(name)["state"] != wanted:
            cluster.order(f"/instances/{name}/{command}")
            cluster.wait_until(f"{name} is {wanted}", lambda name=name, wanted=wanted: is_in(cluster, name, wanted))


def is_in(cluster: LiveCluster, name: str, wanted: str) -> bool:
    return cluster.instance(name)["state"] == wanted


def test_a_prefix_comes_from_the_other_prefill_instance(cluster: LiveCluster) -> None:
    prompt = random_prompt(random.Random(1), NUM_TOKENS)
    steer(cluster, "prefill-0")
    expected = cluster.complete(prompt, 12)
    steer(cluster, "prefill-1")
    assert cluster.complete(prompt, 12) == expected
    cluster.assert_home()
    found = cluster.instance("prefill-1")
    assert (found["num_failed_pulls"], found["num_pulled_tokens"] // 16) == (0, (NUM_TOKENS - 1) // 16)
