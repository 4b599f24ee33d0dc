"""Defines the names of adapted forms of a model, as in `RequestSpec.variant`: the form determines what a request's
tokens mean.

"" is the model itself; the digest of a LoRA adapter (64 hex digits) is the model with this adapter. A prompt adapter is
KIND-N-DIGEST: N virtual tokens precede the prompt, as embeddings (`prompt`) or as computed keys and values (`prefix`).
"""

from __future__ import annotations

import re
from typing import Literal

PromptKind = Literal["prompt", "prefix"]
ADAPTER = "^((prompt|prefix)-[1-9][0-9]{0,4}-)?[0-9a-f]{64}$"  # the name of any adapter
PROMPT = re.compile("(?:prompt|prefix)-([1-9][0-9]{0,4})-[0-9a-f]{64}")
PLACEHOLDER = 0  # the token id in place of a virtual token


def prompt_variant(kind: PromptKind, num_tokens: int, digest: str) -> str:
    return f"{kind}-{num_tokens}-{digest}"


def num_virtual_tokens(variant: str) -> int:
    """Returns how many of a prompt's first tokens are placeholders for an adapter's virtual tokens."""
    found = PROMPT.fullmatch(variant) if "-" in variant else None
    return int(found[1]) if found else 0


def num_given_tokens(variant: str) -> int:
    """Returns how many of a prompt's first tokens have keys and values from an adapter."""
    return num_virtual_tokens(variant) if variant.startswith("prefix-") else 0


def short_name(digest: str) -> str:
    """Returns a shortened name of an adapter, for uses where a collision costs only time."""
    return digest[-16:]


def lora_of(variant: str) -> str:
    """Returns the digest of the LoRA adapter; "" for another variant."""
    return "" if num_virtual_tokens(variant) else variant
