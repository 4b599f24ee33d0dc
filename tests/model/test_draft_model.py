"""Drafts by a second model are right if it is the target itself, and never change an answer."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster import LLM, SamplingParams
from pd_cluster.engine.draft.draft_size import DraftSize, Guess
from pd_cluster.engine.draft.step_costs import StepCosts
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import ConfigError, ModelError
from pd_cluster.model.runner import load_runner
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.settings.speculation import SampleMethod, Speculation
from pd_cluster.types import Request, RequestSpec, Sampling, TokenOutput
from pd_cluster.wire import SleepLevel
from tests.support.checkpoints import reference_greedy, reference_model
from tests.support.engines import MAX_STEPS, make_core, random_prompt, run

Checkpoints = Callable[..., Path]
Tokens = dict[str, dict[int, list[int]]]
pytestmark = pytest.mark.usefixtures("one_thread")
ROOM: dict[str, Any] = {"block_size": 8, "num_blocks": 256, "max_num_batched_tokens": 256, "max_model_len": 200}
GREEDY = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
DRAWN = Sampling(max_tokens=40, temperature=0.8, top_p=0.95, seed=7, ignore_eos=True)


class AnySize(DraftSize):
    """Makes and verifies a random number of drafts in each step."""

    def __init__(self, seed: int, least: int = 0) -> None:
        super().__init__()
        self._rng, self._least = random.Random(seed), least

    def can_pay(self, num_rows: int, drafters: Mapping[Request, Sequence[str]], most_each: int, most: int) -> bool:
        return True

    def depth(self, requests: Sequence[Request], drafter: str, costs: StepCosts, num_rows: int, most: int) -> int:
        return self._rng.randint(self._least, min(most, 6))

    def choose(self, num_rows: int, guesses: Mapping[Request, Guess], most: int) -> dict[Request, int]:
        return {request: len(guess.token_ids) for request, guess in guesses.items()}


def drafting_core(target: Path, draft: Path, method: SampleMethod = "probabilistic", **settings: Any) -> EngineCore:
    speculation = Speculation(methods=("draft_model",), model=str(draft), draft_sample_method=method)
    core = make_core(target, speculation=speculation, **{**ROOM, **settings})
    core.drafting.size = AnySize(5)
    return core


def traffic(seed: int, sampling: Iterable[Sampling] = (GREEDY, DRAWN)) -> list[Request]:
    """Returns prompts around block and catch-up boundaries, some with common prefixes."""
    rng = random.Random(seed)
    shared = random_prompt(rng, 67)
    prompts = [random_prompt(rng, length) for length in (1, 8, 33, 90)] + [shared, [*shared, 5], shared[:40] + [9] * 30]
    choices = list(sampling)
    orders = [RequestSpec(prompt, choices[at % len(choices)]) for at, prompt in enumerate(prompts)]
    return [Request(f"r{at}", order, arrival_s=float(at)) for at, order in enumerate(orders)]


def token_ids(told: Mapping[str, Mapping[int, Sequence[TokenOutput]]]) -> Tokens:
    return {key: {at: [each.token_id for each in own] for at, own in of.items()} for key, of in told.items()}


def plain(target: Path, requests: list[Request]) -> Tokens:
    return token_ids(run(make_core(target, **ROOM), requests))


def assert_all_right(core: EngineCore, least: int) -> None:
    told = core.drafting.totals.counts()
    assert told.num_tokens == told.num_accepted > least


FORKS = Sampling(max_tokens=30, temperature=1.0, seed=3, n=3, ignore_eos=True)


@pytest.mark.parametrize(
    ("architecture", "settings", "sampling"),
    [
        ("llama", {}, (GREEDY, DRAWN, FORKS)),
        ("llama", {"num_blocks": 40, "enable_prefix_caching": False}, (GREEDY, DRAWN)),
        ("llama", {"num_blocks": 40, "preemption_mode": "swap", "swap_space_gib": 0.01}, (GREEDY, DRAWN)),
        pytest.param("llama", {"kv_cache_dtype": "int8", "block_size": 16}, (GREEDY, DRAWN), marks=pytest.mark.slow),
        pytest.param("gemma3_text", {}, (GREEDY, DRAWN), marks=pytest.mark.slow),
        pytest.param("gpt2", {}, (GREEDY, DRAWN), marks=pytest.mark.slow),
    ],
)
def test_the_target_itself_drafts_what_it_will_say(
    checkpoint: Checkpoints, architecture: str, settings: dict[str, Any], sampling: tuple[Sampling, ...]
) -> None:
    folder = checkpoint(architecture)
    core = drafting_core(folder, folder, **settings)
    expected = token_ids(run(make_core(folder, **{**ROOM, **settings}), traffic(1, sampling)))
    assert token_ids(run(core, traffic(1, sampling))) == expected
    assert_all_right(core, 150)
    assert (core.scheduler.num_preemptions > 0) == ("num_blocks" in settings)
    num_drafts = core.drafting.totals.num_draft_tokens
    assert token_ids(run(core, traffic(1, sampling))) == expected, "the draft model's cached KV must be valid, too"
    assert_all_right(core, num_drafts + 150)


@pytest.mark.parametrize(
    "settings", [{}, {"num_blocks": 40, "preemption_mode": "swap", "swap_space_gib": 0.01}], ids=["room", "swap"]
)
def test_drafts_are_those_of_the_model_by_itself(checkpoint: Checkpoints, settings: dict[str, Any]) -> None:
    """Drafts of a mostly wrong second checkpoint depend only on real tokens, whatever was rejected before."""
    target, draft = checkpoint("llama"), checkpoint("qwen3", seed=1)
    expected, model = plain(target, traffic(2)), reference_model(draft)
    core, requests = drafting_core(target, draft, "greedy", **settings), traffic(2)
    for request in requests:
        core.scheduler.add(request)
    num_drafts = 0
    for _ in range(MAX_STEPS):
        if not core.scheduler.requests:
            break
        plan = core.plan()
        for request, drafts in plan.drafts.items():
            known = request.token_ids(0, request.num_tokens) + drafts
            with torch.inference_mode():
                logits = model(torch.tensor([known])).logits[0]
            assert logits[-len(drafts) - 1 : -1].argmax(-1).tolist() == drafts
            num_drafts += len(drafts)
        core.run(plan)
        core.scheduler.check()
    assert {request.request_id: {0: request.output_token_ids} for request in requests} == expected
    told = core.drafting.totals.counts()
    assert num_drafts == told.num_tokens > 150
    assert told.num_accepted < 0.5 * num_drafts, "the checkpoints are too similar for this test"


def test_after_sleep_nothing_is_taken_for_valid(checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama")
    core, expected = drafting_core(folder, folder), plain(folder, traffic(3))
    assert isinstance(core.runner, ModelRunner)
    levels: tuple[SleepLevel, ...] = (1, 2)
    for level in levels:
        assert token_ids(run(core, traffic(3))) == expected
        core.scheduler.blocks.forget()
        core.runner.sleep(level)
        core.runner.sleep(0)
    assert token_ids(run(core, traffic(3))) == expected
    assert_all_right(core, 300)


@pytest.mark.parametrize(("architecture", "keys", "most"), [("llama", {"max_model_len": 30}, 30), ("mistral", {}, 24)])
def test_it_drafts_no_further_than_its_length(
    checkpoint: Checkpoints, architecture: str, keys: dict[str, int], most: int
) -> None:
    """A draft model drafts up to its maximum length, or up to its layers' window, which releases older blocks."""
    folder = checkpoint(architecture)
    core = make_core(folder, speculation=Speculation(methods=("draft_model",), model=str(folder), **keys), **ROOM)
    core.drafting.size = AnySize(5, least=1)
    request = Request("r", RequestSpec(random_prompt(random.Random(4), 10), DRAWN), arrival_s=0.0)
    core.scheduler.add(request)
    lengths = []
    while core.scheduler.requests:
        plan = core.plan()
        lengths += [request.num_tokens + len(drafts) for drafts in plan.drafts.values()]
        core.run(plan)
    assert max(lengths) == most
    assert request.num_tokens == 50
    assert_all_right(core, 8)


def other_tokens(folder: Path, place: Path) -> Path:
    """Returns the same checkpoint with the ids of two tokens exchanged."""
    copied = Path(shutil.copytree(folder, place))
    file = copied / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer))
    return copied


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes reading weights fail."""

    def refuse(*_: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(load_runner, "load_parts", refuse)


@pytest.mark.usefixtures("unloaded")
def test_what_does_not_go_together_is_refused_before_the_target_loads(checkpoint: Checkpoints, tmp_path: Path) -> None:
    target = checkpoint("llama")
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (checkpoint("llama", vocab_size=300), {}, f"of 300 tokens, but {target} has 320; give another model"),
        (other_tokens(target, tmp_path / "other"), {}, "lacks 2 of the 320 tokens of"),
        (tmp_path / "none", {}, "--speculative-config: model"),
        (target, {"max_model_len": 513}, "max_model_len 513: "),
        (target, {"revision": "main"}, "--speculative-config: revision main: "),
    ]
    for folder, keys, error in cases:
        speculation = Speculation(methods=("draft_model",), model=str(folder), **keys)
        with pytest.raises((ConfigError, ModelError)) as caught:
            make_core(target, speculation=speculation, **ROOM)
        assert error in str(caught.value)
        assert "\n" not in str(caught.value)


def test_both_models_share_the_memory_of_the_pool(checkpoint: Checkpoints) -> None:
    target, draft = checkpoint("llama"), checkpoint("llama", seed=1, num_hidden_layers=1)
    alone, both = (
        make_core(target, kv_cache_memory_gib=0.01, block_size=8, speculation=each).scheduler.blocks.num_blocks
        for each in (Speculation(), Speculation(methods=("draft_model",), model=str(draft)))
    )
    assert both == pytest.approx(alone * 3 / 4, abs=1), "the draft model has a fourth layer"


@pytest.mark.usefixtures("one_preloader")
def test_over_a_split(checkpoint: Checkpoints) -> None:
    """Decode computes the draft model's KV for received prompts; rank processes know both model types."""
    folder, draft, rng = checkpoint("llama"), checkpoint("qwen3", seed=1), random.Random(6)
    prompts = [random_prompt(rng, length) for length in (3, 120)]
    params = SamplingParams(max_tokens=48, temperature=0.0)
    config = {"model": str(draft), "num_speculative_tokens": 4}
    with LLM(str(folder), prefill=1, decode=1, num_blocks=256, speculative_config=config) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    expected = [reference_greedy(folder, prompt, 48) for prompt in prompts]
    assert [list(each.outputs[0].token_ids) for each in outputs] == expected
