"""Keeps the requests and outputs of streams that can resume, for a limited time after their reader is lost.

docs/protocol/requests.md, "Streams that resume", has the states. Knows nothing of text, of which tokens clients have
received, or of how legs are computed.
"""

from __future__ import annotations

import hmac
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from pd_cluster import wire
from pd_cluster.engine.legs.leg_records import GONE
from pd_cluster.engine.legs.leg_table import LegTable
from pd_cluster.engine.legs.output_batcher import NOBODY, OutputBatcher
from pd_cluster.types import LegEnd, PromptOutput, Request, RequestSpec, TokenOutput

log = logging.getLogger(__name__)

STOPPED = "the stream stopped while it had no reader"
TAKEN = "another reader has taken this stream over"
NAME_NBYTES = 8  # a record is found by this part of its digest; then the whole digest is compared in constant time


@dataclass(slots=True, eq=False)
class Record:
    """The record of one stream.

    `reader`: a scheduler's connection; NOBODY: the record has no reader, and is dropped at `expires_s`. `former`: the
    scheduler that read the stream when its leg ended, and that now looks for another instance to continue it.
    """

    keep: wire.Keep = field(repr=False)
    request_id: str
    attempt: int
    order: RequestSpec = field(repr=False)
    reader: str
    tokens: list[TokenOutput] = field(repr=False)
    prompt: PromptOutput | None = field(default=None, repr=False)
    former: str = NOBODY
    expires_s: float = math.inf
    nbytes: int = 0

    @property
    def name(self) -> bytes:
        return self.keep.digest[:NAME_NBYTES]

    @property
    def leg_key(self) -> str:
        return f"{self.request_id}#{self.attempt}"

    @property
    def is_whole(self) -> bool:
        """Whether the record has the stream's last token."""
        return bool(self.tokens) and self.tokens[-1].finish_reason is not None


class Records:
    """All records of a worker. Legs that no client will read are marked as unwanted in the table of running legs."""

    def __init__(self, legs: LegTable, output_batcher: OutputBatcher, clock: Callable[[], float]) -> None:
        self._legs, self._output_batcher, self._clock = legs, output_batcher, clock
        self._by_name: dict[bytes, Record] = {}
        self._by_request: dict[str, Record] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def open(self, conn: str, submit: wire.Submit) -> None:
        """Opens a record of an accepted leg, if its request asks for one and there is enough memory.

        It replaces an earlier record of the same stream: the earlier leg ends, and so does the stream at another
        scheduler.
        """
        keep, sampling = submit.keep, submit.order.sampling
        if keep is None or sampling.n != 1 or sampling.beam_width:
            return
        if (older := self._by_name.get(keep.digest[:NAME_NBYTES])) is not None:
            self._replace(older, conn, submit)
        tokens = [msgspec.structs.replace(token, attempt=submit.attempt) for token in keep.tokens]
        prompt = keep.prompt and msgspec.structs.replace(keep.prompt, attempt=submit.attempt)
        keep = msgspec.structs.replace(keep, tokens=[], prompt=None)
        record = Record(keep, submit.request_id, submit.attempt, submit.order, conn, tokens, prompt)
        self._by_name[record.name] = self._by_request[record.request_id] = record
        log.debug("%d streams can resume", len(self))
        order_nbytes = wire.PROMPT_TOKEN_NBYTES * len(submit.order.prompt_token_ids)
        self._grow(record, order_nbytes + 2 * len(keep.recipe) + wire.nbytes_of(tokens))

    def note_prompt(self, prompt: PromptOutput) -> None:
        """Stores the outputs of a prompt, wherever it was computed. The first outputs count, as they do for clients."""
        record = self._by_request.get(prompt.request_id)
        if record is not None and record.attempt == prompt.attempt and record.prompt is None:
            record.prompt = prompt

    def note(self, request: Request, tokens: list[TokenOutput]) -> None:
        """Stores a sequence's next tokens, each only once, and the report of its drafts.

        Called before they are batched.
        """
        record = self._of(request)
        if record is None:
            return
        new = [token for token in tokens if token.position >= len(record.tokens)]
        if new and request.draft_report is not None:
            new[-1] = msgspec.structs.replace(new[-1], drafts=request.draft_report)
        record.tokens += new
        self._grow(record, wire.nbytes_of(new))

    # ---- readers

    def read(self, conn: str, body: wire.Release | wire.Find | wire.Attach) -> None:
        """Handles a scheduler's message."""
        match body:
            case wire.Release():
                self._release(conn, body)
            case wire.Find(digest):
                self._answer(conn, digest)
            case wire.Attach():
                self._attach(conn, body)

    def _release(self, conn: str, release: wire.Release) -> None:
        record = self._by_request.get(release.request_id)
        if record is None:  # dropped for lack of memory, although its leg continued
            if self._legs.client_of(key := f"{release.request_id}#{release.attempt}") == conn:
                self._legs.unwanted.add(key)
            return
        if record.reader != conn and not (release.then == "forget" and record.former == conn):
            return
        if release.then == "forget":
            self._forget(record)
        else:
            self._leave(record)
        if release.then != "go on":
            self._legs.unwanted.add(record.leg_key)

    def closed(self, conn: str) -> None:
        """Lets the legs of a lost scheduler continue without a reader."""
        for record in self._by_name.values():
            if record.reader == conn:
                self._leave(record)
            if record.former == conn:
                record.former = NOBODY

    def aborted(self, conn: str, abort: wire.Abort) -> None:
        """Starts the window for resuming a stream when its scheduler aborts a leg that has ended.

        The scheduler aborts the leg to continue the stream elsewhere, so the stream's last token is still to come.
        """
        record = self._by_request.get(abort.request_id)
        if record is not None and (record.attempt, record.reader) == (abort.attempt, conn):
            self._leave(record, former=conn)

    def leg_ended(self, request: Request) -> None:
        """Starts the window for resuming a stream whose leg has ended before the stream's last token."""
        record = self._of(request)
        if record is not None and not record.is_whole and record.reader != NOBODY:
            self._leave(record, former=record.reader)

    def failed(self, request: Request) -> None:
        """Forgets a stream that ended with an error."""
        if (record := self._of(request)) is not None:
            self._forget(record)

    def _answer(self, conn: str, digest: bytes) -> None:
        record = self._find(digest)
        if record is None:
            self._output_batcher.send(conn, wire.Found(digest))
            return
        found = wire.Found(
            digest, record.request_id, record.attempt, record.order, record.keep.recipe, len(record.tokens)
        )
        self._output_batcher.send(conn, found)

    def _find(self, digest: bytes) -> Record | None:
        record = self._by_name.get(digest[:NAME_NBYTES])
        if record is None or not hmac.compare_digest(record.keep.digest, digest) or self._clock() > record.expires_s:
            return None
        return record

    def _attach(self, conn: str, attach: wire.Attach) -> None:
        """Makes a scheduler the reader, and sends it the stream from the beginning."""
        record, output_batcher = self._find(attach.digest), self._output_batcher
        request_id, attempt = attach.request_id, attach.attempt
        if record is None or (record.request_id, record.attempt) != (request_id, attempt):
            output_batcher.add_end(conn, LegEnd(request_id, attempt, GONE, is_fault=True))
            return
        self._take_from_readers(record, conn)
        record.reader, record.former, record.expires_s = conn, NOBODY, math.inf
        if record.prompt is not None:
            output_batcher.add_prompt(conn, record.prompt)
        if record.tokens:
            output_batcher.add_tokens(conn, record.tokens)
        if record.leg_key in self._legs:
            self._legs.readdress(record.leg_key, conn)
        elif not record.is_whole:
            output_batcher.add_end(conn, LegEnd(request_id, attempt, STOPPED, is_fault=True))
            self._leave(record, former=conn)

    def _replace(self, older: Record, conn: str, submit: wire.Submit) -> None:
        self._take_from_readers(older, conn)
        self._forget(older)
        if older.leg_key != f"{submit.request_id}#{submit.attempt}":
            self._legs.unwanted.add(older.leg_key)

    def _take_from_readers(self, record: Record, conn: str) -> None:
        """Ends the record's stream at other schedulers."""
        for reader in (record.reader, record.former):
            if reader not in (NOBODY, conn):
                self._output_batcher.add_end(reader, LegEnd(record.request_id, record.attempt, TAKEN, is_taken=True))

    # ---- end of records

    def expire(self, now_s: float) -> None:
        for record in [each for each in self._by_name.values() if now_s > each.expires_s]:
            self._forget(record)
            self._legs.unwanted.add(record.leg_key)

    def _leave(self, record: Record, former: str = NOBODY) -> None:
        record.reader, record.former, record.expires_s = NOBODY, former, self._clock() + record.keep.window_s
        self._legs.readdress(record.leg_key, NOBODY)

    def _of(self, request: Request) -> Record | None:
        record = self._by_request.get(request.request_id)
        return record if record is not None and record.attempt == request.attempt else None

    def _grow(self, record: Record, nbytes: int) -> None:
        """Adds to the bytes of a record. If memory runs out, the tenant with the most bytes loses records."""
        record.nbytes += nbytes
        self.nbytes += nbytes
        while self.nbytes > record.keep.capacity_nbytes and self._by_name:
            victim = self._victim(record)
            log.info("request %s can no longer resume: no memory left (--resume-memory)", victim.request_id)
            self._forget(victim)
            if victim.reader == NOBODY:
                self._legs.unwanted.add(victim.leg_key)

    def _victim(self, growing: Record) -> Record:
        """Returns the record to drop.

        It belongs to the tenant with the most bytes; on a tie, to the growing record's tenant. Among that tenant's
        records, one without a reader is dropped, the first to expire; if all have readers, the largest is dropped.
        There is one exception: if that tenant also owns the growing record, and dropping all its records without a
        reader would not free enough memory, the growing record itself is dropped.
        """
        sizes: Counter[bytes] = Counter()
        for each in self._by_name.values():
            sizes[each.keep.owner] += each.nbytes
        own = growing.keep.owner
        owner = max(sizes, key=lambda each: (sizes[each], each == own))
        its = [each for each in self._by_name.values() if each.keep.owner == owner]
        alone = [each for each in its if each.reader == NOBODY and each is not growing]
        if owner == own and self.nbytes - sum(each.nbytes for each in alone) > growing.keep.capacity_nbytes:
            return growing
        if alone:
            return min(alone, key=lambda each: each.expires_s)
        return max(its, key=lambda each: each.nbytes)

    def _forget(self, record: Record) -> None:
        if self._by_name.get(record.name) is record:
            del self._by_name[record.name]
            self.nbytes -= record.nbytes
            log.debug("%d streams can resume", len(self))
        if self._by_request.get(record.request_id) is record:
            del self._by_request[record.request_id]
