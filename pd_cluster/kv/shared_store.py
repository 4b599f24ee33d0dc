"""Sealed blocks in a store that several hosts share, over the Redis protocol (Valkey, Redis), with its client library.

The store is not trusted and may fail to answer: each call has a deadline, and after several failures in a row no calls
are made for a while. The store itself decides which blocks it drops (`maxmemory-policy allkeys-lru`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import redis

from pd_cluster.errors import ConfigError
from pd_cluster.kv.block_seal import Seal

log = logging.getLogger(__name__)

T = TypeVar("T")
PREFIX = "pd-cluster:kv:"
CALL_TIMEOUT_S = 0.5  # the time limit to connect, and for each answer
FAILURES = 3  # failures in a row that open the breaker
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0
GET_BLOCKS = 4  # blocks per call; the whole answer is in memory at once
CLEAR_KEYS = 1000  # keys per call


class Breaker:
    """Stops calls after FAILURES failures in a row. Each further failure doubles the time until the next try."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._until_s = float("-inf")

    @property
    def is_open(self) -> bool:
        return self._clock() < self._until_s

    def succeeded(self) -> None:
        self._num_failures, self._pause_s = 0, FIRST_PAUSE_S

    def failed(self) -> bool:
        """Records a failure. Returns whether it has opened the breaker."""
        self._num_failures += 1
        if self._num_failures < FAILURES:
            return False
        self._until_s = self._clock() + self._pause_s
        self._pause_s = min(MOST_PAUSE_S, 2 * self._pause_s)
        return True


class SharedStore:
    """One rank's share of the blocks that all instances with this layout use.

    `num_bad` counts values with wrong content.
    """

    def __init__(self, url: str, seal: Seal, breaker: Breaker | None = None) -> None:
        """Connects on first use. Raises ConfigError for an invalid address."""
        self._seal = seal
        self.breaker = breaker or Breaker()
        self.num_bad = 0
        waits = {"socket_timeout": CALL_TIMEOUT_S, "socket_connect_timeout": CALL_TIMEOUT_S}
        try:
            self._client = redis.Redis.from_url(url, **waits, retry=None, single_connection_client=False)
        except ValueError:  # the error's text may contain parts of a password
            told = "not a Redis URL; escape special characters in the password"
            raise ConfigError(f"--kv-shared-cache: {told}") from None

    def put(self, content: bytes, block: memoryview) -> bool:
        key = self._keys(content)[0]
        if self._try(lambda: self._client.exists(key), 0):
            return True
        if self.breaker.is_open:
            return False
        sealed = bytes(self._seal.seal(content, block))
        return bool(self._try(lambda: self._client.set(key, sealed), False))

    def num_leading(self, contents: list[bytes]) -> int:
        """Returns how many of the first contents are in the store, under any secret; 0 if it does not answer."""
        names = [self._keys(content) for content in contents]

        def ask() -> list[int]:
            with self._client.pipeline(transaction=False) as pipeline:
                for keys in names:
                    pipeline.exists(*keys)
                return [int(each) for each in pipeline.execute()]

        none: list[int] = []
        found = self._try(ask, none)
        return next((at for at, count in enumerate(found) if not count), len(found))

    def get_leading(self, contents: list[bytes], into: list[memoryview]) -> int:
        """Reads blocks in order, up to the first that is unavailable. Returns how many it has read."""
        for start in range(0, len(contents), GET_BLOCKS):
            some = contents[start : start + GET_BLOCKS]
            keys = [self._keys(content) for content in some]
            none: list[bytes | None] = []
            values = self._try(partial(self._client.mget, [key for own in keys for key in own]), none)
            if not values:
                return start
            for at, content in enumerate(some):
                own = values[at * len(keys[at]) : (at + 1) * len(keys[at])]
                if not self._open(content, keys[at], own, into[start + at]):
                    return start + at
        return len(contents)

    def _open(self, content: bytes, keys: Sequence[str], values: Sequence[bytes | None], into: memoryview) -> bool:
        for name, key, value in zip(self._seal.names(content), keys, values, strict=True):
            if value is None:
                continue
            if self._seal.open(content, name, value, into):
                return True
            self.num_bad += 1
            log.warning("a block in the shared store does not have the content that was written; it is removed")
            self._try(partial(self._client.delete, key), 0)
        return False

    def discard(self, contents: list[bytes]) -> None:
        keys = [key for content in contents for key in self._keys(content)]
        self._try(lambda: self._client.delete(*keys), 0)

    def clear(self) -> None:
        """Removes all blocks of all instances that use the store. Other programs' entries remain."""

        def ask() -> int:
            keys = list(islice(found, CLEAR_KEYS))
            return len(keys) if not keys or self._client.unlink(*keys) is not None else 0

        found = self._client.scan_iter(match=f"{PREFIX}*", count=CLEAR_KEYS)
        while self._try(ask, 0):
            pass

    def _keys(self, content: bytes) -> list[str]:
        return [PREFIX + name for name in self._seal.names(content)]

    def _try(self, call: Callable[[], Any], otherwise: T) -> T:
        """Returns the answer of a call, or `otherwise` if the store does not answer in time or calls are stopped."""
        if self.breaker.is_open:
            return otherwise
        try:
            answer: T = call()
        except (redis.RedisError, OSError) as error:
            if self.breaker.failed():
                log.warning("the shared store does not answer; calls pause for a while: %s", type(error).__name__)
            return otherwise
        self.breaker.succeeded()
        return answer
