"""A request across the cluster: two legs out, one stream of tokens back, every sequence in order.

Start reading at `Router.serve`. Runs on the scheduler's event loop. Knows nothing of HTTP or text.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Collection
from typing import Literal

from pd_cluster import wire
from pd_cluster.cluster.members.instance import Instance
from pd_cluster.cluster.members.roster import Members
from pd_cluster.cluster.routing.adapter_use import AdapterCounts
from pd_cluster.cluster.routing.admission import ANYBODY, SHUTTING_DOWN, RequestAdmission, RequestOwner
from pd_cluster.cluster.routing.admission_queue import Ending
from pd_cluster.cluster.routing.dispatch import Dispatch, Send
from pd_cluster.cluster.routing.endings import Endings
from pd_cluster.cluster.routing.fair_queue import QueueEntry
from pd_cluster.cluster.routing.output_dispatcher import OutputDispatcher
from pd_cluster.cluster.routing.pause_control import PauseControl
from pd_cluster.cluster.routing.policy import Pair, Policy, RoutingRequest, for_all_kinds
from pd_cluster.cluster.routing.predict import NO_GOALS, Goals
from pd_cluster.cluster.routing.replays import ReplayLimits
from pd_cluster.cluster.routing.resume import Finder, KeptStream, RecordPlace
from pd_cluster.cluster.routing.retry import Retry
from pd_cluster.cluster.routing.stats import RequestStats
from pd_cluster.cluster.routing.stream import Death, RequestStream, Setback, TokenSequence, ask_of
from pd_cluster.cluster.routing.timeline import Timelines
from pd_cluster.errors import (
    DeadlineExceeded,
    GenerationError,
    InstanceLost,
    PdClusterError,
    Unavailable,
)
from pd_cluster.reports import Gate
from pd_cluster.types import Order, PooledOutput, PromptOutput, TokenOutput

FIND_S = 5.0


def _unheard(prompt: PromptOutput) -> None:
    """Ignores a prompt's outputs."""


class Router:
    """Follows `membership` and chooses among its instances. `goals` and `max_queue_s` are its admission's."""

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
        find_s: float = FIND_S,
    ) -> None:
        """`shares_workers`: other schedulers send requests to the same instances, which may be full then.

        `find_s`: how long instances may take to say whether they have the record of a stream that resumes.
        """
        self.membership = membership
        choose = for_all_kinds(choose)
        self._request_timeout_s = request_timeout_s
        limits = replay or ReplayLimits()
        self.streams: dict[str, RequestStream] = {}
        self._counter = itertools.count()
        self._life = secrets.token_hex(4)
        self.timelines = Timelines()
        self.stats = RequestStats()
        self.adapters = AdapterCounts()
        self.admission = RequestAdmission(membership, choose, self.stats, goals, limits, max_queue_s, has_priorities)
        self._dispatch = Dispatch(send, self.admission.look, shares_workers, lambda: membership.instances)
        self._endings = Endings(
            self.streams, self._dispatch, self.stats, self.timelines, lambda stream: self.pause_control.ended(stream)
        )
        self.pause_control = PauseControl(self.streams, self.admission, self.timelines, self._endings.move)
        self.output_dispatcher = OutputDispatcher(self.streams, self._dispatch, self.timelines, self._endings)
        self.retry = Retry(
            *(self.streams, membership, choose, limits, self.admission, self.pause_control, self._dispatch),
            *(self.stats, self.timelines),
        )
        self.on_outputs, self.on_outputs_at_once = self.output_dispatcher.add, self.output_dispatcher.add_at_once
        self._finder = Finder(send, membership, find_s)
        self.on_found = self._finder.on_found
        membership.watch(self)

    @property
    def num_streams(self) -> int:
        """Counts requests that have an instance, or look for another."""
        return len(self.streams) - self.pause_control.num_kept

    @property
    def num_waiting(self) -> int:
        return self.admission.num_waiting + self.pause_control.num_kept

    async def serve(
        self,
        order: Order,
        routed: Callable[[RequestStream], None] = lambda stream: None,
        prompted: Callable[[PromptOutput], None] = _unheard,
        client_id: str = "",
        received_s: float | None = None,
        owner: RequestOwner = ANYBODY,
        kept: KeptStream | None = None,
    ) -> AsyncIterator[TokenOutput]:
        """Serves a request across the cluster; yields every token of its n sequences once, each sequence in order.

        When an instance or a link that it needs is lost, the request continues elsewhere, after the tokens that were
        delivered: the next token depends on nothing else.

        A sequence ends with a token that has a finish_reason, or when the reader calls `stop` of the stream that
        `routed` received; the iterator ends when all have. `prompted` is called before the first token. Raises
        Unavailable and Overloaded before the first token, GenerationError after it. Closing the iterator aborts all.
        Before it is sent to any instance, the request may wait for its turn, which `owner` controls. `client_id` and
        `received_s` are its outside name and arrival time, for its timeline. Where the order gathers, the last token of
        a sequence arrives together with those before it, and an item may have `earlier` ones. `kept`: see resume.py.
        """
        loop, timeout_s = asyncio.get_running_loop(), self._request_timeout_s
        deadline_s = loop.time() + timeout_s if timeout_s else None
        stream, entry = await self._begin(order, deadline_s, client_id, received_s, owner, kept)
        stream.prompted = prompted
        late = DeadlineExceeded(f"the request took longer than {timeout_s:g} s")
        # One timer per request: one around every wait costs more than all other work on a token.
        expiry = loop.call_at(deadline_s, stream.inbox.put, late) if deadline_s is not None else None
        is_first, item = True, None
        try:
            try:
                self._send(stream, max(0.001, deadline_s - loop.time()) if deadline_s is not None else 0.0)
            finally:
                self.admission.begun(entry)  # in any case: the others wait for it
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
                    async with asyncio.timeout_at(deadline_s):
                        await self.retry.replay(stream, item, deadline_s)
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

    def _send(self, stream: RequestStream, deadline_s: float) -> None:
        """Begins the first attempt: submits legs, or takes over the one of a stream that resumes."""
        if stream.kept is not None and stream.kept.place is not None:
            self._dispatch.attach(stream, stream.kept.place)
        else:
            self._dispatch.submit(stream, deadline_s)

    def _note_first(self, stream: RequestStream, order: Order) -> None:
        told_s = stream.heard_s + stream.held_s  # what waited for decode took no time here
        self.timelines.first_token(stream.request_id, told_s, stream.first_s if order.gathers else None)
        self.adapters.begins(order.variant)

    async def pool(
        self,
        order: Order,
        client_id: str = "",
        received_s: float | None = None,
        owner: RequestOwner = ANYBODY,
        routed: Callable[[RequestStream], None] = lambda stream: None,
    ) -> PooledOutput:
        """Returns the vector of a prompt whose order has a `pooling`. Parameters, errors and replays are `serve`'s."""
        streams: list[RequestStream] = []

        def note(stream: RequestStream) -> None:
            streams.append(stream)
            routed(stream)

        served = self.serve(order, note, _unheard, client_id, received_s, owner)
        async with contextlib.aclosing(served) as tokens:  # type: ignore[type-var]
            async for token in tokens:
                raise GenerationError(f"{streams[0].decode.name} sent token {token.token_id} in place of a vector")
        (stream,) = streams
        if stream.pooled is None:
            raise GenerationError("the request was stopped before its vector was there")
        return stream.pooled

    async def _begin(
        self,
        order: Order,
        deadline_s: float | None,
        client_id: str,
        received_s: float | None,
        owner: RequestOwner,
        kept: KeptStream | None,
    ) -> tuple[RequestStream, QueueEntry | None]:
        """Opens a stream once the request has its pair. Raises Unavailable, Overloaded, DeadlineExceeded."""
        self.adapters.arrives(order.variant)
        try:
            if kept is not None and kept.place is not None:
                stream, entry = self._attached(order, kept.place, client_id, received_s), None
            else:
                stream, entry = await self._paired(order, deadline_s, client_id, received_s, owner)
            stream.kept = kept
            return stream, entry
        except BaseException:
            self.adapters.ends(order.variant, has_begun=False)
            raise

    async def _paired(
        self, order: Order, deadline_s: float | None, client_id: str, received_s: float | None, owner: RequestOwner
    ) -> tuple[RequestStream, QueueEntry | None]:
        arrived_s = self.stats.clock() if received_s is None else received_s
        ask = ask_of(order)
        found = self.admission.pair_at_once(ask, order.num_decoding, order.priority, owner)
        try:
            if found is None:
                async with asyncio.timeout_at(deadline_s):
                    found = await self.admission.pair(ask, order.num_decoding, order.priority, owner)
        except TimeoutError:
            waited_s = self._request_timeout_s
            raise DeadlineExceeded(f"the request has waited for its turn for {waited_s:g} s") from None
        pair, entry = found
        stream = self._open(order, ask, pair, arrived_s)
        if order.variant:
            stream.owner = wire.owner_of(owner.client)
        prefill, decode = ((instance.conn, instance.name) for instance in (stream.prefill, stream.decode))
        num_tokens = len(order.prompt_token_ids)
        self.timelines.routed(stream.request_id, stream.transfer_id, client_id, received_s, num_tokens, prefill, decode)
        return stream, entry

    def expect_instances(self) -> None:
        """Announces that instances will become known: early requests wait a moment, as when all were lost just now."""
        self.admission.lost()

    def _open(
        self, order: Order, ask: RoutingRequest, pair: Pair, received_s: float, found: wire.Found | None = None
    ) -> RequestStream:
        request_id = f"{self._life}-{next(self._counter)}" if found is None else found.request_id
        sequences = [TokenSequence(index) for index in range(order.sampling.n)]
        send, stats = self._dispatch.send, self.stats
        attempt = 0 if found is None else found.attempt
        stream = RequestStream(
            request_id, attempt, {}, order, ask, *pair, sequences, send, stats=stats, received_s=received_s
        )
        self.streams[request_id] = stream
        return stream

    def _finish(self, stream: RequestStream, entry: QueueEntry | None, is_first: bool) -> None:
        """Aborts the legs that have not ended by themselves, and forgets the request."""
        stream.drop_hold()
        if is_read := self.streams.get(stream.request_id) is stream:
            del self.streams[stream.request_id]
            if stream.kept is None:
                self._dispatch.abort(stream)
            else:
                self._dispatch.release(stream, self._then(stream, sys.exception()))
        self.admission.ended(entry, stream.num_tokens, _how_ended(stream, sys.exception()))
        if is_read:
            self.pause_control.ended(stream)
        self.adapters.ends(stream.order.variant, has_begun=not is_first)
        if is_read:
            self._endings.note(stream, sys.exception())

    def _then(self, stream: RequestStream, error: BaseException | None) -> Literal["go on", "stop", "forget"]:
        """Returns what becomes of a kept stream that is not read any more."""
        if stream.is_over:
            return "stop"
        if self.admission.is_closed:
            return "go on"
        if _how_ended(stream, error) == "failed" or stream.kept is None or not stream.kept.outlives_client:
            return "forget"
        return "stop" if self.admission.num_waiting else "go on"  # others need the instance; what is kept is enough

    # ---- streams that resume

    async def find(self, digest: bytes) -> RecordPlace | None:
        """Returns the place of a kept stream; one that is read here ends first. Raises Overloaded, Unavailable."""
        for stream in list(self.streams.values()):
            if stream.kept is not None and hmac.compare_digest(stream.kept.keep.digest, digest):
                if not stream.legs and not stream.is_finished:
                    raise Unavailable("the stream has lost its instance and looks for another; ask again")
                self._endings.take(stream, "go on")
        await self.admission.all_are_here()
        return await self._finder.find(digest)

    def _attached(self, order: Order, place: RecordPlace, client_id: str, received_s: float | None) -> RequestStream:
        """Opens a stream at the instance that has its record. Output for an earlier reader here is dropped."""
        found, instance = place.found, place.instance
        if (before := self.streams.get(found.request_id)) is not None:  # found by two at once
            self._endings.take(before, "")
        self.output_dispatcher.forget(found.request_id)
        arrived_s = self.stats.clock() if received_s is None else received_s
        stream = self._open(order, ask_of(order), (instance, instance), arrived_s, found)
        stream.numerics = instance.info.numerics if instance.info is not None else None
        stream.max_unread += found.num_tokens
        line, num_tokens = (instance.conn, instance.name), len(order.prompt_token_ids)
        self.timelines.routed(stream.request_id, stream.transfer_id, client_id, received_s, num_tokens, line, line)
        return stream

    # ---- events from the workers

    async def steer(self, gate: Gate, aborts: Collection[str] | None = None, keeps: bool = False) -> None:
        """See members/control.py."""
        self.pause_control.steer(gate, aborts, keeps)

    async def until_idle(self) -> None:
        """Returns when no request is at an instance."""
        await self.pause_control.until_idle()

    def end_all(self) -> None:
        """Ends all running requests with an error in their streams, because this process stops."""
        for stream in self.streams.values():
            stream.inbox.put(GenerationError(SHUTTING_DOWN))
        self.admission.close()

    def move_on(self, instance: Instance, why: str) -> None:
        """Moves every request with a leg there elsewhere, if possible. The instance lives and receives the aborts."""
        for stream in list(self.streams.values()):
            if any(member is instance for member in stream.legs.values()):
                self._endings.move(stream, f"{instance.name} gave up this request: {why}")

    def on_lost(self, instance: Instance, reason: str) -> None:
        """Moves every request with a leg there elsewhere, if possible."""
        self.admission.lost()
        lost_s = asyncio.get_running_loop().time()
        for stream in list(self.streams.values()):
            for conn in [conn for conn, member in stream.legs.items() if member is instance]:
                self._dispatch.ended(stream, conn)
                stream.deaths.append(Death(instance.key, lost_s))
                error = InstanceLost(f"{instance.name} was lost while it served this request: {reason}")
                self._endings.retreat(stream, error, "death")


def _how_ended(stream: RequestStream, error: BaseException | None) -> Ending:
    if stream.is_over:
        return "answered"
    return "failed" if isinstance(error, PdClusterError) else "left"  # its reader is gone
