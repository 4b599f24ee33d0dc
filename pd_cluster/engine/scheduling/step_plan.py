"""A planned step: how many tokens each request computes, and which blocks are moved first. Uses only integers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pd_cluster.types import Request, StateCopy

MAX_PROMPT_LOGPROB_TOKENS = 256  # tokens with prompt_logprobs in one step; each needs a row of logits
MAX_POOLING_CHUNK = 256  # tokens of a pooled prompt in one step


def pooling_chunk_of(max_num_batched_tokens: int, block_size: int) -> int:
    """Returns the size of a pooled prompt's chunks except the last: whole blocks if one fits into half a step."""
    most = max(1, min(MAX_POOLING_CHUNK, max_num_batched_tokens // 2))
    return most // block_size * block_size or most


def service_order(request: Request) -> tuple[int, float, str, int]:
    """The sort key of requests: by priority, then by arrival."""
    return request.priority, request.arrival_s, request.request_id, request.index


def needs_host(request: Request) -> bool:
    """Whether the host needs the results of this request's step before it can plan the next one.

    Possible reasons: a guide's mask and a beam search need the tokens; the first token forks the sequences of a
    request; a pooled prompt and a prompt's logprobs are computed from the step's rows; adapters take turns.
    """
    sampling = request.sampling
    return (
        request.pooling is not None
        or request.wants_prompt_logprobs
        or bool(request.order.variant)
        or sampling.guide is not None
        or bool(sampling.beam_width)
        or (sampling.n > 1 and not request.output_token_ids)
    )


def ends_with(request: Request) -> bool:
    """Whether a request stops running with its next token, because it reaches its limit or is handed over."""
    return request.leg == "prefill" or len(request.output_token_ids) + 1 >= request.sampling.max_tokens


class Move(NamedTuple):
    """A move of a block's content before the step computes.

    "copy": within the group's pool. "out", "in": to and from host memory. "clear": fill `target` with zeros.
    """

    kind: Literal["copy", "out", "in", "clear"]
    source: int
    target: int
    group: int = 0


@dataclass(slots=True)
class StepPlan:
    """A planned step.

    `chunks`: (request, tokens to compute now). `moves` are made first, in this order. During planning, the requests in
    `preempted` and `admitted` moved between the scheduler's lists.
    """

    chunks: list[tuple[Request, int]] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    lacking: list[Request] = field(default_factory=list)  # ended, because they need images whose pixels are absent
    keeps: list[StateCopy] = field(default_factory=list)  # states to copy after tokens that the step computes
    num_prompt_rows: int = 0  # rows whose logits are needed for prompt_logprobs
    drafts: dict[Request, list[int]] = field(default_factory=dict)  # by request; they follow the one token of its chunk

    def add(self, request: Request, num_tokens: int) -> None:
        self.chunks.append((request, num_tokens))
        if request.wants_prompt_logprobs:
            self.num_prompt_rows += num_tokens

    def kept(self) -> list[StateCopy]:
        """Returns the states to copy whose sequences are still in the plan."""
        if not self.keeps:
            return []
        computed = {request for request, _ in self.chunks}
        return [keep for keep in self.keeps if keep.request in computed]

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.chunks)
