"""Drives several schedulers and workers, without sockets, through random orders of events.

`Ownership`, `Fence` and the record are production code. A seeded random number chooses the next event: a scheduler
reads the record, its write succeeds or fails, it sends an order, a late message arrives, a process pauses, or dies and
restarts, an operator changes a role or removes the record, or time passes.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from pd_cluster.cluster.leases.membership_lease import DesiredInstance, LeaseRecord, Ownership
from pd_cluster.errors import LeaseUnavailable
from pd_cluster.net.peer_admission import Fence

DURATION_S = 1.5
ROLES = ("prefill", "decode")


class Store:
    """A record with compare-and-swap writes that is sometimes unreachable."""

    def __init__(self, rng: random.Random, clock: Callable[[], float]) -> None:
        self._rng, self._clock = rng, clock
        self.record = LeaseRecord()
        self.holders: dict[int, str] = {}  # term -> owner
        self.is_sure = False  # if set, nothing fails
        self.back_s = 0.0  # when it becomes reachable again

    def read(self) -> LeaseRecord:
        self.reach()
        return self.record

    def write(self, record: LeaseRecord, known: LeaseRecord) -> bool:
        self.reach()
        if not self.is_sure and self._rng.random() < 0.03:
            return False  # as if another program had changed it
        return known == self.record and record.version == known.version + 1 and self.write_whole(record)

    def write_whole(self, record: LeaseRecord) -> bool:
        """Stores the record. Raises if the response is lost."""
        assert record.term >= self.record.term, "the record's term decreased"
        if record.holder:
            assert self.holders.setdefault(record.term, record.holder) == record.holder, "a term has two owners"
        self.record = record
        if self._rng.random() < 0.05 and not self.is_sure:
            raise LeaseUnavailable("the record is written, but the response is lost")
        return True

    def reach(self) -> None:
        if not self.is_sure and (self._clock() < self.back_s or self._rng.random() < 0.05):
            raise LeaseUnavailable("the record is unreachable")


class Way:
    """One scheduler's access to the record."""

    def __init__(self, store: Store) -> None:
        self._store, self._known = store, LeaseRecord()

    def read(self) -> LeaseRecord:
        self._known = self._store.read()
        return self._known

    def write(self, record: LeaseRecord) -> bool:
        if not self._store.write(record, self._known):
            return False
        self._known = record
        return True


@dataclass(slots=True)
class Worker:
    """One worker process. `applied`: term and number of each order that it followed."""

    fence: Fence = field(default_factory=Fence)
    applied: list[tuple[int, int]] = field(default_factory=list)


class LeaseWay(Protocol):
    def read(self) -> LeaseRecord: ...
    def write(self, record: LeaseRecord) -> bool: ...


class Scheduler:
    """One scheduler process. Reading and renewing the record is a generator, so that it can pause at any point."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.store = world.way_of(world)
        self.goes_on_s = 0.0  # paused until then
        own = f"{name}@{world.rng.getrandbits(30):x}"
        self.ownership = Ownership(
            own, DURATION_S, lambda: world.now_s, least_term=lambda: max(1, int(world.now_s / DURATION_S))
        )
        self.members = [DesiredInstance(name="prefill-0", role="prefill", host="h", port=1, device_ids=[])]
        self.looking: Iterator[None] = iter(())
        self.mail: dict[int, deque[tuple[int, int]]] = {}  # worker -> its messages (term, number), in order

    @property
    def is_stopped(self) -> bool:
        return self.world.now_s < self.goes_on_s

    def look(self) -> Iterator[None]:
        own, store = self.ownership, self.store
        try:
            record = store.read()
            yield
            wanted = own.after_read(record, self.members)
            yield
            if wanted is not None:
                is_written = store.write(wanted)
                yield
                own.after_write(wanted, is_written)
        except LeaseUnavailable:
            return
        if own.term_now is None and own.record.holder != own.own and own.record.term:
            self.members = list(own.record.members)

    def order(self) -> Iterator[None]:
        """Sends all workers an order; may pause between its check of the clock and the last message."""
        term = self.ownership.term_now
        if term is None:
            return
        self.world.number += 1
        number = self.world.number
        for worker in range(len(self.world.workers)):
            self.mail.setdefault(worker, deque()).append((term, number))
            yield


class World:
    """`way_of`: makes a scheduler process's access to the record.

    `removals`: the operator's removals of the record per 97.8 other events; `remove` removes the real one.
    """

    def __init__(
        self,
        seed: int,
        num_schedulers: int = 3,
        num_workers: int = 2,
        way_of: Callable[[World], LeaseWay] = lambda world: Way(world.store),
        removals: float = 0.0,
        remove: Callable[[], None] = lambda: None,
    ) -> None:
        self.way_of, self._removals, self._remove = way_of, removals, remove
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.number = 0
        self.store = Store(self.rng, lambda: self.now_s)
        self.workers = [Worker() for _ in range(num_workers)]
        self.schedulers = [Scheduler(self, f"scheduler-{index}") for index in range(num_schedulers)]
        self.acting: dict[int, Iterator[None]] = {}  # scheduler -> order that it is sending
        self.num_refused = self.num_owners = self.num_wishes = self.num_stops = self.num_removed = 0
        self._term = 0

    def run(self, num_events: int = 600) -> None:
        for _ in range(num_events):
            self._happens()
            self._check()

    def _happens(self) -> None:
        rng = self.rng
        owners = [at for at, each in enumerate(self.schedulers) if each.ownership.term_now is not None]
        at = rng.choice(owners) if owners and rng.random() < 0.4 else rng.randrange(len(self.schedulers))
        scheduler = self.schedulers[at]
        match rng.choices(
            ("look", "time", "deliver", "order", "stop", "die", "wish", "worker dies", "store", "removed by hand"),
            (50, 16, 14, 12, 2, 0.5, 2, 0.5, 0.3, self._removals),
        )[0]:
            case "look" if not scheduler.is_stopped:
                if next(scheduler.looking, "over") == "over":
                    scheduler.looking = scheduler.look()
            case "time":
                self.now_s += rng.choice((0.01, 0.03, 0.05, 0.1, 0.3))
            case "deliver":
                self._deliver(rng.choice(self.schedulers), rng.randrange(len(self.workers)))
            case "order" if not scheduler.is_stopped:
                if next(self.acting.get(at, iter(())), "over") == "over":
                    self.acting[at] = order = scheduler.order()
                    next(order, None)  # checks the clock and sends the first message
            case "stop":
                scheduler.goes_on_s = self.now_s + rng.choice((0.2, 1.0, 2.0, 4.0))
                self.num_stops += 1
            case "die":
                self.schedulers[at] = Scheduler(self, scheduler.name)
                self.acting.pop(at, None)
            case "wish" if not scheduler.is_stopped and scheduler.ownership.term_now is not None:
                self._wish(scheduler)
            case "worker dies":
                dead = rng.randrange(len(self.workers))
                self.workers[dead] = Worker()
                for each in self.schedulers:
                    each.mail.pop(dead, None)
                    if not each.is_stopped:  # paused schedulers greet later, with an old term
                        self.workers[dead].fence.note(each.ownership.highest_term)
            case "store":
                self.store.back_s = self.now_s + self.rng.choice((0.5, 1.0, 3.0))
            case "removed by hand" if self.store.record.version:
                self.store.record = LeaseRecord()
                self._remove()
                self.num_removed += 1

    def _deliver(self, scheduler: Scheduler, worker: int) -> None:
        if not (mail := scheduler.mail.get(worker)):
            return
        term, number = mail.popleft()
        if self.workers[worker].fence.admits(term):
            self.workers[worker].applied.append((term, number))
        else:
            self.num_refused += 1

    def _wish(self, scheduler: Scheduler) -> None:
        """Applies an operator's command, which must survive the scheduler once the record has it."""
        role = self.rng.choice(ROLES)
        port = self.number = self.number + 1
        scheduler.members = [DesiredInstance(name="prefill-0", role=role, host="h", port=port, device_ids=[])]  # type: ignore[arg-type]
        self.num_wishes += 1

    def _check(self) -> None:
        owners = [each for each in self.schedulers if each.ownership.term_now is not None]
        assert len(owners) <= 1, f"two schedulers own membership: {[each.name for each in owners]}"
        if owners:
            term = owners[0].ownership.term_now
            assert term is not None
            assert term >= self._term, f"term {term} after {self._term}"
            self.num_owners += term > self._term
            self._term = term
            assert self.store.holders[term] == owners[0].ownership.own
        for worker in self.workers:
            terms = [term for term, _ in worker.applied]
            assert terms == sorted(terms), f"a worker followed an earlier owner: {terms}"
            numbers = [number for term, number in worker.applied]
            assert len(numbers) == len(set(numbers))

    def settle(self) -> None:
        """Ends all pauses and faults; asserts that within a lease and two reads there is one owner, whom all follow."""
        self.store.is_sure = True
        for scheduler in self.schedulers:
            scheduler.goes_on_s = 0.0
        began_s = self.now_s
        while self.now_s - began_s <= DURATION_S + 0.3:
            for scheduler in self.rng.sample(self.schedulers, len(self.schedulers)):
                for _ in scheduler.looking:
                    pass
                scheduler.looking = scheduler.look()
                for _ in scheduler.looking:
                    self._check()
            self.now_s += 0.1
        owners = [each for each in self.schedulers if each.ownership.term_now is not None]
        assert len(owners) == 1, f"{len(owners)} schedulers own membership in the end"
        for scheduler in self.schedulers:
            assert scheduler.members == owners[0].members == self.store.record.members, "a follower has another list"
