"""Reports the outcomes of a worker's legs to schedulers, and forgets legs that have ended."""

from __future__ import annotations

from pd_cluster.engine.leg_trace import LegNotes
from pd_cluster.engine.legs.leg_records import LegRecords
from pd_cluster.engine.legs.leg_table import LegTable
from pd_cluster.engine.legs.output_batcher import OutputBatcher
from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.types import LegEnd, PromptOutput, Request, TokenOutput


class LegOutcomes:
    """Implements handover.Outcomes."""

    def __init__(
        self,
        table: LegTable,
        scheduler: StepScheduler,
        output_batcher: OutputBatcher,
        notes: LegNotes,
        records: LegRecords,
    ) -> None:
        self.table, self.output_batcher, self.notes, self.records = table, output_batcher, notes, records
        self._scheduler = scheduler
        self.ended_pulls: dict[str, int] = {}  # transfer -> tokens that it brought; PrefixPulls removes them

    def joined(self, request: Request, sequences: list[Request], first_tokens: list[TokenOutput]) -> None:
        if not request.sampling.beam_width:
            self.output_batcher.add_tokens(request.client, first_tokens)
            if self.records:
                self.records.note(request, first_tokens)
        if sequences:
            self.notes.joined(request, max(0, request.sampling.n - len(sequences)))
            self.table.sequences[request.leg_key] = list(sequences)
        else:
            self.forget(request)

    def offered(self, request: Request, num_cached_tokens: int) -> None:
        if self.records:
            self.records.note_prompt(PromptOutput(request.request_id, request.attempt, num_cached_tokens))

    def export_ended(self, request: Request, error: str | None) -> None:
        if not request.is_pull:
            self.report(request, error, is_fault=error is not None)
            self.forget(request)
        self._scheduler.finish(request)

    def import_ended(self, request: Request, error: str | None) -> None:
        if error is not None:
            self.report(request, error, is_fault=True)
        self.forget(request)

    def pull_ended(self, request: Request, num_tokens: int) -> None:
        self.ended_pulls[request.transfer_id] = num_tokens

    def forget(self, request: Request) -> None:
        """Removes an ended sequence; a leg ends with its last sequence."""
        if self.table.has(request):
            is_last = self.table.remove(request)
            self.notes.ended(request, is_last)
            if is_last and self.records:
                self.records.leg_ended(request)

    def report(self, request: Request, error: str | None, is_fault: bool = False, is_refusal: bool = False) -> None:
        if error is not None:
            self.notes.failed(request)
        ended = LegEnd(request.request_id, request.attempt, error, is_fault, is_refusal)
        self.output_batcher.add_end(request.client, ended)
