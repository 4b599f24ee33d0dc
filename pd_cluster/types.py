"""What the whole project talks about: a request, how it samples, what comes out.

Knows nothing of devices, sockets or HTTP. Units are in the names; `_s` is seconds of a monotonic clock.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
Leg = Literal["prefill", "decode", "hybrid"]
Role = Literal["prefill", "decode"]

MOST_UNTOLD = 63  # tokens of a sequence that wait to be told; so many are computed again when it goes on elsewhere


class Note(Protocol):
    """Takes down what happens to a transfer, from any thread, at once; engine/trace.py has the one that keeps it."""

    def __call__(self, transfer_id: str, what: str, **numbers: int) -> None: ...


def note_nothing(transfer_id: str, what: str, **numbers: int) -> None:
    """For who does not want to know."""


GuideKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag", "reply"]
MAX_GUIDE_NUM_CHARS = 256 << 10


class Guide(msgspec.Struct, frozen=True):
    """What an output must look like. `text` is canonical, so that equal guides are equal strings; by kind:

    json: a schema, as JSON; json_object: empty; regex: one that the whole output matches; choice: a JSON array of
    strings; grammar: EBNF (GBNF's or Lark's dialect); structural_tag: JSON, {"structures", "triggers"}; reply: the JSON
    that parsers/reply_guides.py makes, of which the others may be a part.
    """

    kind: GuideKind
    text: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen and when to stop.

    temperature 0 is greedy. `top_k` -1 or 0, `top_p` 1 and `min_p` 0 mean all tokens. `n` sequences share the prompt
    and are told apart by their index. Stop strings are not here: the process that detokenizes owns them.

    With a `beam_width` the `n` sequences are the best hypotheses of a beam search. `length_penalty` is the power of a
    hypothesis' length that its score is divided by; `early_stopping` ends the search at `beam_width` hypotheses (True),
    when a better one is unlikely (False) or impossible ("never").
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0  # before that many output tokens neither an end-of-sequence nor a stop token is chosen
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0  # of the most likely token's probability
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences whose last token is never chosen after the others
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    logprobs: int | None = None  # how many of the most likely tokens are told with each chosen one
    prompt_logprobs: int | None = None
    beam_width: int = 0  # 0: no beam search
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    guide: Guide | None = None

    @property
    def num_sequences(self) -> int:
        """That an engine computes at a time, at most."""
        return max(self.n, self.beam_width)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probability of one token and of the most likely ones, most likely first.

    From the model's own logits: before penalties, masks and temperature. `rank` 1 is the most likely token.
    """

    logprob: float
    rank: int
    top: list[tuple[int, float]] = []


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """One token of one sequence. `position` counts output tokens from 0; `attempt` counts dispatches from 0.

    `score` is there for a candidate of a beam search that is handed over: the log-probability that it counts with.
    `earlier` are the tokens right before it that are told together with it, because nobody reads single ones.
    """

    request_id: str
    attempt: int
    index: int
    position: int
    token_id: TokenId
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None
    score: float | None = None
    earlier: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MOST_UNTOLD)] = ()

    def apart(self) -> Iterator[TokenOutput]:
        """Each of its tokens by itself."""
        first = self.position - len(self.earlier)
        for position, token_id in enumerate(self.earlier, first):
            yield TokenOutput(self.request_id, self.attempt, self.index, position, token_id)
        yield msgspec.structs.replace(self, earlier=())


class Candidate(NamedTuple):
    """How a beam may go on. `logprob` is after masks and penalties, `told` what clients are told of the token."""

    token_id: int
    logprob: float
    ends: bool  # a hypothesis, by what the token is
    told: Logprobs | None = None


class PromptOutput(msgspec.Struct, frozen=True, array_like=True):
    """What is told once of a prompt, no later than its first output token.

    `logprobs` is empty unless asked for; then one entry a prompt token, the first of them None.
    """

    request_id: str
    attempt: int
    num_cached_tokens: int = 0  # prompt tokens whose KV was not computed for this request
    logprobs: list[Logprobs | None] = []


class LegEnd(msgspec.Struct, frozen=True, array_like=True):
    """A leg that ended otherwise than with a finishing token. `error` is None for a prefill leg handed over.

    `is_fault`: the error is not the request's own doing, and other instances may do better. `is_refusal`: what it asks
    for cannot be, here or elsewhere.
    """

    request_id: str
    attempt: int
    error: str | None = None
    is_fault: bool = False
    is_refusal: bool = False


class Resumed(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that goes on elsewhere after these output tokens."""

    index: int
    output_token_ids: list[int]


class Status(enum.Enum):
    """Where a request stands in one engine."""

    WAITING = "waiting"  # holds nothing
    LANDING = "landing"  # holds blocks that a peer's KV is being copied into
    RUNNING = "running"  # takes part in steps
    PARKED = "parked"  # a beam that is computed and waits for the others of its search; gives its blocks up if it must
    EXPORTING = "exporting"  # computed; holds blocks until the peer has them
    FINISHED = "finished"  # holds nothing, and is forgotten


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in one engine. Everything needed to go on elsewhere is in the first block of fields.

    With `sampling.n` above 1 the sequence of index 0 computes the prompt; the others are forked from it.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    attempt: int = 0
    index: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    cache_salt: str = ""  # requests share cached KV only with those of the same salt
    kv_precision: str = ""  # what its landed KV was on its way, when that is not what the pool holds

    priority: int = 0  # lower ones come first
    arrival_s: float = 0.0
    leg: Leg = "hybrid"
    transfer_id: str = ""
    peer: str = ""  # the other leg's connection or instance
    client: str = ""  # the connection that outputs go to
    gathers: bool = False  # nobody reads its tokens one by one, so many are told together
    batch: str = ""  # the name of many answers of which its caller wants none early; "": of none
    num_untold: int = 0  # of its last output tokens
    status: Status = Status.WAITING
    num_computed_tokens: int = 0  # tokens whose KV is in this engine's pool
    num_cached_tokens: int = -1  # of the prompt, found in the prefix cache when it was first admitted; -1: not yet
    block_table: list[int] = field(default_factory=list)
    swap_table: list[int] = field(default_factory=list)  # where its KV is in host memory while it waits, if it is
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were needed
    num_hashed_blocks: int = 0  # blocks of its table that are known to the prefix cache
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)
    is_resumed: bool = False  # its siblings came with it, and are not forked from it
    dropped: set[int] = field(default_factory=set)  # sequences not wanted any more before they were forked
    sampler_state: object = None  # the sampler's own; made again from the token ids when it is absent
    beams: object = None  # the beam search that it is a beam of; see engine/beam_groups.py
    guide_state: object = None  # the guides' own; likewise

    @property
    def leg_key(self) -> str:
        """Names this leg in one engine: another attempt of the same request is another leg."""
        return f"{self.request_id}#{self.attempt}"

    @property
    def key(self) -> str:
        """Names this sequence in one engine."""
        return f"{self.leg_key}/{self.index}" if self.index else self.leg_key

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def most_tokens(self) -> int:
        """That it may ever have: the same in every engine that computes it, and after every interruption."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

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

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Logits of prompt tokens are still to be computed."""
        wanted = self.sampling.prompt_logprobs is not None and self.leg != "decode"
        return wanted and len(self.prompt_logprobs) < len(self.prompt_token_ids)

    def num_logit_rows(self, num_tokens: int) -> int:
        """Of the next `num_tokens` tokens to compute, the last ones whose logits are wanted."""
        if self.wants_prompt_logprobs:
            return num_tokens
        return 1 if num_tokens == self.num_behind else 0

    def finish_reason_after(
        self, token_id: int, num_output_tokens: int, eos_token_ids: frozenset[int]
    ) -> FinishReason | None:
        """Whether this token, the last of so many, ends a sequence."""
        if token_id in self.sampling.stop_token_ids:
            return "stop"
        if token_id in eos_token_ids and (not self.sampling.ignore_eos or self.sampling.guide is not None):
            return "stop"  # a guide lets it come when nothing else may
        return "length" if num_output_tokens >= self.sampling.max_tokens else None


def resume(request: Request, resumed: Resumed) -> Request:
    """That sequence of the request, as far as it had come elsewhere. Of its siblings it shares only the prompt."""
    return replace(
        request,
        index=resumed.index,
        output_token_ids=list(resumed.output_token_ids),
        is_resumed=True,
        block_table=[],
        swap_table=[],
        block_hashes=[],
        prompt_logprobs=[],
        dropped=set(),
    )
