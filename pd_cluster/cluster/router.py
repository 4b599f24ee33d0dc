"""A request across the cluster: two legs out, one stream of tokens back, every sequence of it in order.

Read `Router.serve` first. Runs on the scheduler's event loop. Knows nothing of HTTP or text.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from pd_cluster import wire
from pd_cluster.cluster.instance import Instance
from pd_cluster.cluster.policy import Ask, Pair, Policy, alone
from pd_cluster.cluster.predict import Goals, check_goals, within_tpot
from pd_cluster.cluster.roster import Roster
from pd_cluster.cluster.slices import Slices
from pd_cluster.cluster.stats import ReplayCause, RequestStats
from pd_cluster.cluster.stream import Death, Request, Sequence, Setback, Stream, ask_of
from pd_cluster.cluster.timeline import Timelines
from pd_cluster.errors import (
    DeadlineExceeded,
    GenerationError,
    InstanceLost,
    Overloaded,
    PdClusterError,
    RequestError,
    Unavailable,
)
from pd_cluster.mailbox import Mailbox
from pd_cluster.types import FinishReason, Leg, LegEnd, PromptOutput, SamplingParams, TokenOutput

log = logging.getLogger(__name__)

MAX_DEATHS = 2  # of instances that a request was on: then it may be what they died of
MAX_DEATHS_TOGETHER = 3  # when they die together, it is rather a host's or an operator's doing
NO_GOALS = Goals()


def _unheard(prompt: PromptOutput) -> None:
    """For prompts that nobody wants to hear of."""


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """How long a request is tried again."""

    max_attempts: int = 6  # after the first
    wait_s: float = 30.0  # for an instance that can go on
    together_s: float = 3.5  # deaths within this may have one cause; what was lost so lately may be back at once


class Router:
    """`goals`: what would miss them is refused, before anything is done for it."""

    def __init__(
        self,
        mailbox: Mailbox,
        choose: Policy,
        request_timeout_s: float,
        replay: ReplayLimits | None = None,
        goals: Goals = NO_GOALS,
    ) -> None:
        self._mailbox = mailbox
        self._choose = choose
        self._goals = goals
        self._request_timeout_s = request_timeout_s
        self._limits = replay or ReplayLimits()
        self._streams: dict[str, Stream] = {}
        self._slices = Slices(self._on_slice)
        self._counter = itertools.count()
        self._life = secrets.token_hex(4)
        self._lost_s = -math.inf  # when an instance was lost last
        self.timelines = Timelines()
        self.stats = RequestStats()
        self.membership: Roster  # set by whoever builds both

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    async def serve(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        routed: Callable[[Stream], None] = lambda stream: None,
        prompted: Callable[[PromptOutput], None] = _unheard,
        cache_salt: str = "",
        client_id: str = "",
        received_s: float | None = None,
        session: str = "",
        priority: int = 0,
        gathers: bool = False,
        batch: str = "",
    ) -> AsyncIterator[TokenOutput]:
        """A request's whole life across the cluster. Every token of its n sequences once, each sequence in order.

        When an instance or a link that it needs is lost, the request goes on elsewhere, after the tokens that were
        delivered: which token comes next depends on nothing else.

        A sequence ends with a token that has a finish_reason, or when the reader calls `stop` of the stream that
        `routed` was given; the iterator ends when all have. `prompted` is called before the first token. Raises
        Unavailable and Overloaded before the first token, GenerationError after it. Closing the iterator aborts all.
        `client_id` and `received_s` are how the request is known outside and since when, for its timeline. `gathers`:
        nobody waits for single tokens; many come together, the last one of a sequence with those before it at once,
        and an item may have `earlier` ones. `batch` names many answers of which the caller wants none
        early, so a decode instance may wait until more of them share its steps.
        """
        loop, timeout_s = asyncio.get_running_loop(), self._request_timeout_s
        deadline_s = loop.time() + timeout_s if timeout_s else None
        request = Request(prompt_token_ids, sampling, cache_salt, session, priority)
        arrived_s = self.stats.clock() if received_s is None else received_s
        stream = self._open(request, ask := ask_of(request), await self._first_pair(ask), arrived_s, gathers)
        stream.prompted, stream.batch = prompted, batch
        prefill, decode = ((instance.conn, instance.name) for instance in (stream.prefill, stream.decode))
        self.timelines.routed(
            stream.request_id, stream.transfer_id, client_id, received_s, len(prompt_token_ids), prefill, decode
        )
        self._submit(stream, timeout_s)
        routed(stream)
        late = DeadlineExceeded(f"the request took longer than {timeout_s:g} s")
        # One timer a request: one around every wait costs more than all that is done with a token.
        expiry = loop.call_at(deadline_s, stream.inbox.put, late) if deadline_s is not None else None
        is_first, item = True, None
        try:
            while not stream.is_over:
                item = await stream.inbox.get()
                if isinstance(item, TokenOutput):
                    if not stream.take(item):
                        continue
                    if is_first:
                        self.timelines.first_token(
                            stream.request_id, stream.heard_s, stream.first_s if gathers else None
                        )
                        is_first = False
                    yield item
                elif isinstance(item, Setback):
                    async with asyncio.timeout_at(deadline_s):
                        await self._replay(stream, item, deadline_s)
                elif item is not None:
                    raise item
        except TimeoutError:
            raise late from None
        finally:
            del late  # an exception knows this frame: the frame must not know it, or only the collector ends the two
            item = None
            if expiry is not None:
                expiry.cancel()
            stream.prompted = _unheard  # the reader may hold the stream: no circle that outlives the request
            self._finish(stream)
            self._note_end(stream, sys.exception())

    async def _replay(self, stream: Stream, setback: Setback, deadline_s: float | None) -> None:
        """Another attempt, elsewhere, after what was delivered. Raises the setback's error when there shall be none."""
        if stream.is_finished:
            return
        self._take_back(stream)
        if len(stream.deaths) >= (MAX_DEATHS_TOGETHER if self._died_together(stream) else MAX_DEATHS):
            which = f"it is number {len(stream.deaths)} of the instances that died with this request"
            raise InstanceLost(f"{setback.error}; {which}, and the last")
        if stream.attempt - stream.num_moves > self._limits.max_attempts:
            raise setback.error
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._limits.wait_s
        while True:
            try:
                instances = self._alive_after(stream)
                stream.prefill, stream.decode = self._choose(instances, stream.ask)
                if stream.resumed():
                    stream.prefill = stream.decode = alone(instances)[0]
                break
            except Unavailable:
                try:
                    async with asyncio.timeout_at(until_s):
                        await self.membership.change()
                except TimeoutError:
                    raise setback.error from None
        log.info("request %s goes on at %s: %s", stream.request_id, stream.decode.name, setback.error)
        self.timelines.replayed(stream.request_id, stream.transfer_id, stream.decode.conn, stream.decode.name)
        self.stats.replayed(setback.cause)
        self._submit(stream, max(0.001, deadline_s - loop.time()) if deadline_s is not None else 0.0)

    def expect_instances(self) -> None:
        """From now on they become known: what comes early waits a moment for them, as when all were lost just now."""
        self._lost_s = asyncio.get_running_loop().time()

    async def _first_pair(self, ask: Ask) -> Pair:
        """Where the last instance was lost just now, a new request waits a moment for one to be back.

        Raises Unavailable, Overloaded.
        """
        while True:
            try:
                return self._admit(ask)
            except Unavailable as error:
                try:
                    async with asyncio.timeout_at(self._lost_s + self._limits.together_s):
                        await self.membership.change()
                except TimeoutError:
                    self.stats.refused("unavailable")
                    raise error from None
            except Overloaded:
                self.stats.refused("slo")
                raise

    def _died_together(self, stream: Stream) -> bool:
        return stream.deaths[-1].at_s - stream.deaths[0].at_s <= self._limits.together_s if stream.deaths else True

    def _alive_after(self, stream: Stream) -> list[Instance]:
        """Where it may go on. What was begun is finished by the same numerics.

        After a second death only what has been heard of since: what dies together is not seen to be dead at once, and
        a request is not to be taken for the cause of what it only meets.
        """
        instances = self.membership.instances
        if stream.numerics is not None and stream.resumed():
            instances = [i for i in instances if i.info is None or not i.info.numerics.difference(stream.numerics)]
        if len(stream.deaths) < MAX_DEATHS:
            return instances
        return [instance for instance in instances if instance.heard_s > stream.deaths[-1].at_s]

    def _take_back(self, stream: Stream) -> None:
        """Deaths that were none: the same life of the instance has been ready since. Somebody has only paused."""
        back_s = {instance.key: instance.ready_s for instance in self.membership.instances}
        deaths = [death for death in stream.deaths if back_s.get(death.life, float("-inf")) < death.at_s]
        stream.num_moves += len(stream.deaths) - len(deaths)
        stream.deaths = deaths

    def _open(self, request: Request, ask: Ask, pair: Pair, received_s: float, gathers: bool) -> Stream:
        request_id = f"{self._life}-{next(self._counter)}"
        sequences = [Sequence(index) for index in range(request.sampling.n)]
        send, stats = self._mailbox.send, self.stats
        stream = Stream(
            request_id,
            0,
            {},
            request,
            ask,
            *pair,
            sequences,
            send,
            gathers=gathers,
            stats=stats,
            received_s=received_s,
        )
        self._streams[request_id] = stream
        return stream

    def _admit(self, ask: Ask) -> Pair:
        instances = within_tpot(self._goals, self.membership.instances)
        prefill, decode = self._choose(instances, ask)
        check_goals(self._goals, instances, prefill, decode, ask.num_uncached(prefill))
        return prefill, decode

    def _submit(self, stream: Stream, deadline_s: float) -> None:
        """Both legs out, each with the other's place; or one that does both."""
        request, prefill, decode = stream.request, stream.prefill, stream.decode
        if decode.info is not None and not stream.resumed():
            stream.numerics = decode.info.numerics
        stream.has_prefill_spoken = False
        legs: list[tuple[Instance, Leg, str]] = [(prefill, "prefill", decode.key), (decode, "decode", prefill.key)]
        if prefill is decode:
            legs = [(decode, "hybrid", "")]
        for instance, leg, peer in legs:
            stream.legs[instance.conn] = instance
            stream.weights[instance.conn] = weight = stream.ask.weight(instance, leg)
            instance.num_outstanding += 1
            instance.outstanding_tokens += weight
            submit = wire.Submit(
                stream.request_id,
                stream.attempt,
                stream.transfer_id,
                leg,
                peer,
                request.prompt_token_ids,
                request.sampling,
                deadline_s,
                request.cache_salt,
                stream.resumed(),
                request.priority,
                stream.gathers,
                stream.batch,
            )
            self._mailbox.send(instance.conn, submit)

    def _finish(self, stream: Stream) -> None:
        """Aborts the legs that have not ended by themselves, and forgets the request."""
        if self._streams.pop(stream.request_id, None) is None:
            return
        self._abort_legs(stream)

    def _note_end(self, stream: Stream, error: BaseException | None) -> None:
        """What of it did not come to an end was aborted, by who stopped reading, unless an error of ours ended it."""
        timeline = self.timelines.find(stream.request_id)
        admitted_s = timeline.admitted_s(stream.first_s) if timeline is not None else None
        handovers_s = timeline.handovers_s() if timeline is not None else []
        left: FinishReason = "error" if isinstance(error, PdClusterError) else "abort"
        self.stats.ended(stream.outcome(left, admitted_s, handovers_s))
        self.timelines.ended(stream.request_id, "" if stream.is_over else _why(error))

    def _abort_legs(self, stream: Stream) -> None:
        for conn in list(stream.legs):
            self._mailbox.send(conn, wire.Abort(stream.request_id, stream.attempt))
            self._leg_ended(stream, conn)

    def _give_up(self, stream: Stream) -> None:
        """Nobody reads. What has come may still be read, and why there is no more."""
        self._abort_legs(stream)
        stream.inbox.put(GenerationError(f"the client leaves more than {stream.max_unread} tokens unread"))

    def _retreat(self, stream: Stream, error: GenerationError, cause: ReplayCause) -> None:
        """The attempt has failed, whatever its other leg still does."""
        self._abort_legs(stream)
        stream.retreat(error, cause)

    def _leg_ended(self, stream: Stream, conn: str) -> None:
        instance = stream.legs.pop(conn, None)
        if instance is not None:
            instance.num_outstanding -= 1
            instance.outstanding_tokens -= stream.weights.pop(conn)

    # ---- events from the workers

    def on_outputs_at_once(self, conn: str, outputs: wire.Outputs) -> None:
        """Where nobody else needs the event loop meanwhile."""
        self._on_slice(conn, outputs, self.timelines.now_s())

    def on_outputs(self, conn: str, outputs: wire.Outputs, heard_s: float | None = None) -> None:
        """`heard_s`: when it was read, by the timelines' clock; None: just now."""
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
                    self._leg_ended(stream, conn)
                elif len(stream.inbox) > stream.max_unread:
                    self._give_up(stream)
        for ended in outputs.ended:
            self._on_leg_end(conn, ended)
        self.timelines.add(conn, outputs.events)

    def _stream_of(self, conn: str, output: TokenOutput | PromptOutput | LegEnd) -> Stream | None:
        """The stream that this output of this leg belongs to, if it is still wanted."""
        stream = self._streams.get(output.request_id)
        if stream is None or output.attempt != stream.attempt or conn not in stream.legs:
            return None
        if stream.legs[conn] is stream.prefill and not stream.has_prefill_spoken:
            stream.has_prefill_spoken = True
            if not isinstance(output, PromptOutput):
                stream.release(stream.sequences)  # what decode was faster with
        return stream

    def _on_leg_end(self, conn: str, ended: LegEnd) -> None:
        if (stream := self._stream_of(conn, ended)) is None:
            return
        name = stream.legs[conn].name
        self._leg_ended(stream, conn)
        stream.release(stream.sequences)
        if ended.error is not None:
            error = GenerationError(f"{name}: {ended.error}")
            if ended.is_refusal:
                stream.inbox.put(RequestError(ended.error))
            elif ended.is_fault:
                stream.ask.avoid.add((stream.prefill.key, stream.decode.key))
                self._retreat(stream, error, "fault")
            else:
                stream.inbox.put(error)

    def end_all(self) -> None:
        """This process stops: whatever still runs ends with an error in its stream."""
        for stream in self._streams.values():
            stream.inbox.put(GenerationError("the server is shutting down"))

    def move_on(self, instance: Instance, why: str) -> None:
        """Every request with a leg there goes on elsewhere, if it can. The instance lives, and is told to stop them."""
        for stream in list(self._streams.values()):
            if any(member is instance for member in stream.legs.values()):
                stream.num_moves += 1
                self._retreat(stream, GenerationError(f"{instance.name} gave up this request: {why}"), "moved")

    def on_lost(self, instance: Instance, reason: str) -> None:
        """Every request with a leg there goes on elsewhere, if it can."""
        self._lost_s = asyncio.get_running_loop().time()
        for stream in list(self._streams.values()):
            for conn in [conn for conn, member in stream.legs.items() if member is instance]:
                self._leg_ended(stream, conn)
                stream.deaths.append(Death(instance.key, self._lost_s))
                error = InstanceLost(f"{instance.name} was lost while it served this request: {reason}")
                self._retreat(stream, error, "death")


def _why(error: BaseException | None) -> str:
    """Why a request ended before all its sequences had; no error of ours means that nobody reads any more."""
    return str(error) if isinstance(error, PdClusterError) else "the client left before the end"
