"""Real processes whose steps, including those of prompts to hand over, are launched ahead of the host."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.support.cluster import SAME_HOST, LiveCluster, together
from tests.support.engines import assert_all_same, random_prompt

SHIM = Path(__file__).parents[1] / "support" / "ahead_shim"
MAX_TOKENS = 12
FLAGS = ["--spawn", "--block-size=16", "--max-num-batched-tokens=40", "--num-blocks=128"]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ahead") / "steps"


@pytest.fixture(scope="module")
def cluster(model: Path, notes: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Yields a prefill instance, a decode instance over host memory, and one over gloo."""
    transports = {"decode-0": [f"--kv-transport={SAME_HOST}"], "decode-1": ["--kv-transport=dist"]}
    paths = [str(SHIM), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
        patch.setenv("AHEAD_NOTES", str(notes))
        folder = tmp_path_factory.mktemp("cluster")
        with LiveCluster(folder, model, num_decode=2, arguments=FLAGS, member_arguments=transports) as running:
            yield running


def test_prompts_are_handed_over_while_the_next_step_is_under_way(
    cluster: LiveCluster, model: Path, notes: Path
) -> None:
    rng = random.Random(3)
    prompts = [random_prompt(rng, rng.choice([1, 16, 17, 41, 90, 120])) for _ in range(32)]
    assert_all_same(model, prompts, cluster.complete_together(prompts, MAX_TOKENS), MAX_TOKENS)
    cluster.await_received("decode-0", "decode-1")
    assert notes.stat().st_size > 20
    cluster.assert_home()


def test_clients_leave_while_their_prompts_are_under_way(cluster: LiveCluster, model: Path) -> None:
    """An aborted prompt's blocks may be reused while a step launched for it still runs."""
    rng = random.Random(4)
    prompts = [random_prompt(rng, 120) for _ in range(24)]

    def leave(prompt: list[int]) -> list[int]:
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
        with contextlib.suppress(httpx.ReadTimeout):
            cluster.client.post(f"{cluster.url}/v1/completions", json=body, timeout=rng.uniform(0.02, 0.3))
        return []

    def stay(prompt: list[int]) -> list[int]:
        return cluster.complete(prompt, MAX_TOKENS)

    found = together([partial(leave if at % 3 else stay, prompt) for at, prompt in enumerate(prompts)])
    assert_all_same(model, prompts[::3], found[::3], MAX_TOKENS)
    cluster.assert_home()
