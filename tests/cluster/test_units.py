"""Units in clusters of real processes: the experts are divided among all instances of a role."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pd_cluster import LLM, SamplingParams
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.cluster import together
from tests.support.engines import assert_all_same, make_core, run
from tests.support.reference_beams import assert_same_beams
from tests.support.units import UnitShape, log_of, members_of, prompts_of, unit_cluster

Checkpoints = Callable[..., Path]
MAX_TOKENS = 12
PREFILL, DECODE = UnitShape(2), UnitShape(2, tp_size=2)
ARGUMENTS = ["--max-num-batched-tokens=40", "--num-blocks=128", "--max-model-len=240"]


def test_unlike_units_on_either_side(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Runs chunks, prefix hits, several choices, beams and a guide together; then a whole unit ends."""
    folder, prompts = checkpoint("qwen3_moe"), prompts_of(5, (1, 17, 41, 90))
    drawn = Sampling(n=3, max_tokens=MAX_TOKENS, temperature=1.0, seed=5)
    beams = Sampling(n=3, beam_width=3, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    with unit_cluster(tmp_path, folder, PREFILL, DECODE, ARGUMENTS) as cluster:
        ask = partial(cluster.complete_choices, max_tokens=MAX_TOKENS)
        greedy = [partial(ask, prompt) for prompt in prompts]
        others = [
            partial(ask, prompts[3], n=3, temperature=1.0, seed=5),
            partial(ask, prompts[1], n=3, use_beam_search=True, ignore_eos=True),
            partial(ask, prompts[2], guided_regex="([a-f]{2} ){3}"),
        ]
        guided = {"prompt": prompts[2], "max_tokens": 20, "temperature": 0, "guided_regex": "([a-f]{2} ){3}"}
        for _ in range(2):
            found = together([*greedy, *others])
            assert_all_same(folder, prompts, [tokens for (tokens,) in found[:4]], MAX_TOKENS)
            assert found[4] == in_one_process(folder, prompts[3], drawn)
            assert_same_beams(folder, prompts[1], found[5], beams)
        assert re.fullmatch("([a-f]{2} ){3}", cluster.ask("/v1/completions", guided)["choices"][0]["text"])
        hits = lambda: any(i["num_prefix_hit_tokens"] for i in cluster.instances())  # noqa: E731
        cluster.wait_until("hits are told", hits)
        cluster.assert_home()
        cluster.kill("decode-1", signal.SIGTERM)
        for name in members_of("decode", DECODE):
            assert cluster.await_exit(name) == 0, log_of(cluster, name)


def in_one_process(folder: Path, prompt: list[int], sampling: Sampling) -> list[list[int]]:
    found = run(make_core(folder, num_blocks=64), [Request("r", RequestSpec(prompt, sampling))])["r"]
    return [[token.token_id for token in found[index]] for index in range(sampling.n)]


@pytest.mark.usefixtures("one_preloader")
def test_units_of_a_python_program(checkpoint: Checkpoints) -> None:
    """Tokens equal generate()'s, and an answer's numbers are the same alone in its unit and beside others."""
    folder, prompts = checkpoint("qwen3_moe"), prompts_of(6, (1, 17, 60))
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=1)
    with LLM(str(folder), data_parallel_size=2, num_blocks=64, enable_prefix_caching=False) as llm:
        alone = [llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0] for prompt in prompts]
        beside = [answer.outputs[0] for answer in llm.generate(prompts, greedy, use_tqdm=False)]
        units = {each.name: each.unit for each in llm.offline.service.router.membership.instances}
    assert units == {f"{role}-{rank}": f"{role}-0..1" for role in ("prefill", "decode") for rank in range(2)}
    assert_all_same(folder, prompts, [list(answer.token_ids) for answer in alone], MAX_TOKENS)
    assert [answer.logprobs for answer in beside] == [answer.logprobs for answer in alone]
