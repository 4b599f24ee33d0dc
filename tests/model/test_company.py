"""A request's numbers do not depend on other requests in its batch, in models as wide as real ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.model.layers import activations
from pd_cluster.types import Request, RequestSpec, Sampling, TokenOutput
from tests.support.checkpoints import CONFIGS, make_checkpoint
from tests.support.engines import make_core, random_prompt, run
from tests.support.more_checkpoints import MORE

WIDTH = 1280  # beyond 1,024 inputs oneDNN computes a single row differently
PROMPT_LENGTHS = (7, 1, 33, 16, 40, 2)
SAMPLING = Sampling(max_tokens=6, temperature=0.0, logprobs=4, ignore_eos=True)
QUICK = ("llama", "gemma", "qwen2_moe", "gpt_oss")  # each kind of layer once

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in sorted({*CONFIGS, *MORE} - {*QUICK})]

Elementwise = Callable[[torch.Tensor], torch.Tensor]
REPLACED: dict[str, tuple[Elementwise, Elementwise]] = {
    "sigmoid": (activations.sigmoid, torch.sigmoid),
    "silu": (activations.silu, functional.silu),
    "gelu_tanh": (activations.gelu_tanh, lambda x: functional.gelu(x, approximate="tanh")),
}

Numbers = dict[str, list[tuple[int, Any]]]


def wide(folder: Path, architecture: str) -> Path:
    changes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH + 256,
        "num_attention_heads": WIDTH // 128,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_hidden_layers": 2,
        "initializer_range": 0.05,
    }
    own = MORE[architecture] if architecture in MORE else CONFIGS[architecture]
    if own.get("num_key_value_heads", 2) is None:
        changes["num_key_value_heads"] = None
    if "kv_lora_rank" in own:  # its heads are computed from latents, with their own widths
        changes |= {"num_key_value_heads": WIDTH // 128, "head_dim": own["head_dim"]}
    for name in ("layer_types", "no_rope_layers", "mlp_layer_types"):
        if name in own:
            changes[name] = own[name][:2]
    if architecture == "mimo_v2_flash":  # windowed layers have twice as many KV heads
        changes["num_key_value_heads"] = WIDTH // 256
    if "num_kv_shared_layers" in own:  # the last two layers reuse keys of the first two
        kinds = ["sliding_attention", "full_attention"] * 2
        changes |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": kinds}
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size", "word_embed_proj_dim"):
        if name in own:
            changes[name] = WIDTH
    return make_checkpoint(folder, architecture, **changes)


def requests_of(prompts: list[list[int]], chosen: Iterable[int]) -> list[Request]:
    return [Request(str(i), RequestSpec(prompts[i], SAMPLING), arrival_s=float(i)) for i in chosen]


def tell(found: dict[str, dict[int, list[TokenOutput]]]) -> Numbers:
    return {name: [(token.token_id, token.logprobs) for token in tokens[0]] for name, tokens in found.items()}


def numbers(model: Path, prompts: list[list[int]], alone: bool = False, **settings: Any) -> Numbers:
    """Returns tokens and logprobs of all prompts, batched or one by one, without cached prefixes."""
    settings = {"num_blocks": 64, "max_model_len": 200, "enable_prefix_caching": False, **settings}
    return numbers_of(make_core(model, **settings), prompts, alone)


def numbers_of(core: EngineCore, prompts: list[list[int]], alone: bool = False) -> Numbers:
    if not alone:
        return tell(run(core, requests_of(prompts, range(len(prompts)))))
    each = [tell(run(core, requests_of(prompts, [only]))) for only in range(len(prompts))]
    return {name: tokens for found in each for name, tokens in found.items()}


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [random_prompt(rng, length) for length in PROMPT_LENGTHS]


@pytest.mark.usefixtures("one_thread", "freed")
@pytest.mark.parametrize("architecture", [*QUICK, *SLOW])
def test_alone_and_among_others(tmp_path: Path, architecture: str) -> None:
    """Tokens and logprobs are equal bit for bit, alone and in a batch."""
    core = make_core(wide(tmp_path, architecture), num_blocks=64, max_model_len=200, enable_prefix_caching=False)
    prompts = prompts_of(1)
    together = numbers_of(core, prompts)
    assert all(logprobs is not None for tokens in together.values() for _, logprobs in tokens)
    assert numbers_of(core, prompts, alone=True) == together


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("function", "own"), REPLACED.values(), ids=REPLACED)
def test_activations_of_a_row(function: Elementwise, own: Elementwise, threads: int) -> None:
    """A row's activations do not depend on adjacent rows, and equal torch's."""
    torch.manual_seed(1)
    torch.set_num_threads(threads)
    for width in (4, 16, 48, 11008):  # a vector has 16 numbers, and 32 are computed at a time
        x = torch.randn(13, width) * 3
        found = function(x)
        for start, stop in ((0, 1), (12, 13), (3, 5), (1, 8)):
            assert torch.equal(function(x[start:stop].clone()), found[start:stop])
        torch.testing.assert_close(found, own(x), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(function(x.bfloat16()), own(x.bfloat16()))
    ends = torch.tensor([-1e30, -100.0, 0.0, 100.0, 1e30])
    torch.testing.assert_close(function(ends), own(ends))


@pytest.mark.usefixtures("one_thread", "freed")
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_after_a_preemption(tmp_path: Path, mode: str) -> None:
    """After a swap, results are equal bit for bit. After recomputing, which sums attention in another order for prompts
    than for single tokens, tokens are equal and logprobs are within float32's precision.
    """
    model, prompts = wide(tmp_path, "llama"), prompts_of(1)
    settings: dict[str, Any] = {"block_size": 4, "max_model_len": 60, "enable_prefix_caching": False}
    free = numbers(model, prompts, **settings)
    core = make_core(model, num_blocks=16, preemption_mode=mode, **settings)
    pressed = tell(run(core, requests_of(prompts, range(len(prompts)))))
    assert core.scheduler.num_preemptions > 0
    if mode == "swap":
        assert pressed == free
    for name, tokens in free.items():
        assert [token_id for token_id, _ in pressed[name]] == [token_id for token_id, _ in tokens]
        found = [logprobs.logprob for _, logprobs in pressed[name]]
        assert found == pytest.approx([logprobs.logprob for _, logprobs in tokens], abs=1e-4)
