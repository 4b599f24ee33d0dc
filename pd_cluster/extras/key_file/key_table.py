"""The keys of --api-key-file at the public port. Finding a key's owner takes one hash and one lookup.

The scheduler reads the file (key_store.py) and passes on its content. Knows nothing of files or routes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pd_cluster.api.middleware.file_keys import KnownKey
from pd_cluster.cluster.tenancy.tenant_counts import TenantCounts
from pd_cluster.cluster.tenancy.token_buckets import KeyBuckets
from pd_cluster.errors import Unauthorized, Unavailable
from pd_cluster.extras.key_file.key_file import digest_of
from pd_cluster.extras.key_file.shared_rate_limits import SharedRateLimits, tag_of
from pd_cluster.process_messages import Keys


@dataclass(frozen=True, slots=True)
class SharedAccount:
    """Access to a key's limits in shared memory. `key_id` is the key's public name."""

    memory: SharedRateLimits
    slot: int
    tag: int
    key_id: str

    def take(self, num_requests: int, num_tokens: int) -> tuple[bool, KeyBuckets]:
        """Takes requests and tokens from the limits. Raises Unauthorized when the key is gone, or Unavailable."""
        found = self.memory.take(self.slot, self.tag, num_requests, num_tokens)
        if found is None:
            raise Unauthorized("the API key was removed", code="invalid_api_key")
        return found

    def give_back(self, num_tokens: int) -> KeyBuckets | None:
        try:
            return self.memory.give_back(self.slot, self.tag, num_tokens)
        except Unavailable:
            return None


class KeyTable:
    """The current keys. `counts` receives the tenants that have names. `clock` returns Unix time."""

    def __init__(
        self, keys: Keys, memory: SharedRateLimits, counts: TenantCounts, clock: Callable[[], float] = time.time
    ) -> None:
        self._memory = memory
        self._counts = counts
        self._clock = clock
        self.replace(keys)

    def replace(self, keys: Keys) -> None:
        known = {}
        for key, slot in zip(keys.keys, keys.slots, strict=True):
            account = SharedAccount(self._memory, slot, tag_of(key.digest), key.id) if key.is_limited else None
            known[key.digest] = KnownKey(key, account)
        self._salt, self._known = keys.salt, known
        self._counts.named = frozenset(keys.tenants)

    def find(self, key: bytes) -> KnownKey | None:
        found = self._known.get(digest_of(self._salt, key))
        if found is not None and self._has_expired(found):
            raise Unauthorized(f"the API key {found.key.id!r} has expired", code="invalid_api_key")
        return found

    def has_tenant(self, name: str) -> bool:
        return any(known.key.tenant == name and not self._has_expired(known) for known in self._known.values())

    def validity(self, key: bytes) -> Callable[[], bool] | None:
        if self.find(key) is None:
            return None
        digest = digest_of(self._salt, key)

        def is_valid() -> bool:
            found = self._known.get(digest)
            return found is not None and not self._has_expired(found)

        return is_valid

    def _has_expired(self, known: KnownKey) -> bool:
        return known.key.expires_s is not None and known.key.expires_s <= self._clock()


def key_table(keys: Keys, rates_fd: int, counts: TenantCounts) -> KeyTable:
    """Returns the keys in a process that shares the limits with the scheduler."""
    return KeyTable(keys, SharedRateLimits(rates_fd), counts)
