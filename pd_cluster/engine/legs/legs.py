"""Begins and ends the legs of requests on one worker."""

from __future__ import annotations

from collections.abc import Callable

from pd_cluster import wire
from pd_cluster.engine.handover.handover import Handover, HandoverTerms
from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.leg_trace import LegNotes
from pd_cluster.engine.legs.leg_outcomes import LegOutcomes
from pd_cluster.engine.legs.leg_records import leg_records
from pd_cluster.engine.legs.leg_table import LegTable
from pd_cluster.engine.legs.output_batcher import OutputBatcher
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.engine.step.engine_limits import EngineLimits
from pd_cluster.types import LegEnd, Request, Status, resume

OTHERS = "this attempt already runs here, for another scheduler"
ENDING = "an earlier leg of this attempt is still ending here"
MIN_WAITING = 16  # at least this many legs may wait, even if a step has fewer sequences


class Legs:
    """The legs of one worker, from arrival to end."""

    def __init__(
        self,
        core: EngineCore,
        limits: EngineLimits,
        outcomes: LegOutcomes,
        handover: Handover,
        clock: Callable[[], float],
    ) -> None:
        self._core, self._limits, self._outcomes = core, limits, outcomes
        self.table, self.output_batcher = outcomes.table, outcomes.output_batcher
        self.notes, self.records = outcomes.notes, outcomes.records
        self.ended_pulls = outcomes.ended_pulls
        self.handover = handover
        self._clock = clock

    @classmethod
    def of(cls, context: HandoverContext, core: EngineCore, limits: EngineLimits, terms: HandoverTerms) -> Legs:
        """Builds the object for a worker that has no legs yet."""
        clock, table = context.clock, LegTable()
        output_batcher, notes = OutputBatcher(context.post, context.tracer, clock), LegNotes(context.note, clock)
        records = leg_records(table, output_batcher, clock)
        outcomes = LegOutcomes(table, core.scheduler, output_batcher, notes, records)
        return cls(core, limits, outcomes, Handover(context, core.scheduler, outcomes, terms), clock)

    @property
    def are_over(self) -> bool:
        """Whether no leg and no draining landing block is left on this worker."""
        return not self.table.sequences and not self._core.scheduler.requests

    def variants(self) -> set[str]:
        """Returns the adapters of requests that are or will be computed here, except those being handed over."""
        requests = self._core.scheduler.requests.values()
        computed = {each.order.variant for each in requests if each.status is not Status.EXPORTING}
        return {*self.table.variants(), *computed}

    # ---- arrival

    def submit(self, conn: str, submit: wire.Submit, closed: str, num_held: int = 0) -> None:
        """Accepts a leg, or reports why it is refused.

        `closed`: why this worker accepts no requests now; "" if it accepts them. `num_held`: legs that stages hold.
        """
        request = request_of(submit, conn, self._clock())
        key, problem = request.leg_key, self._limits.problem(request, submit.resumed)
        if (client := self.table.client_of(key)) is not None:
            if client != conn:
                self.output_batcher.add_end(conn, LegEnd(request.request_id, request.attempt, OTHERS, is_fault=True))
            return
        sequences = [resume(request, resumed) for resumed in submit.resumed] or [request]
        is_ending = any(each.key in self._core.scheduler.requests for each in sequences)
        elsewhere = closed or self._limits.lacks(request) or (ENDING if is_ending else None)
        if is_fault := problem is None and elsewhere is not None:
            problem = elsewhere
        if is_full := problem is None and self.would_refuse(submit, num_held):
            problem, is_fault = f"this instance's queue is full (limit: {self._most_waiting} requests)", True
        refusal = self._core.sampler.processors.problem(request) if problem is None else None
        problem = problem or refusal
        self.notes.submitted(request, problem)
        if problem is not None:
            ended = LegEnd(request.request_id, request.attempt, problem, is_fault, refusal is not None, is_full)
            self.output_batcher.add_end(conn, ended)
            return
        self.table.add(sequences, submit.weight, request.arrival_s + submit.deadline_s if submit.deadline_s else None)
        if submit.keep is not None and submit.leg != "prefill":
            self.records.open(conn, submit)
        for each in sequences:
            self._core.guides.prepare(each)
            if each.leg == "decode":
                self.handover.imports.submit(each)
            else:
                self._core.scheduler.add(each)

    def end_unbegun(self, conn: str, submit: wire.Submit, error: str, is_full: bool = False) -> None:
        """Ends a leg that never began here. `is_full`: the scheduler should soon send the request again."""
        self.output_batcher.add_end(conn, LegEnd(submit.request_id, submit.attempt, error, is_full=is_full))

    def would_refuse(self, submit: wire.Submit, num_held: int) -> bool:
        """Whether a leg would be refused because the legs that wait here already fill a step.

        Legs that wait for another instance do not count; the `num_held` legs of stages do.
        """
        if not submit.may_be_full:
            return False
        imports = self.handover.imports
        num_waiting = len(self._core.scheduler.waiting) + imports.num_queued - imports.num_expected
        return num_waiting + num_held >= self._most_waiting

    @property
    def _most_waiting(self) -> int:
        return max(MIN_WAITING, self._core.scheduler.max_num_seqs)

    # ---- the end of a leg

    def refuse(self, key: str, error: str) -> None:
        """Ends a leg whose request cannot be served, unless another of its sequences has ended it already."""
        if key in self.table:
            self._end(key, error, is_refusal=True)

    def fail(self, key: str, error: str) -> None:
        """Ends a leg because the operator's code has failed, unless another of its sequences has ended it already."""
        if key in self.table:
            self._end(key, error)

    def give_up(self, key: str, why: str) -> None:
        """Ends a leg that can continue elsewhere, unless another of its sequences has ended it already."""
        if key in self.table:
            self._outcomes.report(self.table.sequences[key][0], why, is_fault=True)
            self.drop(key)

    def ended(self, request: Request) -> None:
        """Forgets a sequence that a step has ended."""
        self._outcomes.forget(request)

    def expire(self, now_s: float) -> None:
        for key in [key for key, deadline_s in self.table.deadlines.items() if now_s > deadline_s]:
            self._end(key, "the request's deadline has passed")
        self.records.expire(now_s)

    def abort(self, conn: str, abort: wire.Abort) -> None:
        """Ends a leg that its scheduler no longer needs, or one sequence of it (`index` not -1)."""
        key, index = f"{abort.request_id}#{abort.attempt}", abort.index
        sequences = self.table.sequences.get(key, [])
        if not sequences and index == -1:
            self.records.aborted(conn, abort)
        if not sequences or sequences[0].client != conn:
            return
        leader = sequences[0]
        if index == -1 or (leader.sampling.n == 1 and index == 0):
            self.drop(key)
        elif leader.sampling.beam_width:
            return  # hypotheses are sent together at the end
        elif not leader.output_token_ids and not leader.is_resumed:  # not forked into its sequences yet
            leader.dropped.add(index)
        elif leader.leg != "prefill":
            for request in [r for r in sequences if r.index == index]:
                self._outcomes.forget(request)
                self._core.scheduler.finish(request)

    def drop(self, key: str) -> None:
        """Stops a leg in any state and frees its blocks; landing blocks are freed once nothing writes to them."""
        for request in list(self.table.sequences[key]):
            self._outcomes.forget(request)
            self.handover.abort(request)
            if request.key in self._core.scheduler.requests and request.status is not Status.LANDING:
                self._core.scheduler.finish(request)

    def drop_unwanted(self) -> None:
        """Drops the legs whose outputs no client reads any more."""
        unwanted = self.table.unwanted
        while unwanted:
            if (key := unwanted.pop()) in self.table:
                self.drop(key)

    def _end(self, key: str, error: str, is_refusal: bool = False) -> None:
        request = self.table.sequences[key][0]
        self._outcomes.report(request, error, is_refusal=is_refusal)
        self.records.failed(request)
        self.drop(key)


def request_of(submit: wire.Submit, client: str, now_s: float) -> Request:
    """Returns the first sequence of a leg. `client` is the connection that the leg came over."""
    return Request(
        submit.request_id,
        submit.order,
        attempt=submit.attempt,
        arrival_s=now_s,
        leg=submit.leg,
        transfer_id=submit.transfer_id,
        peer=submit.peer,
        client=client,
    )
