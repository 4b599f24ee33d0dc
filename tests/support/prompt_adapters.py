"""Random prompt adapters written by PEFT, strong enough to change tokens, and PEFT's tokens with them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from pd_cluster.checkpoints.prompt_adapter_folder import PromptFolder

Kind = Literal["prompt", "p-tuning", "prefix"]


def _base(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def make_prompt_adapter(folder: Path, base: Path, kind: Kind = "prompt", num_tokens: int = 5, seed: int = 0) -> Path:
    """Writes an adapter for the model `base`."""
    import peft  # takes seconds

    torch.manual_seed(seed)
    common: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": num_tokens}
    config = {
        "prompt": lambda: peft.PromptTuningConfig(**common),
        "p-tuning": lambda: peft.PromptEncoderConfig(**common, encoder_hidden_size=16),
        "prefix": lambda: peft.PrefixTuningConfig(**common),
    }[kind]()
    model: Any = peft.get_peft_model(_base(base), config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "prompt_encoder" in name:
                weight.copy_(torch.randn_like(weight) * 0.7)
    model.save_pretrained(folder)
    return folder


def variant_of(folder: Path) -> str:
    return PromptFolder.read(folder).digest


@functools.lru_cache(maxsize=16)
def _adapted(base: Path, adapter: Path | None) -> Any:
    import peft

    model = _base(base)
    return model if adapter is None else peft.PeftModel.from_pretrained(model, adapter).eval()


def peft_greedy(
    base: Path, adapter: Path | None, prompt: list[int], num_tokens: int, guess: Sequence[int] = ()
) -> list[int]:
    """Returns the greedy tokens of transformers' model with PEFT's adapter; `adapter` None: without an adapter.

    `guess`: the probable tokens. One pass over prompt and guess yields all tokens up to the guess's first error; each
    later token takes one pass, because PEFT 0.21's `generate()` uses other positions with transformers 5.24.
    """
    model, tokens = _adapted(base, adapter), list(prompt)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while (num_missing := len(prompt) + num_tokens - len(tokens)) > 0:
            ahead = list(guess[len(tokens) - len(prompt) :][: num_missing - 1])
            ids = torch.tensor([tokens + ahead])
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            best = logits[0, -len(ahead) - 1 :].argmax(-1).tolist()
            num_right = next((at for at, token in enumerate(ahead) if token != best[at]), len(ahead))
            tokens += best[: num_right + 1]
            guess = guess if num_right == len(ahead) else ()
    return tokens[len(prompt) :]
