"""A request as the router follows it: its sequences, what was delivered of each, and what that leaves to do.

Pure but for the inbox that its reader waits at. Knows nothing of instances' states or of who is chosen.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pd_cluster import wire
from pd_cluster.cluster.instance import Instance
from pd_cluster.cluster.policy import Ask
from pd_cluster.cluster.prefixes import Prompt
from pd_cluster.cluster.stats import Histogram, Outcome, ReplayCause, RequestStats
from pd_cluster.errors import GenerationError
from pd_cluster.numerics import Numerics
from pd_cluster.types import FinishReason, PromptOutput, Resumed, SamplingParams, TokenOutput

MAX_UNREAD_TOKENS = 4096  # of a request, that its reader has not taken; where it has many sequences, so many steps
MAX_UNREAD_STEPS = 256
MAX_IN_A_ROW = 32
NUM_GATHERED = 64  # tokens that a reader of whole answers is woken for


@dataclass(frozen=True, slots=True)
class Request:
    """What a request asks for, as every attempt at it is told."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    session: str = ""
    priority: int = 0

    @property
    def num_output_tokens(self) -> int:
        """What its output counts as, for routing: few get as long as they may."""
        return self.sampling.num_sequences * min(self.sampling.max_tokens, 256)


def ask_of(request: Request) -> Ask:
    """What routing knows of it."""
    prompt = Prompt(request.prompt_token_ids, request.cache_salt, request.sampling.max_tokens)
    return Ask(prompt, request.num_output_tokens, request.session)


@dataclass(frozen=True, slots=True)
class Setback:
    """An attempt has ended before its request. `error` is what the reader gets when there is no other."""

    error: GenerationError
    cause: ReplayCause


class Inbox:
    """What one reader waits for, in order. Does less than asyncio.Queue, in less time and memory; mostly one item.

    One that `gathers` wakes the reader for the last token of a sequence and for many together, not for each.
    """

    __slots__ = ("_gathers", "_items", "_num_in_a_row", "_waiter")

    def __init__(self, gathers: bool = False) -> None:
        self._gathers = gathers
        self._items: list[TokenOutput | Exception | Setback | None] = []
        self._waiter: asyncio.Future[None] | None = None
        self._num_in_a_row = 0  # items that were there when they were asked for

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: TokenOutput | Exception | Setback | None) -> None:
        self._items.append(item)
        is_early = self._gathers and isinstance(item, TokenOutput) and item.finish_reason is None and not item.earlier
        if self._waiter is not None and not (is_early and len(self._items) < NUM_GATHERED):
            waiter, self._waiter = self._waiter, None
            if not waiter.done():  # cancelled
                waiter.set_result(None)

    async def get(self) -> TokenOutput | Exception | Setback | None:
        if self._items:
            self._num_in_a_row += 1
            if self._num_in_a_row >= MAX_IN_A_ROW:  # whoever reads that much lets others have their turn
                self._num_in_a_row = 0
                await asyncio.sleep(0)
        while not self._items:
            self._num_in_a_row = 0
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.pop(0)


@dataclass(slots=True)
class Sequence:
    """One of a request's n sequences. `arrived` holds tokens that came before an earlier one."""

    index: int = 0
    token_ids: array[int] = field(default_factory=lambda: array("i"))  # delivered; of many long answers at once
    arrived: dict[int, TokenOutput] = field(default_factory=dict)
    is_finished: bool = False  # its last token has come, perhaps before others; or it was stopped
    is_over: bool = False  # its last token has been read, or it was stopped
    num_taken: int = 0  # tokens that have been read
    last_s: float = 0.0  # when a token was delivered last; 0: none yet
    finish_reason: FinishReason | None = None  # once it is over

    @property
    def num_delivered(self) -> int:
        return len(self.token_ids)


class Death(NamedTuple):
    """A life of an instance (`Instance.key`) that was lost, and when, by the event loop's clock."""

    life: str
    at_s: float


@dataclass(slots=True)
class Stream:
    """One request on its way, and the reader's handle on it: who serves it, and `stop`."""

    request_id: str
    attempt: int
    legs: dict[str, Instance]  # conn -> instance, of the legs that have not ended
    request: Request
    ask: Ask  # what routing knows of it
    prefill: Instance
    decode: Instance
    sequences: list[Sequence]
    send: Callable[[str, wire.Body], None]
    prompted: Callable[[PromptOutput], None] = lambda prompt: None
    is_prompted: bool = False
    has_prefill_spoken: bool = False  # and so has told of the prompt, which the first token must not come before
    gathers: bool = False  # nobody reads single tokens
    batch: str = ""  # the name of many answers, of which none is wanted before the others
    inbox: Inbox = field(init=False)
    heard_s: float = 0.0  # when a first token was read here, by the timelines' clock; 0: none yet
    numerics: Numerics | None = None  # of those who have computed what was delivered
    deaths: list[Death] = field(default_factory=list)  # that attempts of it ended with
    num_moves: int = 0  # attempts that ended because somebody wanted their instance empty, or paused
    weights: dict[str, int] = field(default_factory=dict)  # conn -> tokens of work, of the same legs
    stats: RequestStats = field(default_factory=RequestStats)
    received_s: float = 0.0
    first_s: float = 0.0  # when the first token was delivered; 0: none yet
    max_unread: float = field(init=False)
    intervals: Histogram = field(init=False)

    def __post_init__(self) -> None:
        """The answer of a beam search comes at once: nobody can have read any of it, and no time is between tokens."""
        sampling, intervals = self.request.sampling, self.stats.inter_token_s
        most = max(MAX_UNREAD_TOKENS, sampling.n * MAX_UNREAD_STEPS)
        self.max_unread = float("inf") if sampling.beam_width else most
        self.intervals = Histogram(intervals.bounds) if sampling.beam_width else intervals
        self.inbox = Inbox(self.gathers)

    def put(self, token: TokenOutput) -> None:
        """Takes a token, of whatever leg and in whatever order; what was delivered already is dropped."""
        if token.attempt != self.attempt or not 0 <= token.index < len(self.sequences):
            return
        sequence = self.sequences[token.index]
        num_delivered = len(sequence.token_ids)
        if sequence.is_over or token.position < num_delivered:
            return
        if token.finish_reason is not None:
            sequence.is_finished = True
        first = token.position - len(token.earlier) if token.earlier else token.position
        if first == num_delivered and not sequence.arrived and not self._waits_for_prompt():
            self._deliver(sequence, token)  # the usual case
            return
        if token.earlier:
            for each in token.apart():
                self.put(each)
            return
        sequence.arrived.setdefault(token.position, token)
        self.release([sequence])

    def _deliver(self, sequence: Sequence, token: TokenOutput) -> None:
        """Between tokens that are told together, time is taken as spent evenly."""
        num_tokens = 1
        if token.earlier:
            sequence.token_ids.extend(token.earlier)
            num_tokens += len(token.earlier)
        sequence.token_ids.append(token.token_id)
        self.inbox.put(token)
        now_s = self.stats.clock()
        if sequence.last_s:
            self.intervals.observe((now_s - sequence.last_s) / num_tokens, num_tokens)
        elif not self.first_s:
            self.first_s = now_s
            self.stats.first_token(len(self.request.prompt_token_ids), now_s - self.received_s)
        sequence.last_s = now_s

    def _waits_for_prompt(self) -> bool:
        """Whether the prompt's own outputs may still come, which the first token must not come before."""
        return not self.has_prefill_spoken and any(member is self.prefill for member in self.legs.values())

    def release(self, sequences: list[Sequence]) -> None:
        """Delivers each sequence's tokens in order of position, once the prompt's own outputs must have come."""
        if self._waits_for_prompt():
            return
        for sequence in sequences:
            while (token := sequence.arrived.pop(sequence.num_delivered, None)) is not None:
                self._deliver(sequence, token)

    def put_prompt(self, prompt: PromptOutput) -> None:
        if prompt.attempt == self.attempt and not self.is_prompted:
            self.is_prompted = True
            self.prompted(prompt)

    def take(self, token: TokenOutput) -> bool:
        """The reader gets this one; False when its sequence was stopped meanwhile."""
        sequence = self.sequences[token.index]
        if sequence.is_over:
            return False
        num_tokens = 1 + len(token.earlier) if token.earlier else 1
        sequence.num_taken += num_tokens
        self.stats.num_generation_tokens += num_tokens
        if token.finish_reason is not None:
            sequence.is_over, sequence.finish_reason = True, token.finish_reason
        return True

    def stop(self, index: int) -> None:
        """Ends one sequence where the reader stands: its further tokens are dropped, wherever they are made."""
        sequence = self.sequences[index]
        if sequence.is_over:
            return
        sequence.is_finished = sequence.is_over = True
        sequence.finish_reason = "stop"
        sequence.arrived.clear()
        if self.is_over:
            self.inbox.put(None)  # the last one: the whole request ends, and its legs with it
            return
        for conn in self.legs:
            self.send(conn, wire.Abort(self.request_id, self.attempt, index))

    def retreat(self, error: GenerationError, cause: ReplayCause) -> None:
        """This attempt is over, and the next goes on after what was delivered; nothing that it still says counts."""
        for sequence in self.sequences:
            if any(token.finish_reason is not None for token in sequence.arrived.values()):
                sequence.is_finished = False  # its last token was not delivered, and comes again
            sequence.arrived.clear()
        if not self.is_finished:
            self.attempt += 1
            self.inbox.put(Setback(error, cause))

    def resumed(self) -> list[Resumed]:
        """The sequences that another instance goes on with; empty when nothing is known of any yet."""
        if not any(sequence.token_ids or sequence.is_finished for sequence in self.sequences):
            return []
        return [Resumed(each.index, list(each.token_ids)) for each in self.sequences if not each.is_finished]

    def outcome(self, left: FinishReason, admitted_s: float | None, handovers_s: list[float]) -> Outcome:
        """Of a request that has ended; `left` is why those of its sequences did that are not over."""
        return Outcome(
            [sequence.finish_reason or left for sequence in self.sequences],
            [sequence.num_taken for sequence in self.sequences],
            len(self.request.prompt_token_ids),
            self.request.sampling.max_tokens,
            self.received_s,
            self.first_s,
            max(sequence.last_s for sequence in self.sequences),
            admitted_s,
            handovers_s,
        )

    @property
    def transfer_id(self) -> str:
        return f"{self.request_id}-{self.attempt}"

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    @property
    def is_over(self) -> bool:
        """Asked after every token."""
        for sequence in self.sequences:  # noqa: SIM110
            if not sequence.is_over:
                return False
        return True
