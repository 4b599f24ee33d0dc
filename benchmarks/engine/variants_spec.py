"""Messages between `benchmarks context`, `benchmarks weights` and their child."""

from __future__ import annotations

import msgspec


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an engine."""

    dtype: str = "float32"
    quantization: str | None = None
    quantize_head: str | None = None
    kv_cache_dtype: str = "auto"


class VariantsSpec(msgspec.Struct, kw_only=True):
    """Decode steps of each number of sequences, all of `context` tokens, and a prompt, with each variant in turn."""

    model: str
    variants: dict[str, Variant]
    batches: list[int]
    context: int  # tokens of a sequence before the step
    prompt: int  # tokens of a prompt that is computed at once
    rounds: int


class VariantTimes(msgspec.Struct, kw_only=True):
    """Seconds, the least of all rounds."""

    steps_s: dict[str, dict[int, float]]  # by variant and batch
    prompt_s: dict[str, float]
    token_nbytes: dict[str, int]  # of one token in the pool
