"""With right, wrong and invalid drafts, tokens, logprobs and finish reasons equal plain decoding, bit for bit.

More kinds of models: `pytest -m slow tests/model/test_drafts.py`, two minutes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.settings.speculation import Speculation
from pd_cluster.types import Guide, Request, RequestSpec, Sampling, TokenOutput
from tests.support.adapters import digest_of, loaded, make_adapter
from tests.support.checkpoints import EOS_ID, VOCAB_SIZE
from tests.support.drafts import AllDrafts, liars
from tests.support.engines import make_core, random_prompt, run
from tests.support.ranks import ranks

Checkpoints = Callable[..., Path]
Answers = dict[str, dict[int, list[TokenOutput]]]
KINDS = ("llama", "gpt_oss", "deepseek_v3", "mistral")
MORE_KINDS = ("cohere2", "qwen2_moe", "gemma3_text", "deepseek_v32", "gpt2", "phi3")
SLOW_KINDS = [pytest.param(name, marks=pytest.mark.slow) for name in MORE_KINDS]
# Prompts are computed whole and once, because their last bits depend on where chunks begin.
WHOLE: dict[str, Any] = {"max_model_len": 128, "max_num_batched_tokens": 640, "enable_prefix_caching": False}
SAMPLINGS = (
    Sampling(max_tokens=24, temperature=0.0, logprobs=3, ignore_eos=True),
    Sampling(max_tokens=20, n=3, temperature=0.8, top_p=0.9, seed=4, logprobs=0),
    Sampling(max_tokens=20, temperature=0.9, seed=5, repetition_penalty=1.2, presence_penalty=0.4, min_tokens=8),
    Sampling(max_tokens=24, temperature=0.0, frequency_penalty=0.3, stop_token_ids=tuple(range(0, 250, 9)), logprobs=1),
    Sampling(max_tokens=20, temperature=0.7, seed=6, top_k=8, bad_words=((65,), (66, 67)), logit_bias=((70, 2.5),)),
    Sampling(max_tokens=24, temperature=0.0, guide=Guide("regex", "[a-z]{3,6}-[0-9]+x(ab){4}"), logprobs=2),
    Sampling(max_tokens=30, temperature=0.6, seed=7, guide=Guide("json_object")),
)

pytestmark = pytest.mark.usefixtures("one_thread")


def requests_of(seed: int, num: int = 10, variants: Sequence[str] = ("",)) -> list[Request]:
    rng = random.Random(seed)
    orders = [
        RequestSpec(
            random_prompt(rng, rng.randrange(1, 34)),
            SAMPLINGS[at % len(SAMPLINGS)],
            variant=variants[at % len(variants)],
        )
        for at in range(num)
    ]
    return [Request(f"r{at}", order, arrival_s=float(at)) for at, order in enumerate(orders)]


def lying(core: EngineCore, answers: Answers, seed: int) -> EngineCore:
    """Gives the engine a drafter that knows the answers."""

    def truth(request: Request) -> list[int]:
        return [token.token_id for token in answers[request.request_id][request.index]]

    drafting = liars(core.scheduler, random.Random(seed), truth, VOCAB_SIZE, EOS_ID)
    return EngineCore(core.runner, core.scheduler, guides=core.guides, drafting=drafting)


def assert_same(found: Answers, expected: Answers) -> None:
    """Asserts the same tokens, logprobs, finish reasons and positions."""
    for name, choices in expected.items():
        for index, tokens in choices.items():
            for token, other in zip(found[name][index], tokens, strict=True):
                assert token == other, f"{name}, sequence {index}, token {other.position}"


def assert_drafts_change_nothing(make: Callable[[], EngineCore], requests: Callable[[], list[Request]]) -> EngineCore:
    """Asserts equal results with and without drafts; returns the last drafting engine."""
    expected = run(make(), requests())
    for seed in range(2):
        core = lying(make(), expected, seed)
        assert_same(run(core, requests()), expected)
        totals = core.drafting.totals
        assert totals.num_accepted_tokens > 60
        assert totals.num_draft_tokens - totals.num_accepted_tokens > 20
    return core


@pytest.mark.parametrize("architecture", [*KINDS, *SLOW_KINDS])
def test_engines(checkpoint: Checkpoints, architecture: str) -> None:
    """Runs ten requests together, with each kind of sampling twice."""
    folder = checkpoint(architecture)
    assert_drafts_change_nothing(
        lambda: make_core(folder, num_blocks=128, max_num_seqs=60, **WHOLE), lambda: requests_of(1)
    )


def test_adapters(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoint("llama")
    adapters = [make_adapter(tmp_path / f"a{at}", folder, at) for at in range(2)]
    settings = {**WHOLE, "adapters": loaded(*adapters)}
    variants = ("", *map(digest_of, adapters))
    assert_drafts_change_nothing(
        lambda: make_core(folder, num_blocks=128, max_num_seqs=60, **settings), lambda: requests_of(2, 12, variants)
    )


@pytest.mark.parametrize("architecture", ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_preemption(checkpoint: Checkpoints, architecture: str) -> None:
    """Swaps requests out and in, with blocks of 4 tokens."""
    folder = checkpoint(architecture)
    tight = {"num_blocks": 36, "block_size": 4, "preemption_mode": "swap", "swap_space_gib": 0.02, "growth_tokens": 0}
    core = assert_drafts_change_nothing(
        lambda: make_core(folder, max_num_seqs=60, **{**WHOLE, "max_model_len": 72, **tight}),
        lambda: requests_of(3, 12),
    )
    assert core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("architecture", ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_recomputation_keeps_tokens(checkpoint: Checkpoints, architecture: str) -> None:
    """With chunks, cached prefixes and recomputation, tokens are equal; logprobs may differ in the last bits."""
    folder = checkpoint(architecture)
    tight = {"num_blocks": 36, "block_size": 4, "max_model_len": 72, "max_num_batched_tokens": 24}
    expected = run(make_core(folder, num_blocks=512, block_size=4, max_model_len=72), requests_of(4))
    core = lying(make_core(folder, **tight, growth_tokens=0), expected, 4)
    found = run(core, requests_of(4))
    assert core.scheduler.num_preemptions > 0
    assert core.drafting.totals.num_accepted_tokens > 60
    for name, choices in expected.items():
        for index, tokens in choices.items():
            assert [each.token_id for each in found[name][index]] == [each.token_id for each in tokens]


@pytest.mark.parametrize("architecture", ["llama", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_ranks(checkpoint: Checkpoints, architecture: str) -> None:
    """Followers compute rows of drafts, too; all bits equal those of two ranks without drafts."""
    folder = checkpoint(architecture)
    settings = {**WHOLE, "num_blocks": 128, "max_num_seqs": 60}
    with ranks(folder, 2, **settings) as core:
        expected = run(core, requests_of(5))
    with ranks(folder, 2, **settings) as core:
        drafted = lying(core, expected, 5)
        assert_same(run(drafted, requests_of(5)), expected)
    assert drafted.drafting.totals.num_accepted_tokens > 60


def test_own_drafters(checkpoint: Checkpoints) -> None:
    """Covers repetitive prompts, a prediction of the answer, and a guide that forces text."""
    folder, rng = checkpoint("llama"), random.Random(6)
    settings: dict[str, Any] = {"num_blocks": 128, **WHOLE}
    copying = {"repetition_penalty": 0.6, "max_tokens": 40, "ignore_eos": True}  # makes the model repeat itself
    samplings = [
        Sampling(temperature=0.0, logprobs=2, **copying),
        Sampling(temperature=0.5, seed=1, **copying),
        Sampling(temperature=0.0, max_tokens=24, guide=Guide("regex", "abcdefgh[0-9]ijklmnop"), logprobs=0),
    ]
    orders = [RequestSpec((random_prompt(rng, 8) * 4)[: 20 + at], samplings[at % 3]) for at in range(6)]

    def asked(answers: Answers | None = None) -> list[Request]:
        """Returns requests. If given answers, the first three requests predict their own with one wrong token."""
        requests = []
        for at, order in enumerate(orders):
            if answers is not None and at < 3:
                expected = [token.token_id for token in answers[f"r{at}"][0]]
                order = replace(order, prediction=(*expected[:5], 1, *expected[6:]))
            requests.append(Request(f"r{at}", order, arrival_s=float(at)))
        return requests

    expected = run(make_core(folder, **settings), asked())
    core = make_core(folder, speculation=Speculation(methods=("ngram", "suffix")), **settings)
    core.drafting.size = AllDrafts()
    for _ in range(2):
        assert_same(without_reports(run(core, asked(expected))), expected)
    assert core.drafting.totals.num_accepted_tokens > 200


def without_reports(answers: Answers) -> Answers:
    """Returns the answers without reports on drafts."""
    return {
        name: {index: [replace(token, drafts=None) for token in tokens] for index, tokens in choices.items()}
        for name, choices in answers.items()
    }


@pytest.mark.parametrize(("dtype", "drafts"), [("float32", True), ("bfloat16", False)])
def test_no_drafts_where_company_matters(checkpoint: Checkpoints, dtype: str, drafts: bool) -> None:
    """There are no drafts for transformers' 16-bit modules on a CPU, whose rows depend on the batch."""
    core = make_core(checkpoint("gpt2"), dtype=dtype, device="cpu", num_blocks=16, max_model_len=64)
    core.drafting.size = AllDrafts()
    order = RequestSpec(
        [1, 2, 3], Sampling(temperature=0.0, max_tokens=9, ignore_eos=True), prediction=tuple(range(9)) * 3
    )
    run(core, [Request("r", order)])
    assert (core.drafting.totals.num_draft_tokens > 0) == drafts
