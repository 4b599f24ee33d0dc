"""The outcome of each request of a load, real or simulated, and the goals that it is held against.

The report is made of these alone, so that a simulated one and a measured one are the same.
"""

from __future__ import annotations

from typing import Annotated

import msgspec


class Slo(msgspec.Struct, frozen=True):
    """Goals in seconds; 0: none. `tpot_s`: the mean time of an output token after the first."""

    ttft_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    tpot_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    e2e_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0

    def met_by(self, outcome: Outcome) -> bool:
        """Whether the request was answered, and within every goal."""
        if outcome.error or outcome.first_s is None or outcome.last_s is None:
            return False
        found = ((self.ttft_s, outcome.ttft_s), (self.tpot_s, outcome.tpot_s), (self.e2e_s, outcome.e2e_s))
        return all(not goal or taken is None or taken <= goal for goal, taken in found)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A request as its client saw it. Times are seconds after the load's start."""

    request_id: str
    sent_s: float
    first_s: float | None = None  # its first token
    last_s: float | None = None  # its last
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, where it was computed
    num_output_tokens: int = 0
    longest_gap_s: float = 0.0  # between two of its tokens
    prefill_s: float | None = None  # from sending until its prompt was computed
    handover_s: float | None = None  # from then until its KV cache was at the decode instance
    prefill: str = ""  # names of its instances
    decode: str = ""
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.last_s is None else self.last_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of one token."""
        if self.first_s is None or self.last_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_output_tokens - 1)


class InstanceSample(msgspec.Struct, frozen=True, kw_only=True):
    """An instance at one moment of a load."""

    at_s: float
    name: str
    role: str
    num_running: int = 0
    num_waiting: int = 0
    num_held_blocks: int = 0
    num_blocks: int = 0


def goodput_per_s(outcomes: list[Outcome], slo: Slo, duration_s: float) -> float:
    """Returns the requests a second that met every goal."""
    return sum(map(slo.met_by, outcomes)) / duration_s if duration_s > 0 else 0.0
