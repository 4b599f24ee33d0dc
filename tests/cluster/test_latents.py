"""Latent attention across real processes; every rank on either side has all latents."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_exact import complete_all, complete_once
from tests.support.checkpoints import ROPE, make_checkpoint
from tests.support.cluster import LiveCluster
from tests.support.engines import random_prompt

LENGTHS = (1, 16, 17, 41, 70, 100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "deepseek_v3", rope_parameters=ROPE)


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Yields a prefill instance of one rank, with decode instances of two ranks and of one."""
    arguments = ["--max-num-batched-tokens=40", "--num-blocks=256"]
    place = tmp_path_factory.mktemp("latents")
    with LiveCluster(place, folder, num_decode=2, arguments=arguments, tp_sizes={"decode-0": 2}) as running:
        yield running


def test_the_split_says_what_generate_says(cluster: LiveCluster, folder: Path) -> None:
    """Sends all prompts at once, then again from the prefix caches; each rank receives a token's latents once."""
    rng = random.Random(3)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    complete_all(cluster, folder, prompts)
    complete_once(cluster, folder, prompts)
    cluster.assert_home()
