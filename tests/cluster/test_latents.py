"""Latent attention across real processes; every rank on either side has all latents."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_death import goes_on_after_a_kill
from tests.cluster.test_exact import complete_all, complete_once
from tests.support.checkpoints import ROPE, make_checkpoint
from tests.support.cluster import LiveCluster
from tests.support.engines import assert_all_same, random_prompt

MAX_TOKENS = 16
BLOCK_SIZE = 16
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


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 4), (4, 1), (2, 4)])
@pytest.mark.parametrize("transport", ["shm", "dist"])
def test_ranks_of_other_numbers(tmp_path: Path, folder: Path, sizes: tuple[int, int], transport: str) -> None:
    rng = random.Random(4)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    arguments = ["--max-num-batched-tokens=40", "--num-blocks=64", f"--kv-transport={transport}"]
    by_role = dict(zip(("prefill-0", "decode-0"), sizes, strict=True))
    with LiveCluster(tmp_path, folder, arguments=arguments, tp_sizes=by_role) as running:
        outputs = [running.complete(prompt, MAX_TOKENS) for prompt in prompts]
        assert_all_same(folder, prompts, outputs, MAX_TOKENS)
        num_tokens = sum(-(-length // BLOCK_SIZE) * BLOCK_SIZE for length in LENGTHS)  # whole blocks
        config = json.loads((folder / "config.json").read_text())
        width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        expected = sizes[1] * num_tokens * config["num_hidden_layers"] * width * 4
        running.wait_until(
            "all latents are counted, once for each rank",
            lambda: running.instance("decode-0")["kv_received_nbytes"] == expected,
        )
        running.assert_home()


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_kill_in_mid_request(cluster: LiveCluster, folder: Path, role: str) -> None:
    goes_on_after_a_kill(cluster, folder, role, 450)
