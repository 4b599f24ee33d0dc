"""A request across the cluster: two legs out, one stream of tokens back, every sequence in order.

Start reading at `Router.serve`. Runs on the scheduler's event loop. Knows nothing of HTTP or text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection

from pd_cluster import wire
from pd_cluster.cluster.members.instance import Instance
from pd_cluster.cluster.members.roster import Members
from pd_cluster.cluster.routing.adapter_use import AdapterCounts
from pd_cluster.cluster.routing.dispatch import Dispatch, Send
from pd_cluster.cluster.routing.entrance import ANYBODY, SHUTTING_DOWN, Entrance, Visitor
from pd_cluster.cluster.routing.fair_queue import QueueEntry
from pd_cluster.cluster.routing.policy import Pair, Policy, RoutingRequest, for_all_kinds
from pd_cluster.cluster.routing.predict import NO_GOALS, Goals
from pd_cluster.cluster.routing.replays import ReplayLimits, check_replay, next_pair
from pd_cluster.cluster.routing.room import room_of
from pd_cluster.cluster.routing.slices import Slices
from pd_cluster.cluster.routing.stats import ReplayCause, RequestStats
from pd_cluster.cluster.routing.steering import Steering
from pd_cluster.cluster.routing.stream import Death, RequestStream, Setback, TokenSequence, ask_of
from pd_cluster.cluster.routing.timeline import Timelines
from pd_cluster.errors import (
    DeadlineExceeded,
    GenerationError,
    InstanceLost,
    Overloaded,
    PdClusterError,
    RequestAborted,
    RequestError,
    Unavailable,
)
from pd_cluster.reports import Gate
from pd_cluster.types import FinishReason, LegEnd, Order, PooledOutput, PromptOutput, TokenOutput

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MOST_PAUSE_S = 0.02, 1.0  # after an instance was full; twice as long each time
FULL_RETRY_S = 1


def _unheard(prompt: PromptOutput) -> None:
    """Ignores a prompt's outputs."""


class Router:
    """Follows `membership` and chooses among its instances. `goals` and `max_queue_s` are the entrance's."""

    def __init__(
        self,
        send: Send,
        membership: Members,
        choose: Policy,
        request_timeout_s: float,
        replay: ReplayLimits | None = None,
        goals: Goals = NO_GOALS,
        max_queue_s: float | None = None,
        has_priorities: bool = False,
        shares_workers: bool = False,
    ) -> None:
        """`shares_workers`: other schedulers send requests to the same instances, which may be full then."""
        self.membership = membership
        self._choose = choose = for_all_kinds(choose)
        self._request_timeout_s = request_timeout_s
        self._limits = replay or ReplayLimits()
        self.pause: Callable[[float], Awaitable[None]] = asyncio.sleep  # before the next attempt at a full instance
        self._streams: dict[str, RequestStream] = {}
        self._slices = Slices(self._on_slice)
        self._counter = itertools.count()
        self._life = secrets.token_hex(4)
        self.timelines = Timelines()
        self.stats = RequestStats()
        self.adapters = AdapterCounts()
        self.entrance = Entrance(
            membership, choose, self.stats, goals, self._limits.together_s, max_queue_s, has_priorities
        )
        self._dispatch = Dispatch(send, self.entrance.look, shares_workers, lambda: membership.instances)
        self.steering = Steering(self._streams, self.entrance, self.timelines, self._move)
        membership.watch(self)

    @property
    def num_streams(self) -> int:
        """Counts requests that have an instance, or look for another."""
        return len(self._streams) - self.steering.num_kept

    @property
    def num_waiting(self) -> int:
        return self.entrance.num_waiting + self.steering.num_kept

    async def serve(
        self,
        order: Order,
        routed: Callable[[RequestStream], None] = lambda stream: None,
        prompted: Callable[[PromptOutput], None] = _unheard,
        client_id: str = "",
        received_s: float | None = None,
        visitor: Visitor = ANYBODY,
    ) -> AsyncIterator[TokenOutput]:
        """Serves a request across the cluster; yields every token of its n sequences once, each sequence in order.

        When an instance or a link that it needs is lost, the request continues elsewhere, after the tokens that were
        delivered: the next token depends on nothing else.

        A sequence ends with a token that has a finish_reason, or when the reader calls `stop` of the stream that
        `routed` received; the iterator ends when all have. `prompted` is called before the first token. Raises
        Unavailable and Overloaded before the first token, GenerationError after it. Closing the iterator aborts all.
        Before it is sent to any instance, the request may wait for its turn, which `visitor` controls. `client_id` and
        `received_s` are its outside name and arrival time, for its timeline. Where the order gathers, the last token of
        a sequence arrives together with those before it, and an item may have `earlier` ones.
        """
        loop, timeout_s = asyncio.get_running_loop(), self._request_timeout_s
        deadline_s = loop.time() + timeout_s if timeout_s else None
        stream, entry = await self._begin(order, deadline_s, client_id, received_s, visitor)
        stream.prompted = prompted
        late = DeadlineExceeded(f"the request took longer than {timeout_s:g} s")
        # One timer per request: one around every wait costs more than all other work on a token.
        expiry = loop.call_at(deadline_s, stream.inbox.put, late) if deadline_s is not None else None
        is_first, item = True, None
        try:
            try:
                self._dispatch.submit(stream, max(0.001, deadline_s - loop.time()) if deadline_s is not None else 0.0)
            finally:
                self.entrance.begun(entry)  # in any case: the others wait for it
            routed(stream)
            while not stream.is_over:
                item = await stream.inbox.get()
                if isinstance(item, TokenOutput):
                    if not stream.take(item):
                        continue
                    if is_first:
                        self._note_first(stream, order)
                        is_first = False
                    yield item
                elif isinstance(item, Setback):
                    if self.steering.keeps(stream, item):
                        continue
                    async with asyncio.timeout_at(deadline_s):
                        await self._replay(stream, item, deadline_s)
                elif item is not None:
                    raise item
        except TimeoutError:
            raise late from None
        finally:
            del late  # an exception refers to this frame: a reference back would leave both to the garbage collector
            item = None
            if expiry is not None:
                expiry.cancel()
            stream.prompted = _unheard  # the reader may hold the stream: no cycle that outlives the request
            self._finish(stream, entry, is_first)

    def _note_first(self, stream: RequestStream, order: Order) -> None:
        self.timelines.first_token(stream.request_id, stream.heard_s, stream.first_s if order.gathers else None)
        self.adapters.begins(order.variant)

    async def pool(
        self,
        order: Order,
        client_id: str = "",
        received_s: float | None = None,
        visitor: Visitor = ANYBODY,
        routed: Callable[[RequestStream], None] = lambda stream: None,
    ) -> PooledOutput:
        """Returns the vector of a prompt whose order has a `pooling`. Parameters, errors and replays are `serve`'s."""
        streams: list[RequestStream] = []

        def note(stream: RequestStream) -> None:
            streams.append(stream)
            routed(stream)

        served = self.serve(order, note, _unheard, client_id, received_s, visitor)
        async with contextlib.aclosing(served) as tokens:  # type: ignore[type-var]
            async for token in tokens:
                raise GenerationError(f"{streams[0].decode.name} sent token {token.token_id} in place of a vector")
        (stream,) = streams
        if stream.pooled is None:
            raise GenerationError("the request was stopped before its vector was there")
        return stream.pooled

    async def _begin(
        self, order: Order, deadline_s: float | None, client_id: str, received_s: float | None, visitor: Visitor
    ) -> tuple[RequestStream, QueueEntry | None]:
        """Opens a stream once the request has its pair. Raises Unavailable, Overloaded, DeadlineExceeded."""
        self.adapters.arrives(order.variant)
        try:
            return await self._paired(order, deadline_s, client_id, received_s, visitor)
        except BaseException:
            self.adapters.ends(order.variant, has_begun=False)
            raise

    async def _paired(
        self, order: Order, deadline_s: float | None, client_id: str, received_s: float | None, visitor: Visitor
    ) -> tuple[RequestStream, QueueEntry | None]:
        arrived_s = self.stats.clock() if received_s is None else received_s
        ask = ask_of(order)
        found = self.entrance.pair_at_once(ask, order.num_decoding, order.priority, visitor)
        try:
            if found is None:
                async with asyncio.timeout_at(deadline_s):
                    found = await self.entrance.pair(ask, order.num_decoding, order.priority, visitor)
        except TimeoutError:
            waited_s = self._request_timeout_s
            raise DeadlineExceeded(f"the request has waited for its turn for {waited_s:g} s") from None
        pair, entry = found
        stream = self._open(order, ask, pair, arrived_s)
        prefill, decode = ((instance.conn, instance.name) for instance in (stream.prefill, stream.decode))
        num_tokens = len(order.prompt_token_ids)
        self.timelines.routed(stream.request_id, stream.transfer_id, client_id, received_s, num_tokens, prefill, decode)
        return stream, entry

    async def _replay(self, stream: RequestStream, setback: Setback, deadline_s: float | None) -> None:
        """Starts another attempt elsewhere, after the delivered tokens.

        Raises the setback's error if there is none; Overloaded where instances were full.
        """
        if stream.is_finished:
            return
        check_replay(stream, setback, self.membership.instances, self._limits)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._limits.wait_s
        error: PdClusterError = setback.error
        stream.num_full = stream.num_full + 1 if setback.cause == "full" else 0
        if stream.num_full:
            if stream.num_full == 1:
                stream.full_until_s = until_s
            until_s, error = stream.full_until_s, Overloaded(str(setback.error), FULL_RETRY_S)
            await self._until_room(until_s, stream.num_full, error)
            if self.steering.keeps(stream, setback):
                return
        while True:
            if self.entrance.is_closed:
                raise GenerationError(f"{SHUTTING_DOWN}; {setback.error}")
            try:
                stream.prefill, stream.decode = next_pair(stream, self.membership.instances, self._choose)
                break
            except Unavailable:
                try:
                    async with asyncio.timeout_at(until_s):
                        await self.entrance.change()
                except TimeoutError:
                    raise error from None
                if self.steering.keeps(stream, setback):
                    return
        name, why = stream.decode.name, str(setback.error)
        shown = {"request_id": self.timelines.shown_id(stream.request_id)}
        log.info("request %s goes on at %s: %s", stream.request_id, name, why, extra=shown)
        self.timelines.replayed(stream.request_id, stream.transfer_id, stream.decode.conn, name, why)
        self.stats.replayed(setback.cause)
        self._dispatch.submit(stream, max(0.001, deadline_s - loop.time()) if deadline_s is not None else 0.0)

    async def _until_room(self, until_s: float, num_full: int, error: Overloaded) -> None:
        """Waits for later reports, by which there is room, or for the end of this process.

        `num_full`: how often in a row an instance was full: each time it waits longer. Raises the error when it takes
        too long.
        """
        try:
            async with asyncio.timeout_at(until_s):
                await self.entrance.change()
                await self.pause(min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(num_full - 1, 10)))
                while not self.entrance.is_closed:
                    room = room_of(self.membership.instances)
                    if room.for_prompts and room.for_sequences:
                        return
                    await self.entrance.change()
        except TimeoutError:
            raise error from None

    def expect_instances(self) -> None:
        """Announces that instances will become known: early requests wait a moment, as when all were lost just now."""
        self.entrance.lost()

    def _open(self, order: Order, ask: RoutingRequest, pair: Pair, received_s: float) -> RequestStream:
        request_id = f"{self._life}-{next(self._counter)}"
        sequences = [TokenSequence(index) for index in range(order.sampling.n)]
        send, stats = self._dispatch.send, self.stats
        stream = RequestStream(
            request_id, 0, {}, order, ask, *pair, sequences, send, stats=stats, received_s=received_s
        )
        self._streams[request_id] = stream
        return stream

    def _finish(self, stream: RequestStream, entry: QueueEntry | None, is_first: bool) -> None:
        """Aborts the legs that have not ended by themselves, and forgets the request."""
        if self._streams.pop(stream.request_id, None) is not None:
            self._dispatch.abort(stream)
        self.entrance.ended(entry, stream.num_tokens)
        self.steering.ended(stream)
        self.adapters.ends(stream.order.variant, has_begun=not is_first)
        self._note_end(stream, sys.exception())

    def _note_end(self, stream: RequestStream, error: BaseException | None) -> None:
        """Records the request's end; unfinished sequences count as aborted by the reader, unless an error ended it."""
        timeline = self.timelines.find(stream.request_id)
        admitted_s = timeline.admitted_s(stream.first_s) if timeline is not None else None
        handovers_s = timeline.handovers_s() if timeline is not None else []
        is_fault = isinstance(error, PdClusterError) and not isinstance(error, RequestAborted)
        left: FinishReason = "error" if is_fault else "abort"
        outcome = stream.outcome(left, admitted_s, handovers_s)
        self.stats.ended(outcome)
        self.timelines.ended(stream.request_id, "" if stream.is_over else _why(error), outcome)

    def _give_up(self, stream: RequestStream) -> None:
        """Ends a stream that is not read. The reader may still take what has arrived, and then the reason."""
        self._dispatch.abort(stream)
        stream.inbox.put(GenerationError(f"the client leaves more than {stream.max_unread} tokens unread"))

    def _retreat(self, stream: RequestStream, error: GenerationError, cause: ReplayCause) -> None:
        """Ends a failed attempt, whatever its other leg still does."""
        self._dispatch.abort(stream)
        stream.retreat(error, cause)

    # ---- events from the workers

    def on_outputs_at_once(self, conn: str, outputs: wire.Outputs) -> None:
        """Handles outputs at once, where nothing else needs the event loop meanwhile."""
        self._on_slice(conn, outputs, self.timelines.now_s())

    def on_outputs(self, conn: str, outputs: wire.Outputs, heard_s: float | None = None) -> None:
        """Handles outputs; `heard_s` is when they were read, by the timelines' clock; None: just now."""
        self._slices.add(conn, outputs, self.timelines.now_s() if heard_s is None else heard_s)

    def _on_slice(self, conn: str, outputs: wire.Outputs, heard_s: float) -> None:
        for prompt in outputs.prompts:
            if (stream := self._stream_of(conn, prompt)) is not None:
                stream.put_prompt(prompt)
                stream.release(stream.sequences)
        for token in outputs.tokens:
            if (stream := self._stream_of(conn, token)) is not None:
                stream.put(token)
                if not stream.heard_s:
                    stream.heard_s = heard_s
                if token.finish_reason is not None and stream.is_finished:
                    self._dispatch.ended(stream, conn)
                elif len(stream.inbox) > stream.max_unread:
                    self._give_up(stream)
        for pooled in outputs.pooled:
            if (stream := self._stream_of(conn, pooled)) is not None:
                stream.put_pooled(pooled)
                self._dispatch.ended(stream, conn)
        for ended in outputs.ended:
            self._on_leg_end(conn, ended)
        self.timelines.add(conn, outputs.events)

    def _stream_of(self, conn: str, output: TokenOutput | PromptOutput | PooledOutput | LegEnd) -> RequestStream | None:
        """Returns the stream that this output of this leg belongs to, if it is still wanted."""
        stream = self._streams.get(output.request_id)
        if stream is None or output.attempt != stream.attempt or conn not in stream.legs:
            return None
        if stream.legs[conn] is stream.prefill and not stream.has_prefill_spoken:
            stream.has_prefill_spoken = True
            if not isinstance(output, PromptOutput):
                stream.release(stream.sequences)  # tokens that decode delivered first
        return stream

    def _on_leg_end(self, conn: str, ended: LegEnd) -> None:
        if (stream := self._stream_of(conn, ended)) is None:
            return
        name = stream.legs[conn].name
        self._dispatch.ended(stream, conn)
        stream.release(stream.sequences)
        if ended.error is not None:
            error = GenerationError(f"{name}: {ended.error}")
            if ended.is_refusal:
                stream.inbox.put(RequestError(ended.error))
            elif ended.is_full:
                stream.num_moves += 1
                self._retreat(stream, error, "full")
            elif ended.is_fault:
                stream.ask.avoid.add((stream.prefill.key, stream.decode.key))
                self._retreat(stream, error, "fault")
            else:
                stream.inbox.put(error)

    async def steer(self, gate: Gate, aborts: Collection[str] | None = None, keeps: bool = False) -> None:
        """See members/control.py."""
        self.steering.steer(gate, aborts, keeps)

    async def until_idle(self) -> None:
        """Returns when no request is at an instance."""
        await self.steering.until_idle()

    def end_all(self) -> None:
        """Ends all running requests with an error in their streams, because this process stops."""
        for stream in self._streams.values():
            stream.inbox.put(GenerationError(SHUTTING_DOWN))
        self.entrance.close()

    def move_on(self, instance: Instance, why: str) -> None:
        """Moves every request with a leg there elsewhere, if possible. The instance lives and receives the aborts."""
        for stream in list(self._streams.values()):
            if any(member is instance for member in stream.legs.values()):
                self._move(stream, f"{instance.name} gave up this request: {why}")

    def _move(self, stream: RequestStream, why: str) -> None:
        """Ends an attempt that has not failed."""
        stream.num_moves += 1
        self._retreat(stream, GenerationError(why), "moved")

    def on_lost(self, instance: Instance, reason: str) -> None:
        """Moves every request with a leg there elsewhere, if possible."""
        self.entrance.lost()
        lost_s = asyncio.get_running_loop().time()
        for stream in list(self._streams.values()):
            for conn in [conn for conn, member in stream.legs.items() if member is instance]:
                self._dispatch.ended(stream, conn)
                stream.deaths.append(Death(instance.key, lost_s))
                error = InstanceLost(f"{instance.name} was lost while it served this request: {reason}")
                self._retreat(stream, error, "death")


def _why(error: BaseException | None) -> str:
    """Returns why a request ended before all its sequences had; without an error of ours, its reader has left."""
    return str(error) if isinstance(error, PdClusterError) else "the client left before the end"
