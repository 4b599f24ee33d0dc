"""Every latent type, with index keys, under everything that can happen to a request in one process.

One type of each kind is tested quickly.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.native.packed_products import multiplies_bf16
from pd_cluster.types import Guide, Request, RequestSpec, Sampling
from tests.support.checkpoints import prefers
from tests.support.engines import assert_all_same, generate, make_core, random_prompt, run
from tests.support.more_checkpoints import INDEXED, LATENT_TYPES
from tests.support.reference_beams import assert_all_same_beams

Checkpoints = Callable[..., Path]
FUSED = [name for name in (*LATENT_TYPES, *INDEXED) if name != "longcat_flash"]
ALL = [*FUSED, "longcat_flash"]
GREEDY = Sampling(max_tokens=16, temperature=0.0)
SETTINGS: dict[str, Any] = {"block_size": 4, "num_blocks": 160, "max_model_len": 128}
slow = pytest.mark.slow
QUICK = (
    "deepseek_v3 1",
    "deepseek_v3 5",
    "deepseek_v3 17",
    "deepseek_v3 swap",
    "deepseek_v3 recompute",
    "glm_moe_dsa swap",
)


def every(seconds: Iterable[Any]) -> list[Any]:
    """Returns all types with each of these values; those of QUICK are not slow."""
    pairs = itertools.product(ALL, seconds)
    return [pytest.param(name, each, marks=() if f"{name} {each}" in QUICK else slow) for name, each in pairs]


def quick(*names: str, of: Sequence[str] = ALL) -> list[Any]:
    return [name if name in names else pytest.param(name, marks=slow) for name in of]


def assert_said(folder: Path, prompts: list[list[int]], outputs: list[list[int]], sampling: Sampling) -> None:
    """Compares with generate(), or, for types with an indexer, with passes over whole sequences."""
    if folder.name.startswith(INDEXED):
        assert prefers(folder, prompts, outputs, [sampling.max_tokens] * len(prompts))
    else:
        assert_all_same(folder, prompts, outputs, sampling.max_tokens)


@pytest.fixture
def folder(architecture: str, checkpoint: Checkpoints, tmp_path: Path) -> Path:
    place = tmp_path / architecture
    place.symlink_to(checkpoint(architecture))
    return place


@pytest.mark.parametrize(("architecture", "num_tokens"), every(range(1, 18)))
def test_chunks_of_every_length(folder: Path, num_tokens: int) -> None:
    """Covers steps that begin anywhere in a block, beside other sequences."""
    rng = random.Random(num_tokens)
    prompts = [random_prompt(rng, length) for length in (1, 7, 33, 60)]
    core = make_core(folder, max_num_batched_tokens=num_tokens, **{**SETTINGS, "block_size": 3})
    assert_said(folder, prompts, generate(core, prompts, GREEDY), GREEDY)


@slow
@pytest.mark.parametrize("architecture", ALL)
def test_32_at_once(folder: Path) -> None:
    rng = random.Random(2)
    prompts = [random_prompt(rng, rng.randrange(1, 90)) for _ in range(32)]
    core = make_core(folder, max_num_batched_tokens=128, **{**SETTINGS, "block_size": 16})
    assert_said(folder, prompts, generate(core, prompts, GREEDY), GREEDY)


@pytest.mark.parametrize(("architecture", "mode"), every(("recompute", "swap")))
def test_sequences_that_are_preempted(folder: Path, mode: str) -> None:
    """Runs four sequences that grow to 13 blocks each, in a pool of 30."""
    rng, sampling = random.Random(2), Sampling(max_tokens=40, temperature=0.0)
    prompts = [random_prompt(rng, 10) for _ in range(4)]
    core = make_core(folder, block_size=4, num_blocks=30, preemption_mode=mode, swap_space_gib=0.01, max_model_len=64)
    outputs = generate(core, prompts, sampling)
    assert core.scheduler.num_preemptions
    assert_said(folder, prompts, outputs, sampling)


@pytest.mark.parametrize("architecture", quick("glm_moe_dsa"))
def test_cached_prefixes_forks_beams_and_guides(folder: Path) -> None:
    prompt = random_prompt(random.Random(7), 70)
    core = make_core(folder, max_num_batched_tokens=40, **{**SETTINGS, "block_size": 8})
    (answer,) = generate(core, [prompt], GREEDY)
    for again, num_cached in ((prompt, 64), ([*prompt, *answer, 5, 6], 80)):
        request = Request("again", RequestSpec(again, GREEDY))
        run(core, [request])
        assert request.num_cached_tokens == num_cached
        assert_said(folder, [again], [request.output_token_ids], GREEDY)
    forked = run(core, [Request("n", RequestSpec(prompt[:45], Sampling(max_tokens=16, temperature=0.0, n=3)))])["n"]
    outputs = [[token.token_id for token in forked[index]] for index in range(3)]
    assert_said(folder, [prompt[:45]] * 3, outputs, GREEDY)
    beams = Sampling(n=4, beam_width=4, temperature=0.0, max_tokens=12)
    found = run(core, [Request("b", RequestSpec(prompt[:33], beams))])["b"]
    outputs = [[token.token_id for token in found[index]] for index in range(4)]
    assert_all_same_beams(folder, [prompt[:33]], [outputs], beams)
    guide = Guide("choice", '["forced", "other words"]')
    guided = Request("g", RequestSpec(prompt[:20], Sampling(max_tokens=20, temperature=0.0, guide=guide)))
    run(core, [guided, Request("beside", RequestSpec(prompt, GREEDY))])
    text = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(guided.output_token_ids)
    assert text in ("forced", "other words")


Numbers = list[tuple[int, Any]]


def numbers(
    core: EngineCore, prompts: dict[str, list[int]], num_tokens: int, given: dict[str, Numbers] | None = None
) -> dict[str, Numbers]:
    """Returns tokens and logprobs. `given`: tokens already generated, as in a replay."""
    requests = []
    for at, (name, prompt) in enumerate(prompts.items()):
        sampling = Sampling(max_tokens=num_tokens, temperature=0.0, logprobs=4, ignore_eos=True)
        requests.append(Request(name, RequestSpec(prompt, sampling), arrival_s=float(at)))
        if given is not None:
            requests[-1].output_token_ids += [token_id for token_id, _ in given[name]]
    found = run(core, requests)
    return {name: [(token.token_id, token.logprobs) for token in tokens[0]] for name, tokens in found.items()}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("architecture", quick("minicpm3", "glm_moe_dsa", of=FUSED))
def test_logprobs_are_equal_to_the_bit(folder: Path) -> None:
    """Logprobs are equal alone, batched, in chunks, after a swap or recomputation, and when continued elsewhere."""
    rng = random.Random(3)
    prompts = {str(i): random_prompt(rng, rng.randrange(1, 45)) for i in range(32)}
    few = {name: prompts[name] for name in ("0", "1", "2", "3")}
    settings = {**SETTINGS, "num_blocks": 700, "enable_prefix_caching": False}
    core = make_core(folder, **settings)
    whole = numbers(core, prompts, 12)
    expected = {name: whole[name] for name in few}
    for name, prompt in few.items():
        assert numbers(core, {name: prompt}, 12)[name] == expected[name], "alone"
    for num_tokens in (1, 5, 17):
        chunked = make_core(folder, max_num_batched_tokens=num_tokens, **settings)
        assert numbers(chunked, few, 12) == expected, f"in chunks of {num_tokens}"
    most = sum(-(-(len(prompt) + 12) // 4) for prompt in few.values())
    tight = {**settings, "num_blocks": most - 6, "max_model_len": 64, "swap_space_gib": 0.01}
    for mode in ("swap", "recompute"):
        pressed = make_core(folder, preemption_mode=mode, **tight)
        assert numbers(pressed, few, 12) == expected, f"after a preemption in mode {mode}"
        assert pressed.scheduler.num_preemptions
    begun = {name: said[:5] for name, said in expected.items()}
    assert numbers(core, few, 12, begun) == {name: said[5:] for name, said in expected.items()}, "continued elsewhere"


@pytest.mark.skipif(not multiplies_bf16(), reason="this processor does not multiply bfloat16")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("architecture", quick("glm4_moe_lite", of=FUSED))
def test_bfloat16_weights(architecture: str, checkpoint: Checkpoints) -> None:
    """Fused bfloat16 rows have the same bits in any chunk or batch and after a replay, and are close to float32.

    With large weights, rounding would change the choice of experts.
    """
    folder, rng = checkpoint(architecture, initializer_range=0.08), random.Random(4)
    prompts = {str(i): random_prompt(rng, length) for i, length in enumerate((1, 20, 41))}
    settings = {**SETTINGS, "enable_prefix_caching": False, "dtype": "bfloat16"}
    core = make_core(folder, **settings)
    assert isinstance(core.runner.model, FusedCausalLM)  # type: ignore[attr-defined]
    expected = numbers(core, prompts, 8)
    for name, prompt in prompts.items():
        assert numbers(core, {name: prompt}, 8)[name] == expected[name], "alone"
    chunked = make_core(folder, max_num_batched_tokens=7, **settings)
    assert numbers(chunked, prompts, 8) == expected
    begun = {name: said[:3] for name, said in expected.items()}
    assert numbers(core, prompts, 8, begun) == {name: said[3:] for name, said in expected.items()}
    wide = numbers(make_core(folder, **{**settings, "dtype": "float32"}), prompts, 1)
    for name, ((_, logprobs),) in wide.items():
        found = dict(expected[name][0][1].top)
        changes = [abs(found[token_id] - value) for token_id, value in logprobs.top if token_id in found]
        assert len(changes) > 1
        assert max(changes) < 0.3
