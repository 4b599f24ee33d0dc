"""What the whole project talks about: a request, how it samples, what comes out.

Knows nothing of devices, sockets or HTTP. Units are in the names; `_s` is seconds of a monotonic clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
Leg = Literal["prefill", "decode", "hybrid"]
Role = Literal["prefill", "decode"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen and when to stop.

    temperature 0 is greedy. `top_k` -1 or 0 and `top_p` 1 mean all tokens. Stop strings are not here: the
    process that detokenizes owns them.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """One token of one sequence. `position` counts output tokens from 0; `attempt` counts dispatches from 0."""

    request_id: str
    attempt: int
    index: int
    position: int
    token_id: int
    finish_reason: FinishReason | None = None


class LegEnd(msgspec.Struct, frozen=True, array_like=True):
    """A leg that ended otherwise than with a finishing token. `error` is None for a prefill leg handed over."""

    request_id: str
    attempt: int
    error: str | None = None


class Status(enum.Enum):
    """Where a request stands in one engine."""

    WAITING = "waiting"  # holds nothing
    LANDING = "landing"  # holds blocks that a peer's KV is being copied into
    RUNNING = "running"  # takes part in steps
    EXPORTING = "exporting"  # computed; holds blocks until the peer has them
    FINISHED = "finished"  # holds nothing, and is forgotten


@dataclass(slots=True, eq=False)
class Request:
    """A request in one engine. Everything needed to go on elsewhere is in the first block of fields."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    attempt: int = 0
    output_token_ids: list[int] = field(default_factory=list)

    arrival_s: float = 0.0
    leg: Leg = "hybrid"
    transfer_id: str = ""
    peer: str = ""  # the other leg's connection or instance
    client: str = ""  # the connection that outputs go to
    status: Status = Status.WAITING
    num_computed_tokens: int = 0  # tokens whose KV is in this engine's pool
    block_table: list[int] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Names this leg in one engine: another attempt of the same request is another leg."""
        return f"{self.request_id}#{self.attempt}"

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_behind(self) -> int:
        """Tokens known but not yet computed; 1 when the request is decoding."""
        return self.num_tokens - self.num_computed_tokens

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt and output together."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - num_prompt]

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Whether the last output token ends the sequence."""
        token_id = self.output_token_ids[-1]
        if token_id in self.sampling.stop_token_ids:
            return "stop"
        if token_id in eos_token_ids and not self.sampling.ignore_eos:
            return "stop"
        return "length" if len(self.output_token_ids) >= self.sampling.max_tokens else None
