"""Every latent type (index keys included) across real processes: both transports, other block sizes and rank counts.

Slow; test_latents.py tests one type quickly.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.types import Request, RequestSpec, Sampling
from tests.cluster.test_death import goes_on_after_a_kill
from tests.cluster.test_exact import complete_all, complete_once
from tests.support.checkpoints import ROPE, make_checkpoint
from tests.support.cluster import SAME_HOST, LiveCluster, together
from tests.support.engines import assert_all_same, make_core, random_prompt, run
from tests.support.more_checkpoints import INDEXED, LATENT_TYPES
from tests.support.reference_beams import assert_same_beams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MAX_TOKENS = 16
LENGTHS = (1, 16, 17, 41, 70, 100)
FLAGS = ["--max-num-batched-tokens=40", "--num-blocks=256", "--max-model-len=480"]
PLAIN: dict[str, Any] = {"rope_parameters": ROPE}  # YaRN's positions would limit a long answer
# Bytes per token: layers times (latent of 48, 16 rotated values), plus two layers' index keys.
NBYTES = {**dict.fromkeys(LATENT_TYPES, 3 * 64 * 4), "longcat_flash": 4 * 64 * 4}
NBYTES |= {"deepseek_v32": 3 * 128 * 4, "glm_moe_dsa": (4 * 64 + 2 * 64) * 4}
OTHER_BLOCKS = 24


@pytest.fixture(scope="module", params=[*LATENT_TYPES, *INDEXED])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = PLAIN if request.param.startswith("deepseek_v3") else {}
    return make_checkpoint(tmp_path_factory.mktemp("model") / request.param, request.param, **changes)


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Yields a prefill rank, a decode rank over host memory, and one over gloo with another block size."""
    own = {
        "decode-0": [f"--kv-transport={SAME_HOST}"],
        "decode-1": ["--kv-transport=dist", f"--block-size={OTHER_BLOCKS}"],
    }
    place = tmp_path_factory.mktemp("types")
    with LiveCluster(place, folder, num_decode=2, arguments=FLAGS, member_arguments=own) as running:
        yield running


def test_the_split_says_what_the_model_says(cluster: LiveCluster, folder: Path) -> None:
    """Sends all prompts at once, again from the prefix caches, then 32 requests."""
    rng = random.Random(3)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    complete_all(cluster, folder, prompts)
    complete_once(cluster, folder, prompts)
    complete_all(cluster, folder, [random_prompt(rng, rng.randrange(1, 90)) for _ in range(32)])
    cluster.assert_home()


def test_forks_beams_and_guides(cluster: LiveCluster, folder: Path) -> None:
    rng = random.Random(5)
    prompts = [random_prompt(rng, length) for length in (17, 60)]
    drawn: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 5}
    forked = together([partial(cluster.complete_choices, prompt, MAX_TOKENS, **drawn) for prompt in prompts])
    orders = [RequestSpec(prompt, Sampling(max_tokens=MAX_TOKENS, **drawn)) for prompt in prompts]
    here = run(make_core(folder, num_blocks=64), [Request(f"{at}", order) for at, order in enumerate(orders)])
    assert forked == [[[token.token_id for token in each[index]] for index in range(3)] for each in here.values()]
    fields: dict[str, Any] = {"use_beam_search": True, "n": 3, "best_of": 4}
    sampling = Sampling(n=3, beam_width=4, max_tokens=MAX_TOKENS, temperature=0.0)
    found = together([partial(cluster.complete_choices, prompt, MAX_TOKENS, **fields) for prompt in prompts])
    for prompt, beams in zip(prompts, found, strict=True):
        assert_same_beams(folder, prompt, beams, sampling)
    body = {"prompt": prompts[0], "max_tokens": 30, "temperature": 0, "guided_choice": ["forced", "other words"]}
    answers = together([partial(cluster.ask, "/v1/completions", body)] * 4)
    (text,) = {answer["choices"][0]["text"] for answer in answers}
    assert text in ("forced", "other words")
    cluster.assert_home()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_kill_in_mid_request(cluster: LiveCluster, folder: Path, role: str) -> None:
    goes_on_after_a_kill(cluster, folder, role, 400)


@pytest.mark.parametrize("architecture", [*(name for name in LATENT_TYPES if name != "longcat_flash"), *INDEXED])
@pytest.mark.parametrize("sizes", [(1, 4), (4, 1), (2, 4)])
@pytest.mark.parametrize("transport", [SAME_HOST, "dist"])
def test_ranks_and_blocks_of_other_numbers(
    tmp_path: Path, architecture: str, sizes: tuple[int, int], transport: str
) -> None:
    """Each decode rank gets all latents once, and nothing else."""
    folder, rng = make_checkpoint(tmp_path / "model", architecture), random.Random(4)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    arguments = ["--max-num-batched-tokens=40", "--num-blocks=64", "--max-model-len=240", f"--kv-transport={transport}"]
    by_role = dict(zip(("prefill-0", "decode-0"), sizes, strict=True))
    own = {"decode-0": [f"--block-size={OTHER_BLOCKS}"]}
    with LiveCluster(tmp_path, folder, arguments=arguments, tp_sizes=by_role, member_arguments=own) as running:
        outputs = [running.complete(prompt, MAX_TOKENS) for prompt in prompts]
        assert_all_same(folder, prompts, outputs, MAX_TOKENS)
        expected = sizes[1] * sum(LENGTHS) * NBYTES[architecture]
        running.wait_until(
            "all planes are counted, once for each rank",
            lambda: running.instance("decode-0")["kv_received_nbytes"] == expected,
        )
        running.assert_home()
