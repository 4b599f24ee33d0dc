"""Messages between `benchmarks lora` and its child."""

from __future__ import annotations

import msgspec


class LoraSpec(msgspec.Struct, kw_only=True):
    """Decode steps of `batch` sequences of `context` tokens, whose adapters are drawn from so many.

    `distinct`: numbers of adapters that the sequences have in turn. `drawn`: numbers of loaded adapters that each
    sequence draws from, by Zipf's law.
    """

    model: str
    folder: str  # for the adapters
    batch: int
    context: int  # tokens of a sequence before the step
    rank: int
    distinct: list[int]
    drawn: list[int]
    rounds: int
    has_peft: bool  # measure it, too


class LoraTimes(msgspec.Struct, kw_only=True):
    """Seconds, the least of all rounds; `p99` are of a series of steps."""

    bare_s: float  # without --enable-lora
    none_s: float  # with it, and no sequence has an adapter
    distinct_s: dict[int, float]
    drawn_s: dict[int, float]
    num_drawn: dict[int, int]  # different adapters in that step
    load_s: float  # of one adapter, from its folder, while steps are computed
    quiet_p99_s: float
    loading_p99_s: float  # while adapters are loaded one after another
    peft_s: float | None = None  # transformers with PEFT, with the last number of `distinct` that is at most 8
