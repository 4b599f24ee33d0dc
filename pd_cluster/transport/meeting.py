"""Lets the ranks of a group meet, mostly of a pair: a torch store at each end, whose keys travel over connections.

Nothing listens here. A connection proves the sender of each key, so a group comes up between the workers that it is for
or not at all. The library defines the keys: gloo, NCCL or HCCL.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, Store

log = logging.getLogger(__name__)

MAX_KEYS = 64  # set by another end; a pair needs one or two
POLL_S = 1e-3  # between two checks for keys that the library has written: its stores cannot be waited for as a whole


class Meeting:
    """One end's store. `post(key, value)` sends one key to the other ends, from any thread."""

    def __init__(
        self,
        timeout_s: float,
        post: Callable[[str, bytes], None],
        num_others: int = 1,
        store: Store | None = None,
    ) -> None:
        """`timeout_s`: how long the library waits for a key of another end. `store` None: one in memory."""
        self.store = HashStore() if store is None else store
        self.store.set_timeout(timedelta(seconds=timeout_s))
        self._post, self._most = post, MAX_KEYS * num_others
        self._lock = threading.Lock()
        self._own: set[str] = set()  # keys that have been sent
        self._theirs: set[str] = set()

    def put(self, key: str, value: bytes) -> None:
        """Stores a key of another end, on any thread; drops keys that it may not set."""
        with self._lock:
            if key not in self._theirs:
                if len(self._theirs) == self._most:
                    log.warning("another end sets more than %d keys: %.80r is dropped", self._most, key)
                    return
                if self.store.check([key]):
                    log.warning("another end sets %.80r, which this end has set: dropped", key)
                    return
                self._theirs.add(key)
            self.store.set(key, value)  # type: ignore[arg-type]  # torch takes bytes, too

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Sends the keys that the library writes meanwhile, each once, the last ones before this returns."""
        is_over = threading.Event()
        courier = threading.Thread(target=self._carry, args=(is_over,), name="kv-meeting", daemon=True)
        courier.start()
        try:
            yield
        finally:
            is_over.set()
            courier.join()
            self._send_new()

    def _carry(self, is_over: threading.Event) -> None:
        while not is_over.is_set():
            self._send_new()
            is_over.wait(POLL_S)

    def _send_new(self) -> None:
        with self._lock:
            new = sorted(set(self.store.list_keys()) - self._own - self._theirs)
            self._own.update(new)
            values = [(key, self.store.get(key)) for key in new]
        for key, value in values:
            self._post(key, value)
