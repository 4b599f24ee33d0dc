"""Makes a scheduler one of several over the same workers: it owns membership or follows the owner. Runs on the event
loop.

membership_lease.py decides the owner; this module keeps the shared record. While this scheduler is the owner,
`Membership` and `ElasticMembership` act under its fencing number; otherwise this module applies the owner's list of
instances. The states are in docs/protocol/membership.md, "Several schedulers". Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.leases.membership_lease import DesiredInstance, LeaseRecord, LeaseStore, Ownership
from pd_cluster.cluster.members.elastic_membership import ElasticMembership
from pd_cluster.cluster.members.worker_membership import Membership
from pd_cluster.errors import LeaseUnavailable, Refused, Unavailable

log = logging.getLogger(__name__)
T = TypeVar("T")

LOOKS = 10  # reads of the record within a lease's duration
SETTLE_S = 0.5  # the least `settle_s`
LARGEST_WISH_NBYTES = 96  # an instance's service, next role and time to drain, as JSON
OTHER_NBYTES = 1024  # the size of a record without its list
CALL_PART = 1 / 3  # the maximum time for a call to the store, as a share of a lease's duration
RECORD_TIMEOUT_S = 2.0  # a command must be in the record within this time


class TermMailbox(Protocol):
    """The part of the mailbox that puts the term into greetings to workers."""

    def note_term(self, term: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Lease:
    """The settings that make a scheduler one of several. `admin`: its admin address, for operators.

    `takeover_timeout_s`: the time within which a new scheduler must reach all instances.
    """

    index: int
    store: LeaseStore
    admin: str
    duration_s: float
    takeover_timeout_s: float


class SharedMembership:
    """`membership` must know this process's name@epoch."""

    def __init__(
        self,
        lease: Lease,
        membership: Membership,
        elastic: ElasticMembership,
        mailbox: TermMailbox,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        # If the record is lost, workers still remember its terms, so a new record's terms must be higher.
        own, first_term = membership.own_key, lambda: max(1, int(wall_clock()))
        self.ownership = Ownership(own, lease.duration_s, clock, lease.admin, membership.table_digest, first_term)
        self._store, self._membership, self._elastic, self._mailbox = lease.store, membership, elastic, mailbox
        self._clock, self._started_s, self._takeover_timeout_s = clock, clock(), lease.takeover_timeout_s
        # a separate thread, because look-ups of unresolvable names may occupy all of the loop's threads
        self._thread = ThreadPoolExecutor(1, "lease")
        self.look_requested = asyncio.Event()  # set to request that the record be read now
        self._look_done = asyncio.Event()  # set after each read, and then replaced
        self._term: int | None = None  # the term of the last orders
        self._followed = LeaseRecord()
        self._problem = ""
        self._refused_term = 0  # the highest term that a worker named when it refused an order
        self._asking: asyncio.Future[Any] | None = None  # the store's last call
        self._writing: LeaseRecord | None = None  # a record whose write has no outcome yet
        membership.term = lambda: self.ownership.term_now
        membership.refused = self._on_refused
        membership.has_capacity = self._has_capacity
        elastic.shared = self

    @property
    def name(self) -> str:
        return self.ownership.own.partition("@")[0]

    @property
    def owner(self) -> str:
        """The name of the scheduler that owns membership, if known, or ""."""
        holder = self.ownership.record.holder
        if holder == self.ownership.own and not self.is_owner:
            return ""  # its own lease has expired, and it cannot see whether another scheduler owns membership now
        return holder.partition("@")[0]

    @property
    def known_term(self) -> int:
        """The highest fencing number known to this process."""
        return self.ownership.highest_term

    def standing(self) -> dict[str, Any]:
        """Returns this scheduler's name, and the owner of membership, for people."""
        return {"name": self.name, "owner": self.owner, "term": self.known_term}

    @property
    def settle_s(self) -> float:
        """How long other schedulers may be unaware of a command, because a few of their reads may be late."""
        return max(SETTLE_S, 3 * self.ownership.duration_s / LOOKS)

    @property
    def is_owner(self) -> bool:
        return self.ownership.term_now is not None

    def check(self) -> None:
        """Raises Refused if this scheduler does not own membership."""
        if not self.is_owner:
            record = self.ownership.record
            where = f"{self.owner} does, at {record.admin}; retry there" if self.owner else "none does now; try again"
            raise Refused(f"{self.name} does not own membership: {where}")

    def changed(self) -> None:
        """Requests that a change of the owner's list be recorded at once."""
        self.look_requested.set()

    async def recorded(self) -> None:
        """Returns once the owner's list is in the record, where it survives this process. Raises Unavailable."""
        self.look_requested.set()
        try:
            async with asyncio.timeout(RECORD_TIMEOUT_S):
                while not (self.is_owner and self.ownership.record.members == self._members()):
                    await self._look_done.wait()
        except TimeoutError:
            reason = self._problem or f"{self.owner or 'no scheduler'} now owns membership"
            raise Unavailable(f"the command may be lost with this scheduler: {reason}") from None

    async def run(self) -> None:
        """Reads the record repeatedly until cancelled; then releases the lease."""
        try:
            while True:
                self.look_requested.clear()
                await self.look()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.ownership.duration_s / LOOKS):
                        await self.look_requested.wait()
        finally:
            await self._release()
            self._thread.shutdown(wait=False)

    async def look(self) -> None:
        """Reads the record; writes it if this scheduler is the owner or may become it; otherwise follows it."""
        ownership = self.ownership
        ownership.table = self._membership.table_digest
        try:
            if not await self._exchange():
                await self._exchange()  # the write may have failed only because another program touched the record
            self._problem = ""
        except LeaseUnavailable as error:
            if str(error) != self._problem:
                log.error("--scheduler-lease: %s", error)
            self._problem = str(error)
        self._mailbox.note_term(ownership.highest_term)
        if not self.is_owner:
            self._follow(ownership.record)
        self._note_term()
        self._note_refused()
        self._look_done.set()
        self._look_done = asyncio.Event()

    async def _exchange(self) -> bool:
        """Reads the record, and writes the next one if due. Returns False if another process has written in between."""
        ownership = self.ownership
        record = await self._on_thread(self._store.read)
        if not self.is_owner:
            self._follow(record)  # first, because even a record without an owner has operators' requests
        ownership.is_candidate = self._is_candidate(record)
        self._writing = ownership.after_read(record, self._members())
        if self._writing is None:
            return True
        is_written = await self._on_thread(self._store.write, self._writing)
        wanted, self._writing = self._writing, None
        ownership.after_write(wanted, is_written)
        return is_written

    async def _on_thread(self, function: Callable[..., T], *args: object) -> T:
        """Calls the store on its thread. If the caller is cancelled, the call continues; `_release` waits for it."""
        asking = asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        self._asking = asking
        return await asyncio.shield(asking)

    def _on_refused(self, term: int) -> None:
        self._refused_term = max(self._refused_term, term)
        self.look_requested.set()

    def _note_refused(self) -> None:
        """Warns if the record's term is still below the workers', although it was read after their refusal.

        Only an operator can solve this.
        """
        if self.is_owner and self._refused_term > self.ownership.highest_term:
            log.error(
                "workers follow term %d and refuse earlier ones, but this owner of membership has term %d: the "
                "previous record was lost, and this host's clock was set back; restart the workers that refuse its "
                "orders",
                self._refused_term,
                self.ownership.highest_term,
            )
        self._refused_term = 0

    def _note_term(self) -> None:
        before, self._term = self._term, self.ownership.term_now
        if self._term is not None and self._term != before:
            log.warning("%s owns membership now (term %d)", self.name, self._term)
            self._membership.send_peers()
            self._membership.wake()
        elif self._term is None and before is not None:
            log.warning("%s no longer owns membership", self.name)
            self._membership.wake()

    def _follow(self, record: LeaseRecord) -> None:
        """Applies the owner's list. If the first record that is read was made for another rank table, its list may be
        stale, so this waits for the owner's next record.
        """
        if record == self._followed or record.holder == self.ownership.own:
            return
        is_first, self._followed = not self._followed.term, record
        if record.term and not (is_first and record.table != self._membership.table_digest):
            self._elastic.follow(record.members)

    def _is_candidate(self, record: LeaseRecord) -> bool:
        """Whether this scheduler knows all live workers. If a new scheduler sent an incomplete list, workers would
        close links that other schedulers use.
        """
        if not record.term or self._clock() - self._started_s > self._takeover_timeout_s:
            return True
        return all(instance.is_ready for instance in self._membership.instances)

    def _members(self) -> list[DesiredInstance]:
        return [self._listed(each) for each in self._membership.instances]

    def _listed(self, instance: Instance) -> DesiredInstance:
        return DesiredInstance(
            name=instance.name,
            role=instance.role,
            host=self._membership.host_of(instance),
            port=instance.port,
            device_ids=instance.device_ids,
            joined_as=instance.joined_as,
            service=instance.service,
            next_role=instance.next_role,
            drain_timeout_s=instance.drain_timeout_s,
        )

    def _has_capacity(self, new: Instance) -> bool:
        """Whether the record has room for this instance, even if an operator changes every instance."""
        listed = [*self._members(), self._listed(new)]
        nbytes = len(msgspec.json.encode(listed)) + LARGEST_WISH_NBYTES * len(listed) + OTHER_NBYTES
        return nbytes <= self._store.max_record_nbytes

    async def _release(self) -> None:
        """Releases the lease after a running call to the store has ended. If that takes too long, leaves the lease to
        expire.
        """
        if self._asking is not None and not self._asking.done():
            await asyncio.wait((self._asking,), timeout=self.ownership.duration_s * CALL_PART)
            if not self._asking.done():
                return
        with contextlib.suppress(LeaseUnavailable, RuntimeError):  # no thread can be started while the loop ends
            if self._writing is not None and self._asking is not None:
                self.ownership.after_write(self._writing, bool(self._asking.result()))
        record = self.ownership.released()
        if record is not None:
            with contextlib.suppress(LeaseUnavailable, RuntimeError):
                await self._on_thread(self._store.write, record)
