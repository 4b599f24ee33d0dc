"""An engine with a hybrid model: states are cached by prefix, copied for forks, swapped and recomputed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tokenizers import Tokenizer

from pd_cluster.engine.assembly.build_engine import keep_rule_of
from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.scheduling.step_plan import StepPlan
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import ConfigError
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.lora_settings import AdapterSettings
from pd_cluster.types import Guide, Request, RequestSpec, Sampling, TokenOutput
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_all_same, generate, make_core, random_prompt, run, together
from tests.support.hybrids import HYBRIDS
from tests.support.usual import slow_but

GREEDY = Sampling(max_tokens=20, temperature=0.0)
SCORED = Sampling(max_tokens=12, temperature=0.0, logprobs=4, ignore_eos=True)
SIZE = 16
ROOM: dict[str, Any] = {
    "block_size": SIZE,
    "num_blocks": 160,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 100,
    "state_cache_gib": 0.05,
    "mamba_block_size": 64,
}
BY_MODULES = ("bailing_hybrid", "olmo_hybrid")
pytestmark = pytest.mark.usefixtures("one_thread")
Checkpoints = Callable[..., Path]


def core_of(folder: Path, **settings: Any) -> EngineCore:
    return make_core(folder, **{**ROOM, **settings})


def test_adapters_are_refused_by_name(checkpoint: Checkpoints) -> None:
    """Gated attention's rows are reordered, which is not supported for adapters' rows."""
    with pytest.raises(ConfigError, match=r"^--enable-lora: qwen3_next keeps states"):
        core_of(checkpoint("qwen3_next"), adapters=AdapterSettings(enable_lora=True))


def states_of(core: EngineCore) -> Any:
    (found,) = (each for each in core.scheduler.groups if each.rule.is_state)
    return found.blocks


def hits(core: EngineCore, prompts: list[list[int]], sampling: Sampling = GREEDY) -> tuple[int, list[list[int]]]:
    """Returns the number of cached prompt tokens, and the answers."""
    before = core.scheduler.num_prefix_hit_tokens
    found = generate(core, prompts, sampling)
    return core.scheduler.num_prefix_hit_tokens - before, found


@pytest.mark.parametrize("architecture", slow_but(("qwen3_next", "kimi_linear", "bamba", "olmo_hybrid"), HYBRIDS))
def test_prompts_of_every_length(checkpoint: Checkpoints, architecture: str) -> None:
    """Runs prompts alone, all at once, and again from kept states."""
    folder, rng = checkpoint(architecture), random.Random(1)
    core = core_of(folder)
    prompts = [random_prompt(rng, n) for n in (1, 2, 16, 17, 63, 64, 65, 130, 300)]
    alone = [generate(core, [prompt], GREEDY)[0] for prompt in prompts[1::3]]
    assert_all_same(folder, prompts[1::3], alone, GREEDY.max_tokens)
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)
    num_hits, again = hits(core, prompts)
    assert num_hits == sum((len(prompt) - 1) // SIZE * SIZE for prompt in prompts)
    assert_all_same(folder, prompts, again, GREEDY.max_tokens)
    assert states_of(core).num_held == 0


BUDGETS = ("1", "63", "64", "65", "random")
CUTS = [f"{name} {budget}" for name in HYBRIDS for budget in BUDGETS]
# Latents with C attention, because torch's order of summation depends on the rows.
IN_C: dict[str, Any] = {"kimi_linear": {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 16}}
# Attention layers sum a single token in another order (docs/models.md), except latents in C.
CUTS_OF_FUSED = [
    case for case in CUTS if not case.startswith(BY_MODULES) and (case.startswith("kimi") or not case.endswith(" 1"))
]


def cut_core(folder: Path, budget: str, monkeypatch: pytest.MonkeyPatch) -> EngineCore:
    """Returns an engine with a fixed or random maximum of tokens per step."""
    if budget != "random":
        return core_of(folder, max_num_batched_tokens=int(budget))
    rng, plan = random.Random(budget), StepScheduler.plan

    def of_random_size(scheduler: StepScheduler) -> StepPlan:
        scheduler.max_num_batched_tokens = rng.randrange(1, 100)
        return plan(scheduler)

    monkeypatch.setattr(StepScheduler, "plan", of_random_size)
    return core_of(folder)


@pytest.mark.slow
@pytest.mark.parametrize("case", CUTS)
def test_cuts_change_no_token(checkpoint: Checkpoints, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk sizes change no token, also for prompts that begin from a kept state."""
    architecture, budget = case.split()
    folder, rng = checkpoint(architecture), random.Random(12)
    prompts = [random_prompt(rng, n) for n in (130, 66, 17)]
    core = cut_core(folder, budget, monkeypatch)
    for _ in range(2):
        assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)
    assert core.scheduler.num_prefix_hit_tokens


@pytest.mark.parametrize("case", slow_but(("qwen3_next 64", "qwen3_next 65"), CUTS_OF_FUSED))
def test_bits_do_not_depend_on_cuts(checkpoint: Checkpoints, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With our state kernels, logprobs are the same for any chunks, in any batch, and from a kept state."""
    architecture, budget = case.split()
    folder, rng = checkpoint(architecture, **IN_C.get(architecture, {})), random.Random(2)
    prompts = [random_prompt(rng, n) for n in (200, 70, 31)]
    whole = core_of(folder, max_num_batched_tokens=512)
    assert isinstance(whole.runner.model, FusedCausalLM)  # type: ignore[attr-defined]
    expected = [scored(whole, [prompt])[0] for prompt in prompts]
    cut = cut_core(folder, budget, monkeypatch)
    assert scored(cut, prompts) == expected
    assert scored(cut, prompts) == expected, "expected hits from kept states"


@pytest.mark.parametrize(
    "architecture", slow_but(("qwen3_next",), [each for each in HYBRIDS if each not in BY_MODULES])
)
def test_a_swap_changes_no_bit(checkpoint: Checkpoints, architecture: str) -> None:
    folder, rng = checkpoint(architecture), random.Random(11)
    prompts = [random_prompt(rng, n) for n in (60, 50, 70, 44)]
    core = core_of(folder, num_blocks=15, preemption_mode="swap", swap_space_gib=0.1, max_model_len=200)
    long = structs.replace(SCORED, max_tokens=40)
    found = scored(core, prompts, long)
    assert core.scheduler.num_preemptions
    assert found == scored(core_of(folder), prompts, long)


def scored(core: EngineCore, prompts: list[list[int]], sampling: Sampling = SCORED) -> list[list[tuple[int, Any]]]:
    requests = [Request(f"r{i}", RequestSpec(prompt, sampling), arrival_s=float(i)) for i, prompt in enumerate(prompts)]
    found = run(core, requests)
    return [numbers(found[request.request_id][0]) for request in requests]


def numbers(tokens: list[TokenOutput]) -> list[tuple[int, Any]]:
    return [(each.token_id, each.logprobs) for each in tokens]


@pytest.mark.parametrize("architecture", slow_but(("falcon_h1",), HYBRIDS))
def test_each_place_where_a_state_is_kept(checkpoint: Checkpoints, architecture: str) -> None:
    folder, rng = checkpoint(architecture), random.Random(3)
    core = core_of(folder)
    long = random_prompt(rng, 200)
    hits(core, [long])
    num_hits, _ = hits(core, [long[:150] + random_prompt(rng, 9)])
    assert num_hits == 128, "expected a state at every 64 tokens of a prompt"
    shared = [random_prompt(rng, 40) for _ in range(3)]
    prompts = [shared[0] + random_prompt(rng, 20) for _ in range(3)]
    assert [hits(core, [prompt])[0] for prompt in prompts] == [0, 0, 32], "expected a state where prompts diverge"
    turn, (answer,) = prompts[0], hits(core, [prompts[0]])[1]
    for _ in range(4):  # turns of a conversation
        turn = [*turn, *answer, *random_prompt(rng, 7)]
        known = len(turn) - 8  # the last token of an answer is not computed
        num_hits, (answer,) = hits(core, [turn])
        assert num_hits == known // SIZE * SIZE, "expected a state at the end of a sequence"
        assert_all_same(folder, [turn], [answer], GREEDY.max_tokens)


def test_states_are_kept_as_they_are_wanted(checkpoint: Checkpoints) -> None:
    folder, prompt = checkpoint("lfm2"), random_prompt(random.Random(4), 100)
    for mode, kept, hit in (("none", 0, 0), ("align", 3, 96), ("all", 7, 96)):
        core = core_of(folder, mamba_cache_mode=mode)
        first = hits(core, [prompt])[1]
        assert states_of(core).num_cached == kept, mode
        assert hits(core, [prompt]) == (hit, first), mode


def test_long_prompts_are_kept_at_ends_of_blocks_of_any_size(checkpoint: Checkpoints) -> None:
    config = EngineConfig(model=str(checkpoint("lfm2")), block_size=48)
    assert keep_rule_of(config, 48).interval == 1056
    assert states_of(core_of(checkpoint("lfm2"), block_size=48, mamba_block_size=None)).num_blocks > 8


def test_least_recently_used_states_go(checkpoint: Checkpoints) -> None:
    folder, rng = checkpoint("lfm2"), random.Random(5)
    core = core_of(folder, max_num_seqs=1, state_cache_gib=1e-5)
    num_states = states_of(core).num_blocks
    assert 2 <= num_states < 40
    prompts = [random_prompt(rng, 40) for _ in range(num_states + 8)]
    for prompt in prompts:
        hits(core, [prompt])
    assert hits(core, prompts[:1])[0] == 0
    assert hits(core, prompts[-1:])[0] == 32


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("architecture", slow_but(("qwen3_next",), HYBRIDS))
def test_preempted_sequences_go_on(checkpoint: Checkpoints, architecture: str, mode: str) -> None:
    folder, rng = checkpoint(architecture), random.Random(6)
    core = core_of(folder, num_blocks=14, preemption_mode=mode, swap_space_gib=0.1, max_model_len=200)
    prompts = [random_prompt(rng, rng.randrange(30, 70)) for _ in range(12)]
    long = Sampling(max_tokens=60, temperature=0.0)
    found = generate(core, prompts, long)
    assert core.scheduler.num_preemptions
    assert_all_same(folder, prompts, found, 60)


@pytest.mark.parametrize("architecture", slow_but(("qwen3_next",), HYBRIDS))
def test_sequences_and_beams_have_states_of_their_own(checkpoint: Checkpoints, architecture: str) -> None:
    """Several sequences and beams equal those of an engine that computes each alone."""
    folder, rng = checkpoint(architecture), random.Random(7)
    core, company = core_of(folder), [random_prompt(rng, n) for n in (40, 5, 90)]
    drawn = Sampling(n=3, max_tokens=16, temperature=1.0, seed=5, ignore_eos=True)
    beams = Sampling(beam_width=3, n=2, max_tokens=10, temperature=0.0, ignore_eos=True)
    prompt = random_prompt(rng, 50)
    for sampling in (drawn, beams):
        orders = [RequestSpec(prompt, sampling), *(RequestSpec(each, GREEDY) for each in company)]
        together = run(core, [Request(f"r{i}", order, arrival_s=float(i)) for i, order in enumerate(orders)])["r0"]
        alone = run(core_of(folder, num_blocks=64), [Request("r", RequestSpec(prompt, sampling))])["r"]
        assert {at: ids_of(each) for at, each in together.items()} == {at: ids_of(each) for at, each in alone.items()}
        assert len({tuple(ids_of(each)) for each in together.values()}) == len(together)
    for index in range(3):  # each continues from its own tokens
        tokens = ids_of(run(core, [Request("again", RequestSpec(prompt, drawn))])["again"][index])
        again = Sampling(max_tokens=8, temperature=0.0)
        whole = [*prompt, *tokens]
        assert_all_same(folder, [whole], generate(core, [whole], again), 8)


@pytest.mark.parametrize("architecture", slow_but(("qwen3_next",), HYBRIDS))
def test_guides_and_predictions(checkpoint: Checkpoints, architecture: str) -> None:
    """Forced and predicted tokens are computed one after the other."""
    folder, rng = checkpoint(architecture), random.Random(10)
    prompt, company = random_prompt(rng, 33), random_prompt(rng, 20)
    (free,) = generate(core_of(folder), [prompt], GREEDY)
    wrong = [*free[:3], 1, *free[4:]]
    guided = structs.replace(GREEDY, guide=Guide("regex", "[a-c]{4} forced [0-9]{4}"), max_tokens=40)
    core = core_of(folder)
    predicted = RequestSpec(prompt, GREEDY, prediction=tuple(wrong))
    found = together(core, [predicted, RequestSpec(company, guided), RequestSpec(prompt, guided)])
    assert found[0] == free
    assert found[1:] == [together(core_of(folder), [RequestSpec(each, guided)])[0] for each in (company, prompt)]
    text = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(found[2])
    assert re.fullmatch("[a-c]{4} forced [0-9]{4}", text)


def ids_of(tokens: list[TokenOutput]) -> list[int]:
    return [each.token_id for each in tokens]


@pytest.mark.parametrize("architecture", slow_but(("qwen3_next", "nemotron_h"), HYBRIDS))
def test_32_at_once(checkpoint: Checkpoints, architecture: str) -> None:
    folder, rng = checkpoint(architecture), random.Random(8)
    core = core_of(folder, num_blocks=400, max_num_seqs=32)
    prompts = [random_prompt(rng, rng.randrange(1, 90)) for _ in range(32)]
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)


def test_wide_layers_give_the_bits_of_each_request_alone(tmp_path: Path) -> None:
    folder, rng = wide(tmp_path), random.Random(9)
    core = core_of(folder, max_num_batched_tokens=64)
    prompts = [random_prompt(rng, n) for n in (7, 1, 70, 33)]
    alone = [scored(core_of(folder), [prompt])[0] for prompt in prompts]
    assert scored(core, prompts) == alone


def wide(folder: Path) -> Path:
    return make_checkpoint(
        folder,
        "qwen3_next",
        hidden_size=1280,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        initializer_range=0.05,
    )
