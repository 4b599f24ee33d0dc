"""Retries a request after a setback: decides when and where."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pd_cluster.cluster.instances.roster import Members
from pd_cluster.cluster.placement.routing_rules import RoutingRules
from pd_cluster.cluster.placement.spare_capacity import spare_capacity
from pd_cluster.cluster.routing.leg_dispatch import LegDispatch
from pd_cluster.cluster.routing.pause_control import PauseControl
from pd_cluster.cluster.routing.replay_decision import check_replay, next_pair
from pd_cluster.cluster.routing.request_admission import SHUTTING_DOWN, RequestAdmission
from pd_cluster.cluster.streams.request_stream import RequestStream, Setback
from pd_cluster.cluster.streams.stream_table import TAKEN, StreamTable
from pd_cluster.errors import GenerationError, Overloaded, PdClusterError, Unavailable

FIRST_PAUSE_S, MOST_PAUSE_S = 0.02, 1.0  # the pause after an instance was full; doubled for each further full instance
FULL_RETRY_S = 1


class Retry:
    """`pause(seconds)` waits before the next attempt after an instance was full."""

    def __init__(
        self,
        streams: StreamTable,
        membership: Members,
        rules: RoutingRules,
        admission: RequestAdmission,
        pause_control: PauseControl,
        dispatch: LegDispatch,
    ) -> None:
        self.pause: Callable[[float], Awaitable[None]] = asyncio.sleep
        self._streams, self._membership, self._choose, self._limits = streams, membership, rules.choose, rules.replay
        self._admission, self._pause_control, self._dispatch = admission, pause_control, dispatch

    async def replay(self, stream: RequestStream, setback: Setback, deadline_s: float | None) -> None:
        """Starts another attempt elsewhere, which continues after the delivered tokens.

        Raises the setback's error if no attempt is possible; Overloaded if instances were full; GenerationError if
        another reader has taken over the stream.
        """
        if self._keeps(stream, setback) or stream.is_finished:
            return
        check_replay(stream, setback, self._membership.instances, self._limits)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._limits.wait_s
        error: PdClusterError = setback.error
        stream.num_full = stream.num_full + 1 if setback.cause == "full" else 0
        if stream.num_full:
            if stream.num_full == 1:
                stream.full_until_s = until_s
            until_s, error = stream.full_until_s, Overloaded(str(setback.error), FULL_RETRY_S)
            await self._until_capacity(until_s, stream.num_full, error)
            if self._keeps(stream, setback):
                return
        while True:
            if self._admission.is_closed:
                raise GenerationError(f"{SHUTTING_DOWN}; {setback.error}")
            try:
                stream.prefill, stream.decode = next_pair(stream, self._membership.instances, self._choose)
                break
            except Unavailable:
                try:
                    async with asyncio.timeout_at(until_s):
                        await self._admission.change()
                except TimeoutError:
                    raise error from None
                if self._keeps(stream, setback):
                    return
        self._streams.moved(stream, setback)
        self._dispatch.submit(stream, max(0.001, deadline_s - loop.time()) if deadline_s is not None else 0.0)

    def _keeps(self, stream: RequestStream, setback: Setback) -> bool:
        """Whether a pause keeps the stream. Raises GenerationError if another reader has taken the stream over."""
        if stream not in self._streams:
            raise GenerationError(TAKEN)
        return self._pause_control.keeps(stream, setback)

    async def _until_capacity(self, until_s: float, num_full: int, error: Overloaded) -> None:
        """Waits until a report shows capacity, or this process stops.

        `num_full`: how many attempts in a row have found their instance full; the pause grows with it. Raises the error
        at `until_s`.
        """
        try:
            async with asyncio.timeout_at(until_s):
                await self._admission.change()
                await self.pause(min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(num_full - 1, 10)))
                while not self._admission.is_closed:
                    spare = spare_capacity(self._membership.instances)
                    if spare.for_prompts and spare.for_sequences:
                        return
                    await self._admission.change()
        except TimeoutError:
            raise error from None
