"""Serves a request across the cluster: sends two legs, returns one stream of tokens with each sequence in order.

Start reading at `Router.serve`. Runs on the scheduler's event loop. Knows nothing of HTTP or text.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import replace

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.roster import Members
from pd_cluster.cluster.placement.routing_policy import for_all_kinds
from pd_cluster.cluster.placement.routing_rules import RoutingRules
from pd_cluster.cluster.records.adapter_counts import AdapterCounts
from pd_cluster.cluster.records.request_stats import RequestStats
from pd_cluster.cluster.records.request_timeline import Timelines
from pd_cluster.cluster.routing.leg_dispatch import LegDispatch
from pd_cluster.cluster.routing.output_dispatcher import OutputDispatcher
from pd_cluster.cluster.routing.pause_control import PauseControl
from pd_cluster.cluster.routing.request_admission import SHUTTING_DOWN, RequestAdmission
from pd_cluster.cluster.routing.request_records import RequestRecords
from pd_cluster.cluster.routing.request_retry import Retry
from pd_cluster.cluster.routing.served_requests import ServedRequests
from pd_cluster.cluster.streams.request_origin import FROM_ANYBODY, AdmittedRequest, RequestOrigin
from pd_cluster.cluster.streams.request_stream import Death, Ending, RequestStream, Send, Setback, ask_of, ignore_prompt
from pd_cluster.cluster.streams.stream_records import RecordFinder, RecordPlace
from pd_cluster.cluster.streams.stream_table import Afterwards, StreamEnd, StreamTable
from pd_cluster.errors import DeadlineExceeded, GenerationError, InstanceLost, Unavailable
from pd_cluster.process_messages import Gate
from pd_cluster.types import PooledOutput, PromptOutput, RequestSpec, TokenOutput

MOST_AT_ONCE = 1 << 15  # the longest prompt, in tokens, that is looked up in caches without letting other tasks run


class Router:
    """Follows `membership` and chooses among its instances by `rules`."""

    def __init__(
        self,
        send: Send,
        membership: Members,
        rules: RoutingRules,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        rules = replace(rules, choose=for_all_kinds(rules.choose))
        self.membership = membership
        self._request_timeout_s = rules.request_timeout_s
        self.timelines, self.stats, self.adapters = Timelines(clock), RequestStats(clock), AdapterCounts()
        self.streams = StreamTable(send, self.stats)
        self.admission = RequestAdmission(self.streams, membership, rules, self.stats)
        self._dispatch = LegDispatch(self.streams, send, membership, rules.shares_workers)
        self.pause_control = PauseControl(self.streams, self.admission, self.timelines)
        self.output_dispatcher = OutputDispatcher(self.streams, self._dispatch, self.timelines, rules.holds_first)
        self.retry = Retry(self.streams, membership, rules, self.admission, self.pause_control, self._dispatch)
        RequestRecords(self.streams, self.stats, self.timelines, self.adapters)
        self.served = ServedRequests(self.streams, rules.keeps.max_requests, rules.keeps.secret)
        self.on_outputs, self.on_outputs_at_once = self.output_dispatcher.add, self.output_dispatcher.add_at_once
        self._finder = RecordFinder(send, membership, rules.find_s)
        self.on_found = self._finder.on_found
        membership.watch(self)

    @property
    def num_streams(self) -> int:
        """Counts requests that have an instance or are looking for another one."""
        return len(self.streams) - self.pause_control.num_kept

    @property
    def num_waiting(self) -> int:
        return self.admission.num_waiting + self.pause_control.num_kept

    async def serve(
        self,
        order: RequestSpec,
        routed: Callable[[RequestStream], None] = lambda stream: None,
        prompted: Callable[[PromptOutput], None] = ignore_prompt,
        origin: RequestOrigin = FROM_ANYBODY,
    ) -> AsyncIterator[TokenOutput]:
        """Serves a request across the cluster; yields every token of its n sequences once, each sequence in order.

        If the request loses an instance or a link, it continues elsewhere after the delivered tokens: the next token
        depends only on the RequestSpec and these tokens.

        A sequence ends with a token that has a finish_reason, or when the reader calls `stop` of the stream that
        `routed` received; the iterator ends when all sequences have ended. `prompted` is called before the first token.
        Raises Unavailable and Overloaded before the first token, GenerationError after it. Closing the iterator aborts
        the request.
        Before it is sent to an instance, the request may wait in the admission queue, under the limits of
        `origin.owner`. If the RequestSpec gathers, several tokens of a sequence may arrive as one item: the last, with
        the others in `earlier`.
        """
        loop, timeout_s = asyncio.get_running_loop(), self._request_timeout_s
        deadline_s = loop.time() + timeout_s if timeout_s else None
        stream = await self._begin(order, origin, deadline_s)
        stream.prompted = prompted
        late = DeadlineExceeded(f"the request took longer than {timeout_s:g} s")
        # One timer per request: a timer around every wait costs more than all other work on a token.
        expiry = loop.call_at(deadline_s, stream.inbox.put, late) if deadline_s is not None else None
        is_first, item = True, None
        try:
            try:
                self._send(stream, max(0.001, deadline_s - loop.time()) if deadline_s is not None else 0.0)
            finally:
                self.admission.begun(stream.admitted.entry)  # even after an error: other requests wait for this call
            routed(stream)
            while not stream.is_over:
                item = await stream.inbox.get()
                if isinstance(item, TokenOutput):
                    if not stream.take(item):
                        continue
                    if is_first:
                        self.streams.begun(stream)
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
            # An exception refers to this frame. If the frame also referred to it, only the garbage collector would free
            # both.
            del late
            item = None
            if expiry is not None:
                expiry.cancel()
            stream.prompted = ignore_prompt  # the reader may hold the stream: avoids a cycle that outlives the request
            self._finish(stream)

    def _send(self, stream: RequestStream, deadline_s: float) -> None:
        """Begins the first attempt: submits legs, or attaches to the leg of a stream that resumes."""
        if stream.kept is not None and stream.kept.place is not None:
            self._dispatch.attach(stream, stream.kept.place)
        else:
            self._dispatch.submit(stream, deadline_s)

    async def pool(
        self,
        order: RequestSpec,
        routed: Callable[[RequestStream], None] = lambda stream: None,
        origin: RequestOrigin = FROM_ANYBODY,
    ) -> PooledOutput:
        """Returns the vector of a prompt whose RequestSpec has a `pooling`.

        Parameters, errors and replays are as in `serve`.
        """
        streams: list[RequestStream] = []

        def note(stream: RequestStream) -> None:
            streams.append(stream)
            routed(stream)

        async with contextlib.aclosing(self.serve(order, note, ignore_prompt, origin)) as tokens:  # type: ignore[type-var]
            async for token in tokens:
                raise GenerationError(f"{streams[0].decode.name} sent token {token.token_id} instead of a vector")
        (stream,) = streams
        if stream.pooled is None:
            raise GenerationError("the request was stopped before its vector arrived")
        return stream.pooled

    async def _begin(self, order: RequestSpec, origin: RequestOrigin, deadline_s: float | None) -> RequestStream:
        """Opens a stream once the request has its pair. Raises Unavailable, Overloaded, DeadlineExceeded."""
        self.adapters.arrives(order.variant)
        if origin.kept is None or origin.kept.place is None:  # a request that resumes was counted when it first arrived
            self.stats.arrived(len(order.prompt_token_ids), order.num_decoding, order.most_output_tokens)
        try:
            return self.streams.open(order, *await self._admitted(order, origin, deadline_s))
        except BaseException:
            self.adapters.ends(order.variant, has_begun=False)
            raise

    async def _admitted(
        self, order: RequestSpec, origin: RequestOrigin, deadline_s: float | None
    ) -> tuple[RequestOrigin, AdmittedRequest]:
        """Returns the request's pair, and its origin with the time of its arrival."""
        ask = ask_of(order)
        if ask.prompt.num_tokens > MOST_AT_ONCE:
            for each in self.membership.instances:
                if each.known_blocks.tiers and (pool := each.pool_kind) is not None:
                    await ask.prompt.look_up(pool, each.known_blocks)
        if origin.kept is not None and (place := origin.kept.place) is not None:
            return origin, AdmittedRequest(ask, place.instance, place.instance)
        if origin.received_s is None:
            origin = origin._replace(received_s=self.stats.clock())
        found = self.admission.pair_at_once(ask, order.num_decoding, order.priority, origin.owner)
        try:
            if found is None:
                async with asyncio.timeout_at(deadline_s):
                    found = await self.admission.pair(ask, order.num_decoding, order.priority, origin.owner)
        except TimeoutError:
            waited_s = self._request_timeout_s
            raise DeadlineExceeded(f"the request has waited in the queue for {waited_s:g} s") from None
        return origin, found

    def expect_instances(self) -> None:
        """Announces that instances will soon become known: until then, requests wait a moment, as after the loss of all
        instances.
        """
        self.admission.lost()

    def _finish(self, stream: RequestStream) -> None:
        """Ends the stream; its unfinished legs are aborted, unless the stream is kept."""
        error = sys.exception()
        how = stream.how_ended(error)
        self.streams.end(stream, StreamEnd(how, error, self._then(stream, how)))

    def _then(self, stream: RequestStream, how: Ending) -> Afterwards:
        if stream.kept is None:
            return "abort"
        if how == "answered":
            return "stop"
        if self.admission.is_closed:
            return "go on"
        if how == "failed" or not stream.kept.outlives_client:
            return "forget"
        return "stop" if self.admission.num_waiting else "go on"  # a waiting client needs the instance more

    # ---- streams that resume

    async def find(self, digest: bytes) -> RecordPlace | None:
        """Returns the place of a kept stream.

        If a client of this process still reads the stream, that reading ends first. Raises Overloaded, Unavailable.
        """
        for stream in self.streams:
            if stream.kept is not None and hmac.compare_digest(stream.kept.keep.digest, digest):
                if not stream.legs and not stream.is_finished:
                    raise Unavailable("the stream has lost its instance and is looking for another one; ask again")
                self.streams.take_over(stream, "go on")
        await self.admission.all_are_here()
        return await self._finder.find(digest)

    # ---- events from the workers

    async def control_requests(self, gate: Gate, aborts: Collection[str] | None = None, keeps: bool = False) -> None:
        """Implements `ServingProcesses.control_requests` (members/cluster_control.py)."""
        self.pause_control.control_requests(gate, aborts, keeps)

    async def until_idle(self) -> None:
        """Waits until no instance has a request."""
        await self.pause_control.until_idle()

    def end_all(self) -> None:
        """Ends all running requests with an error in their streams, because this process stops."""
        for stream in self.streams:
            stream.inbox.put(GenerationError(SHUTTING_DOWN))
        self.admission.close()

    def move_on(self, instance: Instance, why: str) -> None:
        """Moves every request with a leg at this instance elsewhere, if possible.

        The instance is alive, so the router sends it aborts.
        """
        for stream in self.streams:
            if any(member is instance for member in stream.legs.values()):
                self.streams.move(stream, f"{instance.name} released this request: {why}")

    def on_lost(self, instance: Instance, reason: str) -> None:
        """Moves every request with a leg there elsewhere, if possible."""
        self.admission.lost()
        lost_s = asyncio.get_running_loop().time()
        for stream in self.streams:
            for conn in [conn for conn, member in stream.legs.items() if member is instance]:
                self._dispatch.ended(stream, conn)
                stream.deaths.append(Death(instance.key, lost_s, instance.unit))
                error = InstanceLost(f"{instance.name} was lost while it served this request: {reason}")
                self.streams.retreat(stream, error, "death")
