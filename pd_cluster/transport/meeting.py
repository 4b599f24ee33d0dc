"""Lets the ranks of a process group meet: each end has a torch store, whose keys the ends exchange over connections.

No socket listens here. The connections prove each key's sender, so a group forms only between the intended workers. The
library (gloo, NCCL or HCCL) defines the keys.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, Store

log = logging.getLogger(__name__)

MAX_KEYS = 64  # keys that each other end may set; a pair needs one or two
POLL_S = 1e-3  # between checks for new keys; the library's stores cannot wait for keys of unknown names


class Meeting:
    """One end's store. `post(key, value)` sends a key to the other ends; any thread may call it."""

    def __init__(
        self,
        timeout_s: float,
        post: Callable[[str, bytes], None],
        num_others: int = 1,
        store: Store | None = None,
    ) -> None:
        """`timeout_s`: how long the library waits for a key of another end. `store` None: a store in memory."""
        self.store = HashStore() if store is None else store
        self.store.set_timeout(timedelta(seconds=timeout_s))
        self._post, self._most = post, MAX_KEYS * num_others
        self._lock = threading.Lock()
        self._own: set[str] = set()  # keys that have been sent
        self._theirs: set[str] = set()

    def put(self, key: str, value: bytes) -> None:
        """Stores another end's key; any thread may call this. Drops keys that the other end must not set."""
        with self._lock:
            if key not in self._theirs:
                if len(self._theirs) == self._most:
                    log.warning("another end sets more than %d keys: dropped %.80r", self._most, key)
                    return
                if self.store.check([key]):
                    log.warning("another end sets a key that this end has set: dropped %.80r", key)
                    return
                self._theirs.add(key)
            self.store.set(key, value)  # type: ignore[arg-type]  # torch also accepts bytes

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Sends each key that the library writes inside the context; sends the last ones when the context ends."""
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
