"""Keeps the scheduler's API keys: reads --api-key-file, assigns each key a record of its limits, and reloads the file.

A faulty file changes nothing. Knows nothing of where keys are checked or requests counted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from pd_cluster.cluster.tenancy.tenant_counts import TenantCounts, with_names
from pd_cluster.errors import ConfigError
from pd_cluster.extras.key_file.key_file import KeyFile, digest_of, read_key_file
from pd_cluster.extras.key_file.key_table import KeyTable
from pd_cluster.extras.key_file.shared_rate_limits import MAX_KEYS, SharedRateLimits, tag_of
from pd_cluster.process_messages import Keys
from pd_cluster.settings.http_settings import HttpConfig

log = logging.getLogger(__name__)


class KeyStore:
    """`served`: the names by which clients may request the model and its adapters; `may_grow`: adapters may be added
    later.

    Raises ConfigError for a faulty file.
    """

    def __init__(
        self,
        http: HttpConfig,
        served: Sequence[str],
        memory: SharedRateLimits | None = None,
        may_grow: bool = False,
        may_limit: bool = True,
    ) -> None:
        """`may_limit`: whether keys may have limits; a limit covers all processes of one scheduler together."""
        self._http = http
        self._may_limit = may_limit
        self._served, self._may_grow = served, may_grow
        self.memory = memory or SharedRateLimits.create()
        self._slots: dict[str, int] = {}  # digest -> record
        self.keys = Keys("", [], [], with_names([], http.tenants))
        self.reload()

    @property
    def rates_fd(self) -> int:
        return self.memory.fd

    def at_port(self, counts: TenantCounts) -> KeyTable:
        return KeyTable(self.keys, self.memory, counts)

    def reload(self) -> Keys:
        """Reads the file again; returns the keys in force from now on.

        Raises ConfigError without changing anything, and Unavailable as SharedRateLimits does.
        """
        file = Path(self._http.key_file)
        try:
            found = read_key_file(file)
            self._refuse_others_keys(file, found)
            self._refuse_limits(file, found)
        except ConfigError as error:
            raise ConfigError(f"--api-key-file {error}") from None
        if not self._may_grow:
            self._warn_of_models(file, found)
        wanted = {key.digest for key in found.keys}
        for digest in [digest for digest in self._slots if digest not in wanted]:
            self.memory.clear(self._slots[digest])  # running requests of that key find their record missing
            del self._slots[digest]
        taken = {*self._slots.values()}
        free = (slot for slot in range(MAX_KEYS) if slot not in taken)
        for key in found.keys:
            slot = self._slots[key.digest] if key.digest in self._slots else next(free)
            self.memory.set_limits(slot, tag_of(key.digest), key.requests_per_minute, key.tokens_per_minute)
            self._slots[key.digest] = slot
        tenants = with_names(self.keys.tenants, (key.tenant for key in found.keys))
        self.keys = Keys(found.salt, list(found.keys), [self._slots[key.digest] for key in found.keys], tenants)
        return self.keys

    def _refuse_limits(self, file: Path, found: KeyFile) -> None:
        limited = [key.id for key in found.keys if key.requests_per_minute or key.tokens_per_minute]
        if limited and not self._may_limit:
            raise ConfigError(
                f"{file}: id {limited[0]!r} has limits, which each of several schedulers would count separately; "
                f"leave them out, or start one scheduler"
            )

    def _refuse_others_keys(self, file: Path, found: KeyFile) -> None:
        ids = {key.digest: key.id for key in found.keys}
        others = [("--metrics-key", self._http.metrics_key), *(("--api-key", key) for key in self._http.api_keys)]
        for flag, key in others:
            if key and (known := ids.get(digest_of(found.salt, key.encode()))) is not None:
                raise ConfigError(f"{file}: id {known!r}: {flag} also has this key; remove one of the two")

    def _warn_of_models(self, file: Path, found: KeyFile) -> None:
        for key in found.keys:
            for name in key.models or ():
                if name not in self._served:
                    log.warning(
                        "--api-key-file %s: id %r: models: %r is not served here; known are %s",
                        file,
                        key.id,
                        name,
                        ", ".join(self._served),
                    )
