"""The keys of --api-key-file at the public port. Finding a key's owner takes one hash and one lookup.

The scheduler reads the file (cluster/tenancy/key_store.py) and passes on its content. Knows nothing of files or routes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from pd_cluster.cluster.tenancy.key_file import digest_of
from pd_cluster.cluster.tenancy.shared_rate_limits import SharedRateLimits, tag_of
from pd_cluster.cluster.tenancy.tenant_counts import TenantCounts
from pd_cluster.errors import Unauthorized
from pd_cluster.process_messages import ApiKey, Keys
from pd_cluster.service.callers.usage_meter import Account


class KnownKey(NamedTuple):
    key: ApiKey
    account: Account | None  # None: no limits


class FileKeys:
    """The current keys. `counts` receives the tenants that have names. `clock` returns Unix time."""

    def __init__(
        self, keys: Keys, memory: SharedRateLimits, counts: TenantCounts, clock: Callable[[], float] = time.time
    ) -> None:
        self._memory = memory
        self._counts = counts
        self._clock = clock
        self.replace(keys)

    def replace(self, keys: Keys) -> None:
        """Replaces all keys; admitted requests continue."""
        known = {}
        for key, slot in zip(keys.keys, keys.slots, strict=True):
            account = Account(self._memory, slot, tag_of(key.digest), key.id) if key.is_limited else None
            known[key.digest] = KnownKey(key, account)
        self._salt, self._known = keys.salt, known
        self._counts.named = frozenset(keys.tenants)

    def find(self, key: bytes) -> KnownKey | None:
        """Returns the key's entry, if it is known. Raises Unauthorized for an expired one."""
        found = self._known.get(digest_of(self._salt, key))
        if found is not None and self._has_expired(found):
            raise Unauthorized(f"the API key {found.key.id!r} has expired", code="invalid_api_key")
        return found

    def has_tenant(self, name: str) -> bool:
        """Whether a key of this tenant is in effect."""
        return any(known.key.tenant == name and not self._has_expired(known) for known in self._known.values())

    def validity(self, key: bytes) -> Callable[[], bool] | None:
        """Returns a function that says whether the key is still valid, without storing the key; None if it is unknown.

        Raises Unauthorized for an expired key.
        """
        if self.find(key) is None:
            return None
        digest = digest_of(self._salt, key)

        def is_valid() -> bool:
            found = self._known.get(digest)
            return found is not None and not self._has_expired(found)

        return is_valid

    def _has_expired(self, known: KnownKey) -> bool:
        return known.key.expires_s is not None and known.key.expires_s <= self._clock()
