"""Executes rank 0's commands for one tier below host memory on a separate thread, so that no step waits for them.

Queued reads are executed before queued writes. Knows nothing of requests or of which blocks are worth keeping.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from pd_cluster.devices.device_streams import Marker
from pd_cluster.errors import PdClusterError
from pd_cluster.kv.tier_commands import UNKNOWN, AnyTierCommand, Clear, Discard, Fetch, Look, LowerKind, TierDone, Write

log = logging.getLogger(__name__)

SETTLE_S = 30.0


class TierBusy(PdClusterError):
    """A store has used host memory for longer than SETTLE_S, so the memory cannot be returned to the system."""


class Store(Protocol):
    """One rank's blocks outside the process. A fault of the store counts as a miss.

    Methods raise OSError if they cannot determine the store's content, for example for lack of file descriptors. Then
    the command fails, but no block is lost.
    """

    num_bad: int

    def put(self, content: bytes, block: memoryview) -> bool: ...

    def num_leading(self, contents: list[bytes]) -> int: ...

    def get_leading(self, contents: list[bytes], into: list[memoryview]) -> int: ...

    def discard(self, contents: list[bytes]) -> None: ...

    def clear(self) -> None: ...


class TierThread:
    """One tier's thread. `slot` returns the memory of a slot in host memory. `report` is called on the thread."""

    def __init__(
        self,
        kind: LowerKind,
        rank: int,
        store: Store,
        slot: Callable[[int], memoryview],
        report: Callable[[TierDone], None],
    ) -> None:
        self._kind, self._rank, self._store, self._slot, self._report = kind, rank, store, slot, report
        self._reads: deque[tuple[AnyTierCommand, Marker]] = deque()
        self._writes: deque[tuple[AnyTierCommand, Marker]] = deque()
        self._changed = threading.Condition()
        self._uses_slots = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"kv {kind}", daemon=True)
        self._thread.start()

    def submit(self, commands: Sequence[AnyTierCommand], after: Marker) -> None:
        """Queues commands. They may use their slots once the device has reached `after`."""
        with self._changed:
            for command in commands:
                (self._reads if isinstance(command, (Fetch, Look)) else self._writes).append((command, after))
            self._changed.notify_all()

    def settle(self) -> None:
        """Drops queued jobs, reports them as not tried, and waits for the job under way, so that no slot is in use.

        Queued commands to discard blocks are kept. Raises TierBusy.
        """
        with self._changed:
            dropped = [command for command, _ in (*self._reads, *self._writes)]
            discards = [each for each in self._writes if isinstance(each[0], (Discard, Clear))]
            self._reads.clear()
            self._writes = deque(discards)
            is_idle = self._changed.wait_for(lambda: not self._uses_slots, SETTLE_S)
        for command in dropped:
            self._tell(command, UNKNOWN)
        if not is_idle:
            raise TierBusy(f"the {self._kind} tier of KV blocks has not answered for {SETTLE_S:g} s")

    def close(self, timeout_s: float) -> None:
        """Ends the thread once its queue is empty. Waits for that at most `timeout_s`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._uses_slots = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._reads or self._writes or self._is_closed)
                if not (queue := self._reads or self._writes):
                    return
                command, after = queue.popleft()
                self._uses_slots = isinstance(command, (Write, Fetch))
            num = UNKNOWN
            try:
                after.wait()
                num = self._do(command)
            except Exception:  # the top of this thread: the command fails, but the next one may succeed
                log.exception("a command for the %s tier failed", self._kind)
            self._tell(command, num)

    def _tell(self, command: AnyTierCommand, num: int) -> None:
        if not isinstance(command, (Write, Fetch, Look)):
            return
        try:
            self._report(TierDone(self._kind, command.job, self._rank, num, self._store.num_bad))
        except Exception:  # the thread must continue; otherwise a slot would count as in use forever
            log.exception("a report of the %s tier was lost", self._kind)

    def _do(self, command: AnyTierCommand) -> int:
        match command:
            case Write(content=content, slot=slot):
                return int(self._store.put(content, self._slot(slot)))
            case Fetch(contents=contents, slots=slots):
                return self._store.get_leading(contents, [self._slot(slot) for slot in slots])
            case Look(contents=contents):
                return self._store.num_leading(contents)
            case Discard(contents=contents):
                self._store.discard(contents)
            case Clear():
                self._store.clear()
        return 0
