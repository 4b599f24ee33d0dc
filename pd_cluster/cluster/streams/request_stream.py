"""Tracks a request for the router: its sequences, their delivered tokens, and the remaining work.

Pure, except for the inbox on which its reader waits. Knows nothing of instances' states or of how they are chosen.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pd_cluster import wire
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.known_prefixes import Prompt
from pd_cluster.cluster.placement.routing_policy import RoutingRequest
from pd_cluster.cluster.records.request_stats import Histogram, Outcome, ReplayCause, RequestStats
from pd_cluster.cluster.streams.request_origin import AdmittedRequest, RequestOrigin
from pd_cluster.cluster.streams.stream_records import KeptStream
from pd_cluster.errors import GenerationError, PdClusterError
from pd_cluster.numerics import Numerics
from pd_cluster.types import FinishReason, PooledOutput, PromptOutput, RequestSpec, Resumed, TokenOutput
from pd_cluster.types.variants import lora_of

# The most tokens of a request that its reader may leave unread; with many sequences, MAX_UNREAD_STEPS of each.
MAX_UNREAD_TOKENS = 4096
MAX_UNREAD_STEPS = 256
MAX_IN_A_ROW = 32
MAX_WEIGHED_TOKENS = 256  # each sequence of an answer counts as at most this many tokens of load
NUM_GATHERED = 64  # with this many tokens waiting, a reader that gathers is woken

Send = Callable[[str, wire.Body], None]  # to a connection
Ending = Literal["answered", "left", "failed"]  # "left": its client left before the end


def ignore_prompt(prompt: PromptOutput) -> None:
    """Ignores a prompt's outputs."""


def ask_of(order: RequestSpec) -> RoutingRequest:
    """Describes a request to routing. An answer counts as at most MAX_WEIGHED_TOKENS, since few answers reach their
    limit.
    """
    num_output_tokens = order.num_decoding * min(order.most_output_tokens, MAX_WEIGHED_TOKENS)
    return RoutingRequest(
        Prompt(order), num_output_tokens, order.session, order.pooling is not None, lora_of(order.variant)
    )


@dataclass(frozen=True, slots=True)
class Setback:
    """An attempt that ended before its request. `error` goes to the reader if no other attempt follows."""

    error: GenerationError
    cause: ReplayCause


class Inbox:
    """One reader's items, in order. Cheaper than asyncio.Queue in time and memory; mostly holds one item.

    With `gathers`, it wakes the reader for a sequence's last token and for NUM_GATHERED tokens together, not for each
    token.
    """

    __slots__ = ("_gathers", "_items", "_num_in_a_row", "_waiter")

    def __init__(self, gathers: bool = False) -> None:
        self._gathers = gathers
        self._items: list[TokenOutput | Exception | Setback | None] = []
        self._waiter: asyncio.Future[None] | None = None
        self._num_in_a_row = 0  # consecutive items that were ready when the reader asked

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: TokenOutput | Exception | Setback | None) -> None:
        self._items.append(item)
        is_early = self._gathers and isinstance(item, TokenOutput) and item.finish_reason is None and not item.earlier
        if self._waiter is not None and not (is_early and len(self._items) < NUM_GATHERED):
            waiter, self._waiter = self._waiter, None
            if not waiter.done():  # a cancelled waiter is done
                waiter.set_result(None)

    async def get(self) -> TokenOutput | Exception | Setback | None:
        if self._items:
            self._num_in_a_row += 1
            if self._num_in_a_row >= MAX_IN_A_ROW:  # after this many items, a reader yields to others
                self._num_in_a_row = 0
                await asyncio.sleep(0)
        while not self._items:
            self._num_in_a_row = 0
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.pop(0)


@dataclass(slots=True)
class TokenSequence:
    """One of a request's n sequences. `arrived` holds tokens that arrived before an earlier one did."""

    index: int = 0
    token_ids: array[int] = field(default_factory=lambda: array("i"))  # delivered; compact, for many long answers
    arrived: dict[int, TokenOutput] = field(default_factory=dict)
    is_finished: bool = False  # its last token has arrived, perhaps before earlier ones; or it was stopped
    is_over: bool = False  # its last token has been read, or it was stopped
    num_taken: int = 0  # tokens that the reader has taken
    last_s: float = 0.0  # when a token was last delivered; 0: none yet
    finish_reason: FinishReason | None = None  # once it is over

    @property
    def num_delivered(self) -> int:
        return len(self.token_ids)


class Death(NamedTuple):
    """A lost life of an instance (`Instance.key`), and when it was lost, by the event loop's clock. `unit`: its unit,
    or "".
    """

    life: str
    at_s: float
    unit: str = ""


@dataclass(slots=True)
class RequestStream:
    """One running request. Its reader uses it to see the instances and to `stop` sequences."""

    request_id: str
    order: RequestSpec
    origin: RequestOrigin
    admitted: AdmittedRequest
    send: Send
    stats: RequestStats
    attempt: int = 0
    legs: dict[str, Instance] = field(default_factory=dict)  # conn -> instance, for legs that have not ended
    ask: RoutingRequest = field(init=False)  # the request as routing sees it
    prefill: Instance = field(init=False)
    decode: Instance = field(init=False)
    sequences: list[TokenSequence] = field(init=False)
    prompted: Callable[[PromptOutput], None] = ignore_prompt  # called with the prompt's outputs
    is_prompted: bool = False
    num_cached_tokens: int | None = None  # of its prompt, once reported
    pooled: PooledOutput | None = None  # the vector of a pooling request, once it is over
    has_prompt_outputs: bool = False  # the prompt's own outputs, which must precede the first token, have arrived
    inbox: Inbox = field(init=False)
    heard_s: float = 0.0  # when the first token was read here, by the timelines' clock; 0: not yet
    numerics: Numerics | None = None  # of the instances that computed the delivered tokens
    # for each version of the weights except an unnamed first one: its name, and how many tokens of each sequence
    # precede it
    weight_marks: list[tuple[str, list[int]]] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)  # losses that ended its attempts
    num_moves: int = 0  # attempts that ended because of a drain, a pause, a full instance or a stall
    num_full: int = 0  # consecutive attempts that found an instance full
    full_until_s: float = 0.0  # it waits for capacity until this time
    weights: dict[str, int] = field(default_factory=dict)  # conn -> tokens of work, for each of `legs`
    long_legs: set[str] = field(default_factory=set)  # conns of legs that compute a long prompt
    encoding: list[tuple[Instance, int]] = field(default_factory=list)  # encoders of its images, and their tokens
    kept: KeptStream | None = field(init=False)  # if the stream may resume
    held: asyncio.TimerHandle | None = None  # ends the hold of first tokens; see first_token_hold.py
    held_s: float = 0.0  # how long first tokens were held; during a hold, its start time is already subtracted
    received_s: float = field(init=False)
    first_s: float = 0.0  # when the first token was delivered; 0: not yet
    max_unread: float = field(init=False)
    intervals: Histogram = field(init=False)

    def __post_init__(self) -> None:
        """A beam search's answer is delivered at once, so its unread tokens are not limited and its intervals not
        counted.
        """
        self.ask, self.prefill, self.decode, _ = self.admitted
        self.kept, received_s = self.origin.kept, self.origin.received_s
        self.received_s = self.stats.clock() if received_s is None else received_s
        self.sequences = [TokenSequence(index) for index in range(self.order.sampling.n)]
        sampling, intervals = self.order.sampling, self.stats.inter_token_s
        most = max(MAX_UNREAD_TOKENS, sampling.n * MAX_UNREAD_STEPS)
        self.max_unread = float("inf") if sampling.beam_width else most
        self.intervals = Histogram(intervals.bounds) if sampling.beam_width else intervals
        self.inbox = Inbox(self.order.gathers)
        if self.kept is not None and (place := self.kept.place) is not None:  # it continues from the record
            self.attempt, info = place.found.attempt, place.instance.info
            self.numerics = info.numerics if info is not None else None
            self.max_unread += place.found.num_tokens

    def put(self, token: TokenOutput) -> None:
        """Accepts a token of any leg, in any order; drops tokens that were delivered already."""
        if token.attempt != self.attempt or not 0 <= token.index < len(self.sequences):
            return
        sequence = self.sequences[token.index]
        num_delivered = len(sequence.token_ids)
        if sequence.is_over or token.position < num_delivered:
            return
        if token.finish_reason is not None:
            sequence.is_finished = True
        first = token.position - len(token.earlier) if token.earlier else token.position
        if first <= num_delivered and not sequence.arrived and not self._waits():  # the usual case
            self._deliver(sequence, token if first == num_delivered else token.since(num_delivered))
            return
        if token.earlier:
            for each in token.apart():
                self.put(each)
            return
        sequence.arrived.setdefault(token.position, token)
        self.release([sequence])

    def _deliver(self, sequence: TokenSequence, token: TokenOutput) -> None:
        """Delivers a token and its `earlier` ones; the time since the last delivery is divided evenly among them."""
        num_tokens = 1
        if token.earlier:
            sequence.token_ids.extend(token.earlier)
            num_tokens += len(token.earlier)
        sequence.token_ids.append(token.token_id)
        if self.kept is not None:
            self.kept.tokens += token.apart()
        self.inbox.put(token)
        now_s = self.stats.clock()
        if sequence.last_s:
            self.intervals.observe((now_s - sequence.last_s) / num_tokens, num_tokens)
        elif not self.first_s:
            self.first_s = now_s
            self.stats.first_token(len(self.order.prompt_token_ids), now_s - self.received_s)
        sequence.last_s = now_s

    def _waits(self) -> bool:
        """Whether tokens must wait: they are held, or the prompt's own outputs, which must come first, may still
        arrive.
        """
        if self.held is not None:
            return True
        return not self.has_prompt_outputs and any(member is self.prefill for member in self.legs.values())

    def hold(self, seconds: float) -> None:
        """Keeps tokens from the reader until `let_go`, which is called automatically after this time."""
        if self.held is None:
            self.held = asyncio.get_running_loop().call_later(seconds, self.let_go)
            self.held_s -= self.stats.clock()

    def let_go(self) -> None:
        if self.held is not None:
            self.drop_hold()
            self.release(self.sequences)

    def drop_hold(self) -> None:
        """Cancels the hold without delivering tokens."""
        if self.held is not None:
            self.held.cancel()
            self.held = None
            self.held_s += self.stats.clock()

    def release(self, sequences: list[TokenSequence]) -> None:
        """Delivers each sequence's tokens in order of position, unless they are held."""
        if self._waits():
            return
        for sequence in sequences:
            while (token := sequence.arrived.pop(sequence.num_delivered, None)) is not None:
                self._deliver(sequence, token)

    def put_prompt(self, prompt: PromptOutput) -> None:
        if prompt.attempt == self.attempt and not self.is_prompted:
            self.is_prompted = True
            self.num_cached_tokens = prompt.num_cached_tokens
            self.stats.prompted(len(self.order.prompt_token_ids), prompt.num_cached_tokens)
            self.prompted(prompt)
            if self.kept is not None:
                self.kept.prompt = prompt

    def put_pooled(self, pooled: PooledOutput) -> None:
        """Accepts the vector that ends a pooling request; drops it if the request is over or not a pooling request."""
        (sequence, *_) = self.sequences
        if self.order.pooling is None or sequence.is_over:
            return
        self.pooled = pooled
        self.first_s = sequence.last_s = self.stats.clock()
        self.num_cached_tokens = pooled.num_cached_tokens
        self.stats.prompted(len(self.order.prompt_token_ids), pooled.num_cached_tokens)
        self.stats.pooled(len(self.order.prompt_token_ids))
        sequence.is_finished = sequence.is_over = True
        sequence.finish_reason = "stop"
        self.inbox.put(None)

    def take(self, token: TokenOutput) -> bool:
        """Hands a token to the reader; returns False if its sequence was stopped."""
        sequence = self.sequences[token.index]
        if sequence.is_over:
            return False
        num_tokens = 1 + len(token.earlier) if token.earlier else 1
        sequence.num_taken += num_tokens
        self.stats.num_generation_tokens += num_tokens
        if token.finish_reason is not None:
            sequence.is_over, sequence.finish_reason = True, token.finish_reason
        return True

    def stop(self, index: int, num_dropped: int = 0) -> None:
        """Ends one sequence at the reader's position: its further tokens are dropped.

        `num_dropped`: how many of the last tokens that the reader took lie after the answer's end.
        """
        sequence = self.sequences[index]
        sequence.num_taken -= num_dropped
        self.stats.num_generation_tokens -= num_dropped
        if sequence.is_over:
            if num_dropped:
                sequence.finish_reason = "stop"
            return
        sequence.is_finished = sequence.is_over = True
        sequence.finish_reason = "stop"
        sequence.arrived.clear()
        if self.is_over:
            self.inbox.put(None)  # the last sequence: the whole request ends, and its legs with it
            return
        for conn in self.legs:
            self.send(conn, wire.Abort(self.request_id, self.attempt, index))

    def retreat(self, error: GenerationError, cause: ReplayCause) -> None:
        """Ends this attempt and ignores its later outputs; the next one continues after the delivered tokens."""
        self.let_go()
        for sequence in self.sequences:
            if any(token.finish_reason is not None for token in sequence.arrived.values()):
                sequence.is_finished = False  # its last token was not delivered, and will come again
            sequence.arrived.clear()
        if not self.is_finished:
            self.attempt += 1
            self.inbox.put(Setback(error, cause))

    def resumed(self) -> list[Resumed]:
        """Returns the sequences that another instance continues; [] if no token was delivered."""
        if not any(sequence.token_ids or sequence.is_finished for sequence in self.sequences):
            return []
        return [Resumed(each.index, list(each.token_ids)) for each in self.sequences if not each.is_finished]

    def outcome(self, left: FinishReason, admitted_s: float | None, handovers_s: list[float]) -> Outcome:
        """Describes a request that has ended; `left` is the reason for sequences that are not over."""
        return Outcome(
            [sequence.finish_reason or left for sequence in self.sequences],
            [sequence.num_taken for sequence in self.sequences],
            len(self.order.prompt_token_ids),
            self.order.most_output_tokens,
            self.received_s,
            self.first_s,
            max(sequence.last_s for sequence in self.sequences),
            admitted_s,
            handovers_s,
            self.num_cached_tokens,
        )

    def how_ended(self, error: BaseException | None) -> Ending:
        """Returns how the stream ended for its reader: with the whole answer, with this error, or because the reader
        left.
        """
        if self.is_over:
            return "answered"
        return "failed" if isinstance(error, PdClusterError) else "left"

    def note_weights(self, name: str) -> None:
        """Notes the version of the weights that compute the next tokens. `name`: "" for the weights at the start."""
        if name != (self.weight_marks[-1][0] if self.weight_marks else ""):
            self.weight_marks.append((name, [each.num_delivered for each in self.sequences]))

    def weight_spans(self, index: int) -> list[tuple[str, int, int]]:
        """Returns (version, start, stop) for each version that computed part of a sequence: tokens [start, stop)."""
        marks = [("", 0), *((name, counts[index]) for name, counts in self.weight_marks)]
        ends = [start for _, start in marks[1:]] + [self.sequences[index].num_taken]
        spans = [(name, start, stop) for (name, start), stop in zip(marks, ends, strict=True)]
        return [span for span in spans if span[1] < span[2]]

    def num_decoding(self, instance: Instance) -> int:
        """Counts the sequences that this instance decodes."""
        return self.order.num_decoding if instance is self.decode else 0

    @property
    def num_tokens(self) -> int:
        """Counts the tokens of its prompt and the read tokens of its answer."""
        return len(self.order.prompt_token_ids) + sum(sequence.num_taken for sequence in self.sequences)

    @property
    def owner(self) -> bytes:
        """A pseudonym of the client of a request with an adapter; b"" without an adapter."""
        return wire.owner_of(self.origin.owner.client) if self.order.variant else b""

    @property
    def has_begun(self) -> bool:
        """Whether its reader has received a token."""
        return any(sequence.num_taken for sequence in self.sequences)

    @property
    def transfer_id(self) -> str:
        return f"{self.request_id}-{self.attempt}"

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    @property
    def is_over(self) -> bool:
        """Whether all sequences are over; a plain loop, because it runs for every token."""
        for sequence in self.sequences:  # noqa: SIM110
            if not sequence.is_over:
                return False
        return True
