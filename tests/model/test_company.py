"""A request's numbers do not depend on the requests beside it, in models as wide as real ones."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.types import Order, Request, Sampling, TokenOutput
from tests.support.checkpoints import CONFIGS, make_checkpoint
from tests.support.engines import make_core, random_prompt, run
from tests.support.more_checkpoints import MORE

WIDTH = 1280  # beyond 1,024 oneDNN computes one row alone in another way
PROMPT_LENGTHS = (7, 1, 33, 16, 40, 2)
SAMPLING = Sampling(max_tokens=6, temperature=0.0, logprobs=4, ignore_eos=True)
QUICK = ("llama", "gemma", "qwen2_moe", "gpt_oss")  # each kind of layer once

NOT_PACKED = ("longcat_flash",)  # whose experts are of a kind of their own: tokens are the same, not bits
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in sorted({*CONFIGS, *MORE} - {*QUICK, *NOT_PACKED})]

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
    if "kv_lora_rank" in own:  # its heads are made anew, and have widths of their own
        changes |= {"num_key_value_heads": WIDTH // 128, "head_dim": own["head_dim"]}
    for name in ("layer_types", "no_rope_layers"):
        if name in own:
            changes[name] = own[name][:2]
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size", "word_embed_proj_dim"):
        if name in own:
            changes[name] = WIDTH
    return make_checkpoint(folder, architecture, **changes)


def requests_of(prompts: list[list[int]], chosen: Iterable[int]) -> list[Request]:
    return [Request(str(i), Order(prompts[i], SAMPLING), arrival_s=float(i)) for i in chosen]


def tell(found: dict[str, dict[int, list[TokenOutput]]]) -> Numbers:
    return {name: [(token.token_id, token.logprobs) for token in tokens[0]] for name, tokens in found.items()}


def numbers(model: Path, prompts: list[list[int]], alone: bool = False, **settings: Any) -> Numbers:
    """Tokens and logprobs, of all prompts together or of one after the other, without cached prefixes."""
    core = make_core(model, **{"num_blocks": 64, "max_model_len": 200, "enable_prefix_caching": False, **settings})
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
    """Tokens and logprobs are equal to the bit."""
    model, prompts = wide(tmp_path, architecture), prompts_of(1)
    together = numbers(model, prompts)
    assert all(logprobs is not None for tokens in together.values() for _, logprobs in tokens)
    assert numbers(model, prompts, alone=True) == together


@pytest.mark.usefixtures("one_thread", "freed")
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_after_a_preemption(tmp_path: Path, mode: str) -> None:
    """Swapped out and in again, to the bit. Computed again, tokens pass through the attention of prompts, which adds in
    another order than that of single tokens: the same tokens, and logprobs as close as float32 has them.
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
