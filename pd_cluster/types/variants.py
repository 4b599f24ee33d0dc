"""Names of adapted forms of a model, as in `RequestSpec.variant`: they say what a request's tokens mean.

"" is the model itself, and the digest of a LoRA adapter (64 hex digits) the model with that beside its layers. A prompt
adapter is KIND-N-DIGEST: N virtual tokens come before the prompt's own, as embeddings (`prompt`) or as finished keys
and values (`prefix`).
"""

from __future__ import annotations

import re
from typing import Literal

PromptKind = Literal["prompt", "prefix"]
ADAPTER = "^((prompt|prefix)-[1-9][0-9]{0,4}-)?[0-9a-f]{64}$"  # the name of any adapter
PROMPT = re.compile("(?:prompt|prefix)-([1-9][0-9]{0,4})-[0-9a-f]{64}")
PLACEHOLDER = 0  # the token id that stands for a virtual token


def prompt_variant(kind: PromptKind, num_tokens: int, digest: str) -> str:
    return f"{kind}-{num_tokens}-{digest}"


def num_virtual_tokens(variant: str) -> int:
    """Returns how many of a prompt's first tokens are placeholders for an adapter's."""
    found = PROMPT.fullmatch(variant) if "-" in variant else None
    return int(found[1]) if found else 0


def num_given_tokens(variant: str) -> int:
    """Returns how many of a prompt's first tokens have finished keys and values."""
    return num_virtual_tokens(variant) if variant.startswith("prefix-") else 0


def short_name(digest: str) -> str:
    """Returns an adapter's name where a wrong one costs only time."""
    return digest[-16:]


def lora_of(variant: str) -> str:
    """Returns the digest of the LoRA adapter; "" if it is none."""
    return "" if num_virtual_tokens(variant) else variant
