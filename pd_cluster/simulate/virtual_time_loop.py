"""An event loop whose clock jumps to the next timer, so waiting takes no real time. Has no sockets and no threads."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

RESOLUTION_S = 1e-9  # timers this close fire together; any cost is far larger


class VirtualClock:
    """The time of a loop. `now_s` is a plain attribute, because a simulation reads it more often than anything else."""

    def __init__(self) -> None:
        self.now_s = 0.0


class _JumpingSelector(selectors.BaseSelector):
    """Watches only the loop's wake-up pipe, and advances the clock by the requested wait."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[fileobj] = key = selectors.SelectorKey(fileobj, fd, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advances the clock. Raises RuntimeError if no timer is set, because a simulation has no other events."""
        if timeout is None:
            raise RuntimeError("the simulation stands still: every task waits, and no timer is set")
        self._clock.now_s += timeout
        return []

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return self._keys


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that starts at 0 s. The times and the order of events are deterministic."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        super().__init__(_JumpingSelector(self.clock))
        self._clock_resolution = RESOLUTION_S

    def time(self) -> float:
        return self.clock.now_s

    def jump(self, when_s: float) -> bool:
        """Moves the clock to this time. Returns False if something else is due earlier."""
        if self._ready or (self._scheduled and self._scheduled[0].when() <= when_s):  # type: ignore[attr-defined]
            return False
        self.clock.now_s = max(self.clock.now_s, when_s)
        return True
