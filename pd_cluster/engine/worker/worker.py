"""A worker's engine and its peers: handles events, computes steps and sends results, as worker_loop.py calls it.

Knows nothing of HTTP, of routing, or of stages other than UnitRounds.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pd_cluster import wire
from pd_cluster.engine.handover.engine_events import ConnClosed, ConnOpened, Event, Mail
from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.legs.legs import Legs
from pd_cluster.engine.lifecycle.availability import Availability
from pd_cluster.engine.scheduling.step_delay import LandingWait, StepDelay
from pd_cluster.engine.scheduling.step_plan import StepPlan
from pd_cluster.engine.stages.stage import Stage, StageChain
from pd_cluster.engine.step.commit import StepResult
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.engine.step.step_timing import StepTiming, work_of
from pd_cluster.engine.unit.unit_rounds import UnitRounds
from pd_cluster.engine.worker.worker_load import LoadReport
from pd_cluster.model.inputs.forward_batch import OnLayer
from pd_cluster.types import Status, TokenOutput

log = logging.getLogger(__name__)

TICK_S = 0.1  # between checks of deadlines
IDLE_WAIT_S = 0.05


@dataclass(frozen=True, slots=True)
class Cores:
    """This worker's cores. `are_shared`: prefill instances compute on the same cores.

    `rest`: called when the worker is idle.
    """

    are_shared: bool = True
    rest: Callable[[], None] = lambda: None


class Worker:
    """Implements the loop's Job."""

    def __init__(
        self,
        core: EngineCore,
        legs: Legs,
        stages: Sequence[Stage],
        state: Availability,
        context: HandoverContext,
        cores: Cores,
    ) -> None:
        """`stages`: in the order in which legs pass them."""
        self.core, self.legs, self.handover, self.state = core, legs, legs.handover, state
        self._stages, self._chain = stages, StageChain(stages, legs, state.weights)
        self._report = LoadReport(core, legs, stages, state, context)
        self._post, self._clock, self._cores = context.post, context.clock, cores
        self._output_batcher, self._notes = legs.output_batcher, legs.notes
        self._next_tick_s = 0.0
        self._is_busy = False
        self._step_waits_s = 0.0  # how long the next step may wait for a landing
        self._step_delay = StepDelay(core.scheduler, self.handover.imports, self._clock)
        self._landing_wait = LandingWait(self.handover.imports, self._clock)
        self._rounds = next((stage for stage in stages if isinstance(stage, UnitRounds)), None)  # None: no unit
        core.after_moves += [stage.moved for stage in stages]

    @property
    def load(self) -> wire.Load:
        return self._report.load

    @property
    def timing(self) -> StepTiming:
        return self._report.timing

    @property
    def wait_s(self) -> float:
        """How long to wait for mail. Shorter while the load may have changed since it was refreshed."""
        if self._is_busy:
            return 0.0
        longest_s = self._step_waits_s or IDLE_WAIT_S
        return min(longest_s, self._report.left_s()) if self._report.is_old else longest_s

    @property
    def is_idle(self) -> bool:
        return self.legs.are_over

    @property
    def is_over(self) -> bool:
        return self.legs.are_over and all(stage.is_over for stage in self._stages)

    def flush(self) -> None:
        self._output_batcher.flush()

    def publish(self) -> None:
        self._report.publish(at_once=True)

    def release_all(self) -> None:
        self._chain.release_all(self.state.why_closed)

    def close(self) -> None:
        for stage in self._stages:
            stage.close()
        self.core.guides.close()

    # ---- steps

    def step(self) -> None:
        """Runs one step of the engine, if there is anything to compute, and handles its results."""
        was_busy, self._is_busy = self._is_busy, self._compute()
        rests = was_busy and not self._is_busy
        if rests:
            self._cores.rest()
        self._report.publish(at_once=rests)

    def _compute(self) -> bool:
        self.handover.imports.credit()
        self._step_waits_s = 0.0
        if self._rounds is None and not self.core.scheduler.has_work:
            self.legs.drop_unwanted()
            return False
        if self._rounds is None and self._cores.are_shared and not self.state.drain.has_begun and self._waits():
            return False  # in a unit, the other members would have to wait, too
        plan = self.core.plan()
        if plan.admitted or plan.preempted:
            self.publish()  # before the step, which may take a long time
        started_s = self._clock()
        result = self.core.run(plan, self._begin)
        took_s = self._clock() - started_s
        self._report.timing.computed(work_of(plan.chunks), took_s, len(result.sampled))
        if self.handover.is_prefill:
            self._notes.computed(plan.chunks, started_s)
        goes_on = self._rounds is not None and self._rounds.end()
        self._computed(result)
        self.legs.drop_unwanted()
        return bool(plan.chunks) or goes_on

    def _waits(self) -> bool:
        """Whether the next step waits for sequences that will take part in it."""
        if self._step_delay.waits:
            return True
        if num_running := len(self.core.scheduler.running):
            self._step_waits_s = self._landing_wait.left_s(self._report.timing.decode_step_s, num_running)
        return self._step_waits_s > 0

    def _begin(self, plan: StepPlan) -> OnLayer | None:
        """Offers the transfers of a step's new prompts and prepares to ship its layers. See look_ahead.Begins."""
        exports = self.handover.exports
        for request in plan.admitted:
            if request.leg != "decode" and not request.output_token_ids:
                self._notes.admitted(request)
            if request.leg == "prefill":
                exports.admitted(request)
        plan.chunks = [chunk for chunk in plan.chunks if chunk[0].status is Status.RUNNING]
        if self._rounds is not None:
            self._rounds.begin(plan)
        return self.handover.layers_done if exports.computing(plan.chunks) else None

    def _computed(self, result: StepResult) -> None:
        """Sends a step's tokens, hands prompts over, and forgets ended requests."""
        legs, records = self.legs, self.legs.records
        for request in result.forked:
            legs.table.sequences[request.leg_key].append(request)
        for request, prompt in result.prompts:
            self._output_batcher.add_prompt(request.client, prompt)
            if records:
                records.note_prompt(prompt)
        first_tokens: dict[str, list[TokenOutput]] = defaultdict(list)
        for request, tokens in result.groups():
            if records:
                records.note(request, tokens)
            if len(tokens) == 1:
                self._output_batcher.add_token(request, tokens[0])
            else:
                self._output_batcher.add_group(request, tokens)
            if request.leg == "prefill":
                first_tokens[request.key] += tokens
            if request.status is Status.FINISHED:
                legs.ended(request)
        for request, token in result.candidates:  # clients receive the tokens of a beam search at its end
            first_tokens[request.key].append(token)
        for request in result.ended:
            legs.ended(request)
        for request, _ in result.plan.chunks:
            if request.leg == "prefill":
                self.handover.exports.computed(request, first_tokens[request.key])
        for request, pooled in result.pooled:
            self._output_batcher.add_pooled(request.client, pooled)
            legs.ended(request)
        for request, error in result.failed:
            legs.refuse(request.leg_key, error)
        for request, error in result.crashed:
            legs.fail(request.leg_key, error)
        for request in result.plan.lacking:
            legs.give_up(request.leg_key, "its images' KV was dropped, and computing it again needs their pixels")

    # ---- time

    def tick(self) -> None:
        now_s = self._clock()
        if now_s < self._next_tick_s:
            return
        self._next_tick_s = now_s + TICK_S
        self._output_batcher.tick()
        self.core.scheduler.expire(now_s)
        changes = self.core.scheduler.known.changes()
        self.handover.tick()
        for stage in self._stages:
            stage.blocks_changed(changes)
            stage.tick()
        self.legs.expire(now_s)
        self._settle()

    # ---- events

    def intercept(self, conn: str, body: wire.Body) -> bool:
        """Handles a message that must not wait for a step, on the mailbox's thread. Returns False for others."""
        if isinstance(body, wire.LinkValue):
            for stage in self._stages:
                stage.meet(conn, body)
        elif isinstance(body, wire.TakeWeights | wire.SendWeights):  # the other end does not wait as long as a step
            if conn in self.state.schedulers:
                for stage in self._stages:
                    stage.at_once(conn, body)
            return True
        return self.handover.intercept(conn, body)

    def handle(self, event: Event) -> None:
        match event:
            case Mail(conn, peer, body) if conn in self.state.schedulers:
                self._read_scheduler(conn, peer, body)
            case Mail(conn, peer, body):
                self._read(conn, peer, body)
            case ConnOpened(conn, peer, "scheduler"):
                self._scheduler_opened(conn, peer)
            case ConnOpened(conn):
                self.handover.opened(conn)
                for stage in self._stages:
                    stage.opened(conn, is_scheduler=False)
            case ConnClosed(conn, _, reason):
                self._closed(conn, reason)
            case _:
                if not any(stage.handle(event) for stage in self._stages):
                    self.handover.handle(event)
        self._settle()

    def _settle(self) -> None:
        """Begins the legs that stages have released, and drops legs whose outputs no client reads any more."""
        self._chain.pass_on(self.state.why_closed)
        self.legs.drop_unwanted()

    def _read_scheduler(self, conn: str, peer: str, body: wire.Body) -> None:
        match body:
            case wire.Submit():
                self._chain.enter(conn, body, self.state.why_closed)
            case wire.Abort():
                self._chain.abort(conn, body)
            case wire.ResetCache(is_external):
                for stage in self._stages:  # before `forget`, which reports the contents that tiers still have
                    stage.cache_reset(is_external)
                self.core.scheduler.forget()
            case wire.Release() | wire.Find() | wire.Attach():
                self.legs.records.read(conn, body)
            case wire.Wake(other):
                self.handover.out_links.table.awaken(other)
            case wire.Sleep(level):
                self.state.sleep.wish(level)
            case wire.CheckWeights(version):
                self.state.weights.check(version)
            case wire.ChangeWeights(version):
                self.state.weights.wish(version)
            case wire.Peers(peers):
                self._report.is_shared = body.term > 0
                self.handover.set_peers(peers)
                for stage in self._stages:
                    stage.set_peers(peers, self.handover.is_prefill)
            case _:
                self._read(conn, peer, body, is_scheduler=True)

    def _read(self, conn: str, peer: str, body: wire.Body, is_scheduler: bool = False) -> None:
        if any(stage.read(conn, body, is_scheduler) for stage in self._stages):
            return
        if not self.handover.read(conn, peer, body):
            log.warning("%s sent a %s, which a worker does not handle", peer, type(body).__name__)

    def _scheduler_opened(self, conn: str, peer: str) -> None:
        name = peer.partition("@")[0]
        for other, other_peer in list(self.state.schedulers.items()):
            if other_peer.partition("@")[0] == name:  # an earlier process or connection of this scheduler
                self._closed(other, f"{peer} replaced it")
        self.state.schedulers[conn] = peer
        self._output_batcher.opened(conn)
        for stage in self._stages:
            stage.opened(conn, is_scheduler=True)
        if self.state.drain.has_begun:
            self._post.beat()
        log.info("scheduler %s is connected", peer)

    def _closed(self, conn: str, reason: str) -> None:
        peer = self.state.schedulers.pop(conn, None)
        self._output_batcher.closed(conn)
        if peer is not None:
            self.legs.records.closed(conn)
            orphans = self.legs.table.of_client(conn)
            log.warning("scheduler %s is gone (%s); %d of its requests end", peer, reason, len(orphans))
            for key in orphans:
                self.legs.drop(key)
        self.handover.closed(conn, reason)
        for stage in self._stages:
            stage.closed(conn, reason, was_scheduler=peer is not None)
