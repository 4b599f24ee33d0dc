"""Ranks forked by a preloader compared with ranks started by command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.engine.start.preloader import forks_are_safe
from tests.support.cluster import LiveCluster, children_of, shared_preloader

BODIES: list[dict[str, Any]] = [
    {"prompt": [5, 6, 7, 8] * 9, "max_tokens": 8, "logprobs": 5, "temperature": 0},
    {"prompt": [9], "max_tokens": 12, "logprobs": 5, "temperature": 1.0, "seed": 3, "n": 3},
    {"prompt": [11, 12, 13] * 40, "max_tokens": 3, "prompt_logprobs": 2, "temperature": 0},
]


@pytest.mark.slow
def test_they_compute_the_same_bits(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Compares every logprob, not only tokens, for a model wide enough for packed weights and heads of 128."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2}
    model = checkpoint("llama", head_dim=128, **sizes)
    answers: list[list[Any]] = []
    for name, flags in (("forked", []), ("spawned", ["--spawn"])):
        folder = tmp_path / name
        folder.mkdir()
        with LiveCluster(folder, model, arguments=["--num-blocks=64", *flags]) as cluster:
            for worker in ("prefill-0", "decode-0"):
                (rank,) = cluster.rank_pids(worker)
                is_forked = not flags and forks_are_safe("auto")
                parent = shared_preloader().pid if is_forked else cluster.processes[worker].pid
                assert rank in children_of(parent)
            found = [cluster.client.post(f"{cluster.url}/v1/completions", json=body).json() for body in BODIES]
            answers.append([answer["choices"] for answer in found])
    forked, spawned = answers
    assert forked == spawned
