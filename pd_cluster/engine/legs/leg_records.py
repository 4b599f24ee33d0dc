"""The protocol of records from which streams resume, which the extra `resumable_streams` implements.

docs/protocol/requests.md, "Streams that resume", has the states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pd_cluster import extra_table, wire
from pd_cluster.engine.legs.leg_table import LegTable
from pd_cluster.engine.legs.output_batcher import OutputBatcher
from pd_cluster.types import LegEnd, PromptOutput, Request, TokenOutput

GONE = "the record of the stream was dropped"


class LegRecords(Protocol):
    """All records of a worker."""

    def __len__(self) -> int: ...

    def open(self, conn: str, submit: wire.Submit) -> None:
        """Opens a record of an accepted leg, if its request asks for one and there is enough memory."""

    def note_prompt(self, prompt: PromptOutput) -> None:
        """Stores the outputs of a prompt, wherever it was computed. Repeated outputs are ignored, as for clients."""

    def note(self, request: Request, tokens: list[TokenOutput]) -> None:
        """Stores a sequence's next tokens, each only once, and the report of its drafts.

        Called before the tokens are batched.
        """

    def read(self, conn: str, body: wire.Release | wire.Find | wire.Attach) -> None:
        """Handles a scheduler's message."""

    def closed(self, conn: str) -> None:
        """Lets the legs of a lost scheduler continue without a reader."""

    def aborted(self, conn: str, abort: wire.Abort) -> None:
        """Starts a stream's window when its scheduler aborts a leg that has ended."""

    def leg_ended(self, request: Request) -> None:
        """Starts the window of a stream whose leg has ended before the stream's last token."""

    def failed(self, request: Request) -> None:
        """Forgets a stream that ended with an error."""

    def expire(self, now_s: float) -> None:
        """Forgets records whose window has passed."""


class NoRecords:
    """Keeps no record, so no stream resumes here."""

    def __init__(self, legs: LegTable, output_batcher: OutputBatcher) -> None:
        self._legs, self._output_batcher = legs, output_batcher

    def __len__(self) -> int:
        return 0

    def open(self, conn: str, submit: wire.Submit) -> None: ...

    def note_prompt(self, prompt: PromptOutput) -> None: ...

    def note(self, request: Request, tokens: list[TokenOutput]) -> None: ...

    def read(self, conn: str, body: wire.Release | wire.Find | wire.Attach) -> None:
        match body:
            case wire.Release(request_id, attempt):
                if self._legs.client_of(key := f"{request_id}#{attempt}") == conn:
                    self._legs.unwanted.add(key)
            case wire.Find(digest):
                self._output_batcher.send(conn, wire.Found(digest))
            case wire.Attach(_, request_id, attempt):
                self._output_batcher.add_end(conn, LegEnd(request_id, attempt, GONE, is_fault=True))

    def closed(self, conn: str) -> None: ...

    def aborted(self, conn: str, abort: wire.Abort) -> None: ...

    def leg_ended(self, request: Request) -> None: ...

    def failed(self, request: Request) -> None: ...

    def expire(self, now_s: float) -> None: ...


def leg_records(legs: LegTable, output_batcher: OutputBatcher, clock: Callable[[], float]) -> LegRecords:
    if not extra_table.is_installed(extra_table.LEG_RECORDS):
        return NoRecords(legs, output_batcher)
    found: LegRecords = extra_table.load(extra_table.LEG_RECORDS)(legs, output_batcher, clock)
    return found
