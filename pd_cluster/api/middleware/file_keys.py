"""The protocols of the keys of --api-key-file; the extra `key_file` implements them. Knows neither files nor routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from pd_cluster import extra_table
from pd_cluster.cluster.tenancy.tenant_counts import TenantCounts
from pd_cluster.errors import called
from pd_cluster.process_messages import ApiKey, Keys
from pd_cluster.service.callers.usage_meter import Account


class KnownKey(NamedTuple):
    key: ApiKey
    account: Account | None  # None: no limits


class FileKeys(Protocol):
    """The keys in force at the public port."""

    def replace(self, keys: Keys) -> None:
        """Replaces all keys; admitted requests continue."""

    def find(self, key: bytes) -> KnownKey | None:
        """Returns the key's entry, if it is known. Raises Unauthorized for an expired one."""

    def has_tenant(self, name: str) -> bool:
        """Whether a key of this tenant is in effect."""

    def validity(self, key: bytes) -> Callable[[], bool] | None:
        """Returns a function that says whether the key is still valid, without storing the key; None if it is unknown.

        Raises Unauthorized for an expired key.
        """


class KeySource(Protocol):
    """The scheduler's keys. `rates_fd`: the memory of their limits, which all its processes share."""

    keys: Keys

    @property
    def rates_fd(self) -> int: ...

    def reload(self) -> Keys:
        """Reads the keys again; returns the keys in force from now on.

        Raises ConfigError without changing anything, and Unavailable if not all keys could be changed.
        """

    def at_port(self, counts: TenantCounts) -> FileKeys:
        """Returns the keys for a public port of this process. `counts` receives the tenants that have names."""


def file_keys(keys: Keys, rates_fd: int, counts: TenantCounts) -> FileKeys:
    """Returns the keys for the public port of another process than the scheduler's. Raises MissingExtra."""
    found: FileKeys = extra_table.load(extra_table.KEY_TABLE, called("api_key_file"))(keys, rates_fd, counts)
    return found
