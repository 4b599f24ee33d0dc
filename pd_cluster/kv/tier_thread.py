"""Carries out rank 0's orders for one tier below host memory, on a thread of its own: no step waits for it.

Reads come before writes. Knows nothing of requests, or of which blocks are worth keeping.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from pd_cluster.devices.streams import Marker
from pd_cluster.kv.tier_orders import AnyOrder, Clear, Discard, Fetch, Look, LowerKind, TierDone, Write

log = logging.getLogger(__name__)


class Store(Protocol):
    """One rank's blocks outside the process. No method raises for a fault of the store: it is a miss."""

    num_bad: int

    def put(self, content: bytes, block: memoryview) -> bool: ...

    def num_leading(self, contents: list[bytes]) -> int: ...

    def get_leading(self, contents: list[bytes], into: list[memoryview]) -> int: ...

    def discard(self, contents: list[bytes]) -> None: ...

    def clear(self) -> None: ...


class TierThread:
    """`slot` returns the memory of a slot of host memory. `report` is called on the thread."""

    def __init__(
        self,
        kind: LowerKind,
        rank: int,
        store: Store,
        slot: Callable[[int], memoryview],
        report: Callable[[TierDone], None],
    ) -> None:
        self._kind, self._rank, self._store, self._slot, self._report = kind, rank, store, slot, report
        self._reads: deque[tuple[AnyOrder, Marker]] = deque()
        self._writes: deque[tuple[AnyOrder, Marker]] = deque()
        self._changed = threading.Condition()
        self._is_busy = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"kv {kind}", daemon=True)
        self._thread.start()

    def submit(self, orders: Sequence[AnyOrder], after: Marker) -> None:
        """Queues orders, which may use their slots once the device has reached `after`."""
        with self._changed:
            for order in orders:
                (self._reads if isinstance(order, (Fetch, Look)) else self._writes).append((order, after))
            self._changed.notify_all()

    def settle(self) -> None:
        """Drops queued orders, reports them as failed, and waits for the one under way: no slot is in use then."""
        with self._changed:
            dropped = [*self._reads, *self._writes]
            self._reads.clear()
            self._writes.clear()
            self._changed.wait_for(lambda: not self._is_busy)
        for order, _ in dropped:
            if isinstance(order, (Write, Fetch, Look)):
                self._report(TierDone(self._kind, order.job, self._rank, 0, self._store.num_bad))
            else:
                self._do(order)

    def close(self, timeout_s: float) -> None:
        """Ends the thread after the queued writes, or in `timeout_s`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._reads or self._writes or self._is_closed)
                if not (queue := self._reads or self._writes):
                    return
                order, after = queue.popleft()
                self._is_busy = True
            after.wait()
            num = 0
            try:
                num = self._do(order)
            except Exception:  # top of this thread: the order fails, and the next one may not
                log.exception("an order for the %s tier failed", self._kind)
            if isinstance(order, (Write, Fetch, Look)):
                self._report(TierDone(self._kind, order.job, self._rank, num, self._store.num_bad))

    def _do(self, order: AnyOrder) -> int:
        match order:
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
