"""Registers a worker outside the rank tables with a scheduler, and keeps it registered. The states are in
docs/protocol/membership.md.

Runs in the worker's parent. Knows nothing of ranks: the scheduler reads everything else from the worker's `/instance`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from pd_cluster import wire
from pd_cluster.cluster.members.rank_table_place import resolve_hosts
from pd_cluster.errors import ConfigError, called
from pd_cluster.net.connection_handshake import CUT_SHORT, REFUSALS
from pd_cluster.net.mailbox import Mailbox
from pd_cluster.net.peer_admission import JOIN_EPOCH, JOIN_PORT, Life, join_key
from pd_cluster.settings.process_configs import Credentials
from pd_cluster.settings.timeouts import Timeouts
from ranktable_tools.host_addresses import bracketed

log = logging.getLogger(__name__)

Address = tuple[str, int]
State = Literal["seeking", "opening", "asking", "joined"]
TICK_S = 0.1
LEAVE_S = 1.0  # the longest wait for the scheduler's answer to Leave
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.5, 2.0  # short, because a new scheduler holds requests for only 3.5 s
MOST_CUT_ROUNDS = 3  # the search ends after this many rounds in which all addresses listen, but none has a pinned key


class JoiningMailbox(Protocol):
    """The part of the mailbox that a joining worker needs."""

    def connect(self, name: str, epoch: int, host: str, port: int, key: bytes) -> str: ...
    def disconnect(self, conn: str) -> None: ...
    def send(self, conn: str, body: wire.Body) -> None: ...


class WorkerJoining:
    """The worker's side of a registration; uses one thread and no socket. `keys`: the public keys that cluster.secret
    pins.

    The mailbox's events and `tick` raise ConfigError if the worker must end.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        keys: Sequence[bytes],
        join: wire.Join,
        lines: JoiningMailbox,
        timeouts: Timeouts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state: State = "seeking"
        self.conn = ""
        self._targets = list(itertools.product(addresses, keys))
        self._at = 0  # index of the current or next target
        self._num_tried = [0] * len(self._targets)
        self._join, self._lines, self._timeouts, self._clock = join, lines, timeouts, clock
        self._reason = "no attempt yet"
        self._logged: set[str] = set()  # reasons logged since the start or since the last registration
        self._num_cut = 0  # consecutive attempts that the other end closed during the handshake
        self._backoff_s = FIRST_BACKOFF_S
        self._num_hosts = [1] * len(self._targets)  # number of addresses of each target's name, when last resolved
        self._num_in_round = 0  # attempts in this round
        self._next_s = self._asked_s = clock()
        self._deadline_s = clock() + timeouts.join_timeout_s
        self._was_joined = False

    @property
    def address(self) -> Address:
        return self._targets[self._at][0]

    @property
    def shown_address(self) -> str:
        host, port = self.address
        return f"{bracketed(host)}:{port}"

    @property
    def is_due(self) -> bool:
        """Whether it is time to connect to `address`."""
        return self.state == "seeking" and self._clock() >= self._next_s

    def connect(self, *hosts: str) -> None:
        """Opens a connection to the next address. `hosts`: its numeric addresses; each attempt uses the next."""
        (_, port), key = self._targets[self._at]
        host = sorted(hosts)[self._num_tried[self._at] % len(hosts)]  # sorted, because name servers change the order
        self._num_hosts[self._at] = len(hosts)
        self._num_tried[self._at] += 1
        self.state, self.conn = "opening", self._lines.connect(JOIN_PORT, JOIN_EPOCH, host, port, key)

    def fail(self, reason: str) -> None:
        """Records that the attempt failed or the registration is lost; the next attempt follows after a delay."""
        shown = f"{self.shown_address}: {reason}"
        was_joined = self.state == "joined"
        if was_joined:
            log.warning("the registration is lost: %s", shown)
            self._deadline_s = self._clock() + self._timeouts.join_timeout_s
        elif shown not in self._logged:
            self._logged.add(shown)
            log.info("not registered yet: %s", shown)
        self.state, self.conn, self._reason = "seeking", "", shown
        self._num_cut = self._num_cut + 1 if reason == CUT_SHORT else 0
        if not was_joined:
            self._at = (self._at + 1) % len(self._targets)
            self._num_in_round += 1
        in_all = sum(self._num_hosts)
        if self._num_cut >= MOST_CUT_ROUNDS * in_all:
            raise ConfigError(
                f"{called('join')} {shown}; is this a scheduler's {called('join_port')}? Then copy the scheduler's "
                f"cluster.secret to this host, and name it with {called('secret_file')}"
            )
        self._next_s = self._clock()
        if was_joined or self._num_in_round >= in_all:  # a round is over
            self._num_in_round = 0
            self._next_s += self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, LAST_BACKOFF_S)

    # ---- the mailbox's events

    def on_opened(self, conn: str) -> None:
        if conn == self.conn:
            self.state, self._asked_s = "asking", self._clock()
            self._lines.send(conn, self._join)

    def on_closed(self, conn: str, reason: str) -> None:
        if conn != self.conn:
            return
        if reason in REFUSALS:
            raise ConfigError(
                f"{called('join')} {self.shown_address}: the scheduler there has a secret that differs from this "
                f"worker's {called('secret_file')}; copy its cluster.secret to this host"
            )
        self.fail(reason)

    def on_answer(self, conn: str, problem: str, is_elsewhere: bool = False) -> None:
        if conn != self.conn:
            return
        if is_elsewhere:
            self._lines.disconnect(conn)
            # schedulers are alive, but none admits workers now; the worker keeps serving until one does
            if self._was_joined:
                self._deadline_s = self._clock() + self._timeouts.join_timeout_s
            self.fail(problem)
            return
        if problem:
            raise ConfigError(f"{called('join')} {self.shown_address}: the scheduler refuses this worker: {problem}")
        if self.state != "joined":
            log.info("registered with the scheduler at %s", self.shown_address)
        self.state, self._was_joined = "joined", True
        self._logged.clear()
        self._num_cut, self._backoff_s = 0, FIRST_BACKOFF_S

    def tick(self) -> None:
        """Keeps the deadlines."""
        now_s = self._clock()
        if self.state == "asking" and now_s - self._asked_s > self._timeouts.connect_timeout_s:
            self._lines.disconnect(self.conn)
            self.fail(f"no answer to Join within {self._timeouts.connect_timeout_s:g} s")
        if self.state != "joined" and now_s > self._deadline_s:
            raise ConfigError(
                f"{called('join')}: no scheduler has admitted this worker within {called('join_timeout')} "
                f"{self._timeouts.join_timeout_s:g}; the last attempt: {self._reason}"
            )


class JoinMailbox:
    """Drives a worker's `WorkerJoining` over a mailbox. Must be created on its event loop. `name` and `epoch`: the
    worker's.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        join: wire.Join,
        name: str,
        epoch: int,
        credentials: Credentials,
        timeouts: Timeouts,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        own = msgspec.structs.replace(credentials, key=join_key(credentials.secret))
        self._mailbox = Mailbox(Life(name, epoch), "worker", own, timeouts)
        self._joining = WorkerJoining(addresses, credentials.schedulers, join, self._mailbox, timeouts)
        self._events: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
        self._answered = asyncio.Event()

    async def run(self) -> None:
        """Registers the worker, also after each loss, until cancelled. Raises ConfigError for a permanent refusal."""
        self._mailbox.start(self)
        while True:
            if self._joining.is_due:
                await self._connect()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    event = await self._events.get()
                event()
            self._joining.tick()

    async def leave(self) -> None:
        """Ends the registration, so that the scheduler forgets the worker at once, not only after a silence."""
        if self._joining.state == "joined":
            self._answered.clear()
            self._mailbox.send(self._joining.conn, wire.Leave())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._answered.wait()
        self._mailbox.close()

    async def _connect(self) -> None:
        host, _ = self._joining.address
        try:
            self._joining.connect(*await asyncio.to_thread(resolve_hosts, host, "host {!r}"))
        except ConfigError as error:
            self._joining.fail(str(error))

    # ---- the mailbox's thread

    def on_opened(self, conn: str, peer: str, kind: str) -> None:
        self._put(lambda: self._joining.on_opened(conn))

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None:
        if isinstance(body, wire.JoinAnswer):
            self._put(lambda: self._joining.on_answer(conn, body.problem, body.is_elsewhere))
            self._loop.call_soon_threadsafe(self._answered.set)

    def on_closed(self, conn: str, peer: str, reason: str) -> None:
        self._put(lambda: self._joining.on_closed(conn, reason))

    def on_fatal(self, error: BaseException) -> None:
        def fail() -> None:
            raise error

        self._put(fail)

    def load(self) -> wire.Load | None:
        return None

    def _put(self, event: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
