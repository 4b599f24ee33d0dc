"""Messages between `bench context` and its child."""

from __future__ import annotations

import msgspec


class ContextSpec(msgspec.Struct, kw_only=True):
    """Decode steps of each number of sequences, all of `context` tokens, over pools of each dtype in turn."""

    model: str
    dtypes: list[str]
    batches: list[int]
    context: int  # tokens of a sequence before the step
    prompt: int  # tokens of a prompt that is computed at once
    rounds: int


class ContextTimes(msgspec.Struct, kw_only=True):
    """Seconds, the least of all rounds: of a decode step by dtype and batch; of the prompt by dtype."""

    steps_s: dict[str, dict[int, float]]
    prompt_s: dict[str, float]
    token_nbytes: dict[str, int]  # of one token in the pool
