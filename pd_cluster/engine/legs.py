"""The legs of requests on one worker: how they arrive, how they end, and the reports to schedulers."""

from __future__ import annotations

from collections.abc import Callable

from pd_cluster import wire
from pd_cluster.engine.handover.handover import Handover, Outcomes
from pd_cluster.engine.outbox import Outbox
from pd_cluster.engine.resume import Records
from pd_cluster.engine.step.core import EngineCore
from pd_cluster.engine.step.limits import EngineLimits
from pd_cluster.engine.step.patience import LandingWait, Patience
from pd_cluster.engine.trace import LegNotes
from pd_cluster.types import LegEnd, PromptOutput, Request, Status, TokenOutput, resume

OTHERS = "this attempt is here already, for another scheduler"
ENDING = "an earlier leg of this attempt is still ending here"
LEAST_WAITING = 16  # legs that may wait, however few a step may have


class Legs:
    """`hands_over` creates the object that exports and imports KV cache for these legs."""

    def __init__(
        self,
        core: EngineCore,
        limits: EngineLimits,
        outbox: Outbox,
        notes: LegNotes,
        clock: Callable[[], float],
        hands_over: Callable[[Outcomes], Handover],
    ) -> None:
        self._core = core
        self._limits = limits
        self._outbox = outbox
        self._notes = notes
        self._clock = clock
        self.sequences: dict[str, list[Request]] = {}  # by leg, those that have not ended
        self.deadlines: dict[str, float] = {}
        self._weights: dict[str, int] = {}  # by leg, as its scheduler has weighed it
        self.records = Records(self, outbox, clock)
        self.handover = hands_over(self)
        self.patience = Patience(core.scheduler, self.handover.imports, clock)
        self.landing_wait = LandingWait(self.handover.imports, clock)
        self.num_held: Callable[[], int] = lambda: 0  # legs that wait for their blocks, and come here afterwards

    @property
    def are_over(self) -> bool:
        """Whether nothing is left here, not even draining blocks."""
        return not self.sequences and not self._core.scheduler.requests

    def variants(self) -> set[str]:
        """Returns the adapters of requests that are computed here, or will be: not of those that are handed over."""
        legs = (each for sequences in self.sequences.values() for each in sequences)
        return {
            each.order.variant
            for each in (*legs, *self._core.scheduler.requests.values())
            if each.status is not Status.EXPORTING
        }

    def outstanding(self) -> dict[str, int]:
        """Returns the weights of each scheduler's legs that have not ended, in tokens, by its connection."""
        sums: dict[str, int] = {}
        for key, sequences in self.sequences.items():
            client = sequences[0].client
            sums[client] = sums.get(client, 0) + self._weights.get(key, 0)
        return sums

    def of_client(self, conn: str) -> list[str]:
        return [key for key, sequences in self.sequences.items() if sequences[0].client == conn]

    # ---- arrival

    def submit(self, conn: str, submit: wire.Submit, closed: str) -> None:
        """Accepts a leg, or reports why not. `closed`: why this worker accepts no requests now; "": it does."""
        request = request_of(submit, conn, self._clock())
        key, problem = request.leg_key, self._limits.problem(request, submit.resumed)
        if key in self.sequences:
            if self.sequences[key][0].client != conn:
                self._outbox.add_end(conn, LegEnd(request.request_id, request.attempt, OTHERS, is_fault=True))
            return
        sequences = [resume(request, resumed) for resumed in submit.resumed] or [request]
        is_ending = any(each.key in self._core.scheduler.requests for each in sequences)
        elsewhere = closed or self._limits.lacks(request) or (ENDING if is_ending else None)
        if is_fault := problem is None and elsewhere is not None:
            problem = elsewhere
        if is_full := problem is None and self.turns_away(submit):
            problem, is_fault = f"as many requests wait here as it computes at once ({self._most_waiting})", True
        self._notes.submitted(request, problem)
        if problem is not None:
            ended = LegEnd(request.request_id, request.attempt, problem, is_fault, is_full=is_full)
            self._outbox.add_end(conn, ended)
            return
        self.sequences[key], self._weights[key] = sequences, submit.weight
        if submit.keep is not None and submit.leg != "prefill":
            self.records.open(conn, submit)
        if submit.deadline_s:
            self.deadlines[key] = request.arrival_s + submit.deadline_s
        for each in sequences:
            self._core.guides.prepare(each)
            if each.leg == "decode":
                self.handover.imports.submit(each)
            else:
                self._core.scheduler.add(each)

    def turns_away(self, submit: wire.Submit) -> bool:
        """Whether a leg would only hear that too many wait here."""
        return submit.may_be_full and self._is_full

    @property
    def _most_waiting(self) -> int:
        return max(LEAST_WAITING, self._core.scheduler.max_num_seqs)

    @property
    def _is_full(self) -> bool:
        """Whether as many legs wait here as a step may have, without those that wait for another instance."""
        imports = self.handover.imports
        num_waiting = len(self._core.scheduler.waiting) + imports.num_queued - imports.num_expected
        return num_waiting + self.num_held() >= self._most_waiting

    # ---- outcomes (handover.Outcomes)

    def joined(self, request: Request, sequences: list[Request], first_tokens: list[TokenOutput]) -> None:
        self.patience.landed()
        if not request.sampling.beam_width:
            self._outbox.add_tokens(request.client, first_tokens)
            if self.records:
                self.records.note(request, first_tokens)
        if sequences:
            self._notes.joined(request, max(0, request.sampling.n - len(sequences)))
            self.sequences[request.leg_key] = list(sequences)
        else:
            self.forget(request)

    def offered(self, request: Request, num_cached_tokens: int) -> None:
        if self.records:
            self.records.note_prompt(PromptOutput(request.request_id, request.attempt, num_cached_tokens))

    def export_ended(self, request: Request, error: str | None) -> None:
        self._report(request, error, is_fault=error is not None)
        self.forget(request)
        self._core.scheduler.finish(request)

    def import_ended(self, request: Request, error: str | None) -> None:
        if error is not None:
            self._report(request, error, is_fault=True)
        self.forget(request)

    # ---- the end of a leg

    def forget(self, request: Request) -> None:
        """Removes an ended sequence; a leg ends with its last one."""
        sequences = self.sequences.get(request.leg_key)
        if sequences is not None and request in sequences:
            sequences.remove(request)
            self._notes.ended(request, is_last=not sequences)
            if not sequences:
                del self.sequences[request.leg_key]
                self._weights.pop(request.leg_key, None)
                self.deadlines.pop(request.leg_key, None)
                if self.records:
                    self.records.leg_ended(request)

    def refuse(self, key: str, error: str) -> None:
        """Ends a leg whose request cannot be served, unless another of its sequences has ended it already."""
        if key in self.sequences:
            self._end(key, error, is_refusal=True)

    def give_up(self, key: str, why: str) -> None:
        """Ends a leg that can continue elsewhere, unless another of its sequences has ended it already."""
        if key in self.sequences:
            self._report(self.sequences[key][0], why, is_fault=True)
            self.drop(key)

    def expire(self, now_s: float) -> None:
        for key in [key for key, deadline_s in self.deadlines.items() if now_s > deadline_s]:
            self._end(key, "the request's deadline has passed")

    def abort(self, conn: str, abort: wire.Abort) -> None:
        """Ends a leg that its scheduler no longer wants, or (`index` not -1) one sequence of it."""
        key, index = f"{abort.request_id}#{abort.attempt}", abort.index
        sequences = self.sequences.get(key, [])
        if not sequences and index == -1:
            self.records.aborted(conn, abort)
        if not sequences or sequences[0].client != conn:
            return
        leader = sequences[0]
        if index == -1 or (leader.sampling.n == 1 and index == 0):
            self.drop(key)
        elif leader.sampling.beam_width:
            return  # hypotheses leave all at once
        elif not leader.output_token_ids and not leader.is_resumed:  # its sequences are not separate yet
            leader.dropped.add(index)
        elif leader.leg != "prefill":
            for request in [r for r in sequences if r.index == index]:
                self.forget(request)
                self._core.scheduler.finish(request)

    def drop(self, key: str) -> None:
        """Stops a leg in any state and frees its blocks; landing blocks follow once nothing writes to them."""
        for request in list(self.sequences[key]):
            self.forget(request)
            self.handover.abort(request)
            if request.key in self._core.scheduler.requests and request.status is not Status.LANDING:
                self._core.scheduler.finish(request)

    # ---- readers (resume.Running)

    def runs(self, key: str) -> bool:
        return key in self.sequences

    def readdress(self, key: str, client: str) -> None:
        """Sends a leg's further outputs to another scheduler, or to nobody."""
        for request in self.sequences.get(key, ()):
            request.client = client

    def drop_if_it_runs(self, key: str) -> None:
        if key in self.sequences:
            self.drop(key)

    def _end(self, key: str, error: str, is_refusal: bool = False) -> None:
        self._report(self.sequences[key][0], error, is_refusal=is_refusal)
        self.records.failed(self.sequences[key][0])
        self.drop(key)

    def _report(self, request: Request, error: str | None, is_fault: bool = False, is_refusal: bool = False) -> None:
        if error is not None:
            self._notes.failed(request)
        ended = LegEnd(request.request_id, request.attempt, error, is_fault, is_refusal)
        self._outbox.add_end(request.client, ended)


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
