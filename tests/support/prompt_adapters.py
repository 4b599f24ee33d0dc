"""Prompt adapters that PEFT writes, random and strong enough to change tokens, and the tokens that PEFT generates."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import peft
import torch
import transformers

from pd_cluster.checkpoints.prompt_folder import PromptFolder

Kind = Literal["prompt", "p-tuning", "prefix"]


def _base(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def make_prompt_adapter(folder: Path, base: Path, kind: Kind = "prompt", num_tokens: int = 5, seed: int = 0) -> Path:
    """Writes an adapter for `base`."""
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


def peft_greedy(base: Path, adapter: Path | None, prompt: list[int], num_tokens: int) -> list[int]:
    """The greedy tokens of transformers' model with PEFT's adapter; None: without any.

    Each token by a pass of its own: PEFT 0.21's `generate()` gives other positions with transformers 5.24.
    """
    model = _base(base)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
    tokens = list(prompt)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(num_tokens):
            ids = torch.tensor([tokens])
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]
