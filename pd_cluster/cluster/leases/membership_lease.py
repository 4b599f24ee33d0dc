"""Decides which of several schedulers owns membership, by a lease with a fencing number in a store that all of them
share.

The states are in docs/protocol/membership.md, "Several schedulers". Pure: the caller reads and writes the store, and
decides when. Knows nothing of workers, or of where a `LeaseStore` keeps the record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pd_cluster.process_messages import Service
from pd_cluster.types import Role

RENEWALS = 5  # renewals of a lease within its duration


class DesiredInstance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An instance's address, role and service as the owner of membership wants them.

    `joined_as`: the role with which it registered itself; None: it is in the rank table.
    """

    name: str
    role: Role
    host: str
    port: int
    device_ids: list[str]
    joined_as: Role | None = None
    service: Service = "in"
    next_role: Role | None = None
    drain_timeout_s: float = 0.0


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The shared record. Each write replaces the whole record and adds one to `version`."""

    version: int = 0
    term: int = 0  # the fencing number, higher with each owner; 0: no owner since the record was last removed
    holder: str = ""  # the owner's name@epoch; "": the lease was released
    admin: str = ""  # the owner's admin address, for operators
    table: bytes = b""  # the digest of the owner's rank table
    members: list[DesiredInstance] = []  # the owner's instances
    stamp: str = ""  # unique to each write


class LeaseStore(Protocol):
    """Keeps one record: in a folder of one host (lease_folder.py), or in Kubernetes (lease_kubernetes.py).

    `read` and `write` may block, so they are called on a separate thread, one at a time. `max_record_nbytes`: the
    maximum size of a record as JSON.
    """

    max_record_nbytes: int

    def read(self) -> LeaseRecord:
        """Returns the last record, or an empty one. Raises LeaseUnavailable."""

    def write(self, record: LeaseRecord) -> bool:
        """Replaces the record that this object last read or wrote, whose version is `record.version` minus one.

        Returns False if that record is no longer current: another was written in between, or it was removed. Raises
        LeaseUnavailable, after which the record may or may not have been written.
        """


class Ownership:
    """One scheduler's view of the lease. `own` is its name@epoch.

    `after_read` takes the record that was read and returns the one to write, if any; `after_write` takes the outcome of
    that write. The process may stall at any point in between, so `term_now` checks the clock, and workers refuse older
    terms.
    """

    def __init__(
        self,
        own: str,
        duration_s: float,
        clock: Callable[[], float],
        admin: str = "",
        table: bytes = b"",
        least_term: Callable[[], int] = lambda: 1,
    ) -> None:
        """`least_term`: returns the lowest term of an ownership that begins now."""
        self.own, self.duration_s = own, duration_s
        self.record = LeaseRecord()  # the last record that was read or written
        # the highest term in the records read so far; terms that workers report do not count, so that a lying worker
        # cannot end an ownership
        self.highest_term = 0
        self.is_candidate = True  # whether it may become the owner
        self.table = table
        self._admin, self._clock, self._least_term = admin, clock, least_term
        self._changed_s = math.inf  # when `record` was first seen
        self._term, self._until_s = 0, -math.inf  # the term and the end of the lease that this process holds
        self._written_s = -math.inf  # when `after_read` returned the pending write
        self._num_writes = 0

    @property
    def term_now(self) -> int | None:
        """The fencing number under which this process may give orders now; None: it may give none."""
        return self._term if self._clock() < self._until_s else None

    def after_read(self, record: LeaseRecord, members: Sequence[DesiredInstance]) -> LeaseRecord | None:
        """Takes a record that was just read. `members`: this process's instances. Returns the record to write."""
        now_s = self._clock()
        if self._changed_s == math.inf or record != self.record:
            self.record, self._changed_s = record, now_s
        self.highest_term = max(self.highest_term, record.term)
        if record.term > self._term:
            self._until_s = -math.inf
        self._written_s = now_s
        is_missing = not record.term  # never written, or removed; an owner then writes the record again
        if self.term_now is not None and (is_missing or (record.holder, record.term) == (self.own, self._term)):
            is_due = is_missing or now_s > self._until_s - self.duration_s * (1 - 1 / RENEWALS)
            is_due = is_due or list(members) != record.members or self.table != record.table
            return self._next(self._term, members) if is_due else None
        if not record.version:  # a lease's expiry can be seen only on a record that exists and stays unchanged
            return LeaseRecord(version=1, stamp=self._new_stamp())
        is_free = not (is_missing or record.holder) or now_s - self._changed_s >= self.duration_s
        if not is_free or not self.is_candidate:
            return None
        return self._next(max(self.highest_term + 1, self._least_term()), members)

    def after_write(self, record: LeaseRecord, is_written: bool) -> None:
        """Takes the outcome of writing the record that `after_read` returned. After a failed write, a lease stays valid
        until it expires: no other scheduler can own membership before that.
        """
        if not is_written:
            return
        self.record, self._changed_s = record, self._clock()
        self.highest_term = max(self.highest_term, record.term)
        if record.holder == self.own and self.highest_term == record.term:
            self._term, self._until_s = record.term, self._written_s + self.duration_s

    def released(self) -> LeaseRecord | None:
        """Releases the lease: this process gives no further orders. Returns the record to write, so that the next owner
        need not wait for the lease's end; None if this process owned nothing.
        """
        term, self._until_s, self.is_candidate = self.term_now, -math.inf, False
        if term is None or self.record.term != term:  # the record and its list were removed
            return None
        last, stamp = self.record, self._new_stamp()
        return msgspec.structs.replace(last, version=last.version + 1, holder="", admin="", stamp=stamp)

    def _next(self, term: int, members: Sequence[DesiredInstance]) -> LeaseRecord:
        return LeaseRecord(
            version=self.record.version + 1,
            term=term,
            holder=self.own,
            admin=self._admin,
            table=self.table,
            members=list(members),
            stamp=self._new_stamp(),
        )

    def _new_stamp(self) -> str:
        self._num_writes += 1
        return f"{self.own}/{self._num_writes}"
