"""Sparse latent attention across real processes: index keys are sent with latents, to other block sizes and ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_death import goes_on_after_a_kill
from tests.cluster.test_exact import complete_all, complete_once
from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import LiveCluster
from tests.support.engines import assert_all_same, random_prompt

pytestmark = pytest.mark.slow  # tests/unit/test_planes.py sends planes over each transport quickly
MAX_TOKENS = 12
LENGTHS = (1, 16, 17, 41, 70, 100)
BLOCK_SIZE = 16
# Bytes per token. Two of glm_moe_dsa's four layers have index keys.
NBYTES = {"deepseek_v32": 3 * (48 + 16 + 64) * 4, "glm_moe_dsa": (4 * (48 + 16) + 2 * 64) * 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "glm_moe_dsa")


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Yields a prefill rank, a two-rank decode instance with another block size, and a decode instance of one rank."""
    arguments = ["--max-num-batched-tokens=40", "--num-blocks=256", "--max-model-len=480"]
    unlike = {"decode-0": ["--block-size=8"]}
    place = tmp_path_factory.mktemp("sparse")
    with LiveCluster(
        place, folder, num_decode=2, arguments=arguments, tp_sizes={"decode-0": 2}, member_arguments=unlike
    ) as running:
        yield running


def test_the_split_says_what_the_model_says(cluster: LiveCluster, folder: Path) -> None:
    """Sends all prompts at once, then again from the prefix caches."""
    rng = random.Random(3)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    complete_all(cluster, folder, prompts)
    complete_once(cluster, folder, prompts)
    cluster.assert_home()


@pytest.mark.parametrize("architecture", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("sizes", [(1, 4), (4, 1), (2, 4)])
@pytest.mark.parametrize("transport", ["shm", "dist"])
def test_ranks_of_other_numbers(tmp_path: Path, architecture: str, sizes: tuple[int, int], transport: str) -> None:
    """Each decode rank gets all latents and index keys once, for any block sizes."""
    folder, rng = make_checkpoint(tmp_path / "model", architecture), random.Random(4)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    arguments = ["--max-num-batched-tokens=40", "--num-blocks=64", "--max-model-len=240", f"--kv-transport={transport}"]
    by_role = dict(zip(("prefill-0", "decode-0"), sizes, strict=True))
    own = {"decode-0": ["--block-size=24"]} if transport == "dist" else {}
    with LiveCluster(tmp_path, folder, arguments=arguments, tp_sizes=by_role, member_arguments=own) as running:
        outputs = [running.complete(prompt, MAX_TOKENS) for prompt in prompts]
        assert_all_same(folder, prompts, outputs, MAX_TOKENS)
        num_tokens = sum(LENGTHS) if own else sum(-(-length // BLOCK_SIZE) * BLOCK_SIZE for length in LENGTHS)
        expected = sizes[1] * num_tokens * NBYTES[architecture]
        running.wait_until(
            "all planes are counted, once for each rank",
            lambda: running.instance("decode-0")["kv_received_nbytes"] == expected,
        )
        running.assert_home()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_kill_in_mid_request(cluster: LiveCluster, folder: Path, role: str) -> None:
    goes_on_after_a_kill(cluster, folder, role, 400)
