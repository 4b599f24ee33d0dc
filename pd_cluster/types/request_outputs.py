"""Results of a request, and the state from which a sequence resumes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_UNSENT = 63  # the most unsent tokens of a sequence; they are computed again if it resumes elsewhere
INT32_MAX = 2**31 - 1
TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probability of one token and of the most likely ones, most likely first.

    They are computed from the model's own logits: before penalties, masks and temperature. `rank` 1 is the most likely
    token. Tokens that the request names (see Sampling) are the last of `top`, in the request's order.
    """

    logprob: float
    rank: int
    top: list[tuple[int, float]] = []


class DraftReport(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a sequence's drafts since its last output.

    `num_accepted` and `num_rejected` count tokens of the request's prediction. `steps`, if the request asks for it, has
    the numbers of drafted and of accepted tokens of each step with drafts.
    """

    num_accepted: Count = 0
    num_rejected: Count = 0
    steps: Annotated[tuple[tuple[Count, Count], ...], msgspec.Meta(max_length=MAX_UNSENT + 1)] = ()

    def plus(self, num_accepted: int = 0, num_rejected: int = 0, step: tuple[int, int] | None = None) -> DraftReport:
        steps = self.steps if step is None else (*self.steps, step)
        return DraftReport(self.num_accepted + num_accepted, self.num_rejected + num_rejected, steps)


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """One token of one sequence.

    `earlier`: the preceding tokens that are sent together with this one, from the same step, or from many steps if the
    client does not read tokens one by one; `earlier_logprobs` are their log-probabilities, if requested. `drafts`: None
    when there is nothing to report.
    """

    request_id: str
    attempt: int  # counts dispatches from 0
    index: int
    position: int  # counts output tokens from 0
    token_id: TokenId
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None
    score: float | None = None  # the accumulated log-probability of a beam search's candidate, if handed over
    earlier: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_UNSENT)] = ()
    drafts: DraftReport | None = None
    earlier_logprobs: Annotated[tuple[Logprobs, ...], msgspec.Meta(max_length=MAX_UNSENT)] = ()

    def apart(self) -> Iterator[TokenOutput]:
        """Yields a separate output for each token of this one."""
        if not self.earlier:
            yield self
            return
        first, told = self.position - len(self.earlier), self.earlier_logprobs or (None,) * len(self.earlier)
        for position, (token_id, logprobs) in enumerate(zip(self.earlier, told, strict=True), first):
            yield TokenOutput(self.request_id, self.attempt, self.index, position, token_id, None, logprobs)
        yield msgspec.structs.replace(self, earlier=(), earlier_logprobs=())

    def since(self, position: int) -> TokenOutput:
        """Returns the output without the tokens before this position, which must be one of its tokens' positions."""
        num_known = position - (self.position - len(self.earlier))
        if num_known <= 0:
            return self
        told = self.earlier_logprobs[num_known:]
        return msgspec.structs.replace(self, earlier=self.earlier[num_known:], earlier_logprobs=told)


class Candidate(NamedTuple):
    """A possible next token of a beam. `logprob` includes masks and penalties; clients receive `told`."""

    token_id: int
    logprob: float
    ends: bool  # the token ends the hypothesis
    told: Logprobs | None = None


class PromptOutput(msgspec.Struct, frozen=True, array_like=True):
    """Facts about a prompt, sent once and no later than its first output token.

    If requested, `logprobs` has one entry per prompt token, the first of them None; otherwise it is empty.
    """

    request_id: str
    attempt: int
    num_cached_tokens: int = 0  # prompt tokens whose KV was not computed for this request
    logprobs: list[Logprobs | None] = []


class PooledOutput(msgspec.Struct, frozen=True, array_like=True):
    """The vector of a prompt, which ends the request. `vector`: little-endian float32 values."""

    request_id: str
    attempt: int
    vector: bytes
    num_cached_tokens: int = 0  # prompt tokens whose KV was not computed for this request


class LegEnd(msgspec.Struct, frozen=True, array_like=True):
    """A leg that ended without a finishing token. `error` is None for a prefill leg that was handed over.

    `is_fault`: the request did not cause the error, and other instances may succeed. `is_refusal`: no instance can
    serve the request. `is_full`: too many legs wait at the instance; this fault does not count as an attempt.
    `is_taken`: another scheduler reads the stream from now on.
    """

    request_id: str
    attempt: int
    error: str | None = None
    is_fault: bool = False
    is_refusal: bool = False
    is_full: bool = False
    is_taken: bool = False


class Resumed(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that resumes elsewhere after these output tokens."""

    index: int
    output_token_ids: list[int]
