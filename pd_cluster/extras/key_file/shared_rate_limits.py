"""Keeps what is left of every key's limits, in memory that the scheduler and its API processes share.

Each key has a record, guarded by a lock on one byte (fcntl), which the kernel releases when its holder dies. Tokens
that a dead process took return with time: a bucket is full again after a minute. Knows nothing of HTTP; of keys' hashes
it knows only a tag that identifies a record's owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterator

from pd_cluster.cluster.tenancy.token_buckets import Bucket, KeyBuckets
from pd_cluster.errors import Unavailable

MAX_KEYS = 10_000
TAG, REQUESTS_LIMIT, TOKENS_LIMIT, AT_NS, REQUESTS, TOKENS = range(6)  # words of a record
NUM_WORDS = 8
WORD_NBYTES = 8
NOBODY = 0  # the tag of a record without an owner
LOCK_TIMEOUT_S = 1.0  # a lock is held for microseconds, unless its holder stalls
QUICK_TRIES = 50  # the number of tries without pauses in between
PAUSE_S = 0.0002


def tag_of(digest: str) -> int:
    """Returns the tag of a key's record: the first 8 bytes of its hash, never `NOBODY`."""
    return int.from_bytes(bytes.fromhex(digest[: 2 * WORD_NBYTES]), "little", signed=True) or 1


class SharedRateLimits:
    """Limits that all processes of a host share. Only one thread of each process may use it; all processes use the same
    clock.
    """

    def __init__(
        self, fd: int, clock: Callable[[], int] = time.monotonic_ns, lock_timeout_s: float = LOCK_TIMEOUT_S
    ) -> None:
        """`fd` stays open: closing any descriptor of the memory would release all locks that this process holds."""
        self.fd = fd
        self._clock = clock
        self._lock_timeout_s = lock_timeout_s
        self._stuck: set[int] = set()  # records whose lock was not released in time: later requests do not wait
        self._words = memoryview(mmap.mmap(fd, MAX_KEYS * NUM_WORDS * WORD_NBYTES)).cast("q")

    @classmethod
    def create(cls, clock: Callable[[], int] = time.monotonic_ns) -> SharedRateLimits:
        fd = os.memfd_create("pd-cluster-rates", os.MFD_CLOEXEC)
        os.ftruncate(fd, MAX_KEYS * NUM_WORDS * WORD_NBYTES)
        memory = cls(fd, clock)
        weakref.finalize(memory, os.close, fd).atexit = False  # lives as long as the process
        return memory

    def take(self, slot: int, tag: int, num_requests: int = 0, num_tokens: int = 0) -> tuple[bool, KeyBuckets] | None:
        """Takes all requests and tokens, or none; returns whether it took them, and the new buckets. Returns None if
        the record now belongs to another key. Raises Unavailable if the record's lock is held for too long.
        """
        with self._locked(slot):
            now_ns = self._clock()
            found = self._read(slot, tag, now_ns)
            if found is None:
                return None
            is_there = not found.wait_ns(num_requests, num_tokens)
            if is_there:
                found = found.less(num_requests, num_tokens)
                self._write(slot, found, now_ns)
            return is_there, found

    def give_back(self, slot: int, tag: int, num_tokens: int) -> KeyBuckets | None:
        """Gives back unused tokens. Returns the new buckets; None: another key has the record. Raises Unavailable."""
        with self._locked(slot):
            now_ns = self._clock()
            found = self._read(slot, tag, now_ns)
            if found is None:
                return None
            found = found.less(0, -num_tokens)
            self._write(slot, found, now_ns)
            return found

    def set_limits(self, slot: int, tag: int, requests: int, tokens: int) -> None:
        """Sets a key's limits; called by the scheduler. A key that already has the record keeps what is left.

        Raises Unavailable.
        """
        with self._locked(slot):
            now_ns = self._clock()
            known = self._read(slot, tag, now_ns)
            if known is None:
                buckets = KeyBuckets(Bucket.full(requests), Bucket.full(tokens))
            else:
                buckets = KeyBuckets(known.requests.limited(requests), known.tokens.limited(tokens))
            at = slot * NUM_WORDS
            self._words[at + TAG] = NOBODY  # a death between these two lines leaves a record without an owner
            self._words[at + REQUESTS_LIMIT], self._words[at + TOKENS_LIMIT] = requests, tokens
            self._write(slot, buckets, now_ns)
            self._words[at + TAG] = tag

    def clear(self, slot: int) -> None:
        """Takes the record away from its key; called by the scheduler. Raises Unavailable."""
        with self._locked(slot):
            self._words[slot * NUM_WORDS + TAG] = NOBODY

    def _read(self, slot: int, tag: int, now_ns: int) -> KeyBuckets | None:
        """Returns the current buckets."""
        at = slot * NUM_WORDS
        words = self._words
        if words[at + TAG] != tag:
            return None
        found = KeyBuckets(
            Bucket(words[at + REQUESTS_LIMIT], words[at + REQUESTS]),
            Bucket(words[at + TOKENS_LIMIT], words[at + TOKENS]),
        )
        return found.after(now_ns - words[at + AT_NS])

    def _write(self, slot: int, buckets: KeyBuckets, now_ns: int) -> None:
        """Writes the time first: if the process dies between two words, the key loses newly filled tokens, but never
        gains any.
        """
        at = slot * NUM_WORDS
        self._words[at + AT_NS] = now_ns
        self._words[at + REQUESTS] = buckets.requests.units
        self._words[at + TOKENS] = buckets.tokens.units

    @contextlib.contextmanager
    def _locked(self, slot: int) -> Iterator[None]:
        num_tries, until_s = 0, time.monotonic() + self._lock_timeout_s
        while True:
            try:
                fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
                break
            except (BlockingIOError, PermissionError):
                num_tries += 1
                if time.monotonic() > until_s or (slot in self._stuck and num_tries > QUICK_TRIES):
                    self._stuck.add(slot)
                    raise Unavailable("another process of this server has locked this key's limits") from None
                time.sleep(PAUSE_S if num_tries > QUICK_TRIES else 0)
        self._stuck.discard(slot)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, slot)
