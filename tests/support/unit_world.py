"""Simulates a unit by discrete events: its members' loops, the messages between them, and the exchange.

Messages between two members arrive late but in order. As with gloo, an exchange has no round number: each member's nth
call pairs with the others' nth call. The order of events depends only on the seed.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from typing import Literal

from pd_cluster import wire
from pd_cluster.engine.unit.round_sync import RoundSync
from pd_cluster.errors import InstanceLost

LONGEST_STEP_S = 2.0
DEAD_AFTER_S = 3.0
CLOSES_AFTER_S = 0.5  # no rows arrive later than this after a drain begins
Counts = list[int]
Event = int | tuple[int, wire.Body | None]  # number of arriving rows; or (sender, message), None: connection lost


class SimulatedMember:
    """One engine's loop: reads mail, calls `enters`, exchanges, calls `agreed`, computes, ends the turn."""

    def __init__(self, world: SimulatedUnit, rank: int, kind: type[RoundSync]) -> None:
        self.world, self.rank = world, rank
        self.round_sync = kind(rank, world.size, self._send)
        self.reads_in_exchange = world.random() < 0.5
        self.budget = 1 + int(world.random() * 3)  # rows per step
        self.state: Literal["asleep", "exchange", "computing", "ended"] = "asleep"
        self.inbox: deque[Event] = deque()
        self.num_arrived = 0  # number of rows so far
        self.computed: list[int] = []
        self.rows = range(0)  # rows of the current step
        self.num_exchanges = 0
        self.closes_s = math.inf
        self.said: set[wire.Body] = set()
        self.gone: set[int] = set()
        self.ended_s = math.inf
        self.loss = ""  # the error with which it ended, if any

    @property
    def has_work(self) -> bool:
        return len(self.computed) < self.num_arrived

    @property
    def is_done(self) -> bool:
        return wire.UnitDone() in self.said

    def _send(self, body: wire.Body) -> None:
        assert body not in self.said, f"{body} is sent twice"
        assert self.has_work or not isinstance(body, wire.UnitWake), "a wake without work"
        self.said.add(body)
        self.world.post(self.rank, body)

    def arrive(self, event: Event | None) -> None:
        """`event` None: a timer expired."""
        if self.state == "ended":
            return
        if event is not None:
            self.inbox.append(event)
        if self.state == "asleep":
            self._turn()
        elif self.state == "exchange" and (self.reads_in_exchange or (isinstance(event, tuple) and not event[1])):
            self._read()  # a lost member ends the exchange
            self._fail_exchange()

    def _turn(self) -> None:
        self._read()
        if self.state == "ended":
            return
        if not self.round_sync.enters(self.has_work):
            self.state = "asleep"
            self._end_turn()
            return
        first = len(self.computed)
        self.rows = range(first, min(first + self.budget, self.num_arrived))
        self.state = "exchange"
        self.num_exchanges += 1
        self._fail_exchange()
        if self.state == "exchange":
            self.world.exchange(self)

    def _read(self) -> None:
        try:
            while self.inbox:
                self._handle(self.inbox.popleft())
        except InstanceLost as error:
            self._end(str(error))
        if self.round_sync.is_draining and self.closes_s == math.inf:
            self.closes_s = self.world.now_s + CLOSES_AFTER_S
            self.world.after(CLOSES_AFTER_S, self.arrive, None)

    def _handle(self, event: Event) -> None:
        match event:
            case int():
                self.num_arrived += event if self.world.now_s < self.closes_s else 0
            case (rank, None):
                self.gone.add(rank)
                self.round_sync.lost(rank, f"decode-{rank}", "silence")
            case (rank, wire.UnitDrain()) if rank == self.rank:
                self.round_sync.drain()
            case (rank, wire.UnitWake() | wire.UnitDrain() | wire.UnitDone() as message):
                self.round_sync.heard(rank, message)

    def _fail_exchange(self) -> None:
        """Fails an exchange in which a dead process has not taken part, because the process's sockets are closed."""
        if self.state == "exchange":
            for rank in self.gone:
                if self.world.members[rank].num_exchanges < self.num_exchanges:
                    self._end(f"decode-{rank} left the exchange")
                    return

    def exchanged(self, counts: Counts, rows: list[tuple[int, int]]) -> None:
        if self.state == "ended":
            return
        is_computed = self.round_sync.agreed(counts)
        self.world.compare(self.num_exchanges, (self.round_sync.round, is_computed, counts))
        if is_computed:
            first = sum(counts[: self.rank])
            own = rows[first : first + counts[self.rank]]
            assert own == [(self.rank, row) for row in self.rows], "these are another member's rows"
            self.state = "computing"
            self.world.after(self.world.random() ** 3 * LONGEST_STEP_S, self._computed)
        else:
            self._end_turn()

    def _computed(self) -> None:
        if self.state != "ended":
            self.computed += self.rows
            self._end_turn()

    def _end_turn(self) -> None:
        if self.world.now_s >= self.closes_s and not self.has_work and not self.inbox:
            self.round_sync.done()
        if self.round_sync.may_end:
            self._end("")
        elif self.state != "asleep":
            self._turn()

    def _end(self, loss: str) -> None:
        if self.state != "ended":
            self.state, self.ended_s, self.loss = "ended", self.world.now_s, loss
            self.world.post(self.rank, None)

    def kill(self) -> None:
        if self.state != "ended":
            self.state, self.ended_s, self.loss = "ended", self.world.now_s, "killed"
            self.world.cut(self)


class SimulatedUnit:
    """Draws the order of events by the seed; `run` raises AssertionError if the members get out of step.

    `kind`: the policy under test. `turned`: one member gets the counts in another order, a fault that must be found.
    """

    def __init__(self, seed: int, kind: type[RoundSync] = RoundSync, turned: bool = False) -> None:
        self.random = random.Random(seed).random
        self.now_s = 0.0
        self.size = 2 + int(self.random() ** 3 * 7)
        self._turned = turned
        self._slowness_s = 0.05 + 8 * self.random()  # longest delay of a message
        self._lateness_s = 0.05 + 4 * self.random()  # longest delay of counts
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = itertools.count()
        self._arrives_s: dict[tuple[int, int], float] = {}  # arrival of the last message between two members
        self._cut: set[tuple[int, int]] = set()
        self._calls: dict[int, dict[int, tuple[int, tuple[int, bool], range]]] = {}
        self._agreed: dict[int, tuple[int, bool, Counts]] = {}
        self._wanted: set[int] = set()  # rounds for which a member woke the others, or that follow one with rows
        self.killed: SimulatedMember | None = None
        self.was_done = False  # whether the killed member was done when it was killed
        self.members = [SimulatedMember(self, rank, kind) for rank in range(self.size)]
        self._mates = [[mate for mate in self.members if mate is not member] for member in self.members]
        self._draw()

    def _draw(self) -> None:
        length_s = 15 * self.random()
        bursts_s = [length_s * self.random() for _ in range(1 + int(self.random() * 3))]
        for _ in range(1 + int(self.random() * 1.2 * self.size)):
            self._add_rows(bursts_s[int(self.random() * len(bursts_s))] + self.random() ** 2)
        self.num_drains = int(self.random() * 2.5)
        for _ in range(self.num_drains):
            member = self._any()
            self.after(2 * length_s * self.random(), member.arrive, (member.rank, wire.UnitDrain()))
        if self.random() < 0.3:
            self.after(2 * length_s * self.random(), self._any().kill)

    def _add_rows(self, wait_s: float) -> None:
        member = self._any()
        self.after(wait_s, member.arrive, 1 + int(self.random() * 3))

    def _any(self) -> SimulatedMember:
        return self.members[int(self.random() * self.size)]

    def after(self, wait_s: float, call: Callable[..., None], *args: object) -> None:
        self._at(self.now_s + wait_s, call, *args)

    def _at(self, at_s: float, call: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), call, args))

    def post(self, rank: int, body: wire.Body | None) -> None:
        if isinstance(body, wire.UnitWake):
            self._wanted.add(body.round)
        for mate in self._mates[rank]:
            pair = rank, mate.rank
            late_s = self._slowness_s * self.random() ** 4
            self._arrives_s[pair] = at_s = max(self._arrives_s.get(pair, 0.0), self.now_s + late_s)
            self._at(at_s, self._deliver, mate, rank, body)

    def _deliver(self, mate: SimulatedMember, rank: int, body: wire.Body | None) -> None:
        if (rank, mate.rank) not in self._cut:
            mate.arrive((rank, body))

    def cut(self, member: SimulatedMember) -> None:
        """Ends a member's connections; some lose messages in transit."""
        self.killed, self.was_done = member, member.is_done
        for mate in self._mates[member.rank]:
            if self.random() < 0.5:
                self._cut.add((member.rank, mate.rank))
            self.after(DEAD_AFTER_S * self.random(), mate.arrive, (member.rank, None))

    def exchange(self, member: SimulatedMember) -> None:
        assert member.round_sync.round in self._wanted, "a member entered a round that nobody requested"
        calls = self._calls.setdefault(member.num_exchanges, {})
        calls[member.rank] = member.round_sync.round, member.rows
        if len(calls) < self.size:
            return
        ordered = [calls[rank] for rank in range(self.size)]
        assert len({number for number, _ in ordered}) == 1, "members of one exchange are in different rounds"
        counts = [len(own) for _, own in ordered]
        rows = [(rank, row) for rank, (_, own) in enumerate(ordered) for row in own]
        if not rows and self.random() < 0.4:
            self._add_rows(self.random())  # arrives while all are about to sleep
        for each in self.members:
            is_turned = self._turned and each.rank == 1
            told = counts[1:] + counts[:1] if is_turned else counts
            self.after(0.02 + self._lateness_s * self.random() ** 6, each.exchanged, told, rows)

    def compare(self, number: int, agreed: tuple[int, bool, Counts]) -> None:
        """Asserts that members agree on (next round, whether this one is computed, counts)."""
        if number in self._agreed:
            assert self._agreed[number] == agreed, f"members differ after exchange {number}"
            return
        self._agreed[number] = agreed
        if any(agreed[2]):
            self._wanted.add(agreed[0])

    def run(self) -> None:
        while self._events:
            self.now_s, _, call, args = heapq.heappop(self._events)
            call(*args)
        self._check()

    def _check(self) -> None:
        waiting = [member.rank for member in self.members if member.state not in ("asleep", "ended")]
        assert not waiting, f"members {waiting} wait forever"
        if self.killed:
            self._check_loss(self.killed)
            return
        rounds = {member.round_sync.round for member in self.members}
        assert len(rounds) == 1, "sleeping members expect different rounds"
        for member in self.members:
            assert member.computed == list(range(member.num_arrived)), "rows are missing, or computed twice"
            assert not member.loss, "a member reports a loss, but none was lost"
            assert (member.state == "ended") == bool(self.num_drains), "a member ended without a drain, or did not end"
            assert member.round_sync.num_rounds == member.num_exchanges

    def _check_loss(self, killed: SimulatedMember) -> None:
        ended = {f"decode-{member.rank}" for member in self.members if member.loss}
        for member in self._mates[killed.rank]:
            assert member.state == "ended", f"{member.rank} has outlived {killed.rank}"
            if member.loss:
                assert member.loss.split()[0].rstrip(",") in ended, "the error names a member that has not failed"
                if not self.was_done:  # a done member is missed only by members that are not done
                    assert member.ended_s <= killed.ended_s + DEAD_AFTER_S + LONGEST_STEP_S
            else:
                assert member.is_done, "a member that is not done ended without an error"
                assert member.computed == list(range(member.num_arrived))
