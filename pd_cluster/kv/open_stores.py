"""Opens the stores below host memory that a worker's settings name. Imports their libraries only if needed."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pd_cluster.errors import ConfigError
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.prefix_index import KV_VERSION
from pd_cluster.settings.process_settings import HandoverSettings

if TYPE_CHECKING:
    from pd_cluster.kv.block_seal import Seal
    from pd_cluster.kv.disk_store import DiskStore
    from pd_cluster.kv.shared_store import SharedStore

MIN_SECRET_LENGTH = 32


def check_tiers(settings: HandoverSettings, host_cache_gib: float) -> None:
    """Checks the settings of stores, as far as possible before the model is loaded. Raises ConfigError."""
    if settings.kv_disk_cache_size_gib != HandoverSettings().kv_disk_cache_size_gib and not settings.kv_disk_cache:
        raise ConfigError("--kv-disk-cache-size: it has no effect without --kv-disk-cache FOLDER")
    if settings.kv_cache_key_file and not (settings.kv_disk_cache or settings.kv_shared_cache):
        tiers = "--kv-disk-cache or --kv-shared-cache"
        raise ConfigError(f"--kv-cache-key-file: it has no effect without {tiers}")
    asked = {"--kv-disk-cache": settings.kv_disk_cache, "--kv-shared-cache": settings.kv_shared_cache}
    for flag in (flag for flag, value in asked.items() if value):
        if not host_cache_gib:
            raise ConfigError(f"{flag}: blocks pass through host memory; add --kv-host-cache GIB")
        extra, modules = ("disk-cache", ["cryptography"])
        if flag == "--kv-shared-cache":
            extra, modules = "shared-cache", ["cryptography", "redis"]
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(f"{flag}: {missing[0]} is not installed; pip install 'pd-cluster[{extra}]'")
    url = settings.kv_shared_cache
    if url and not url.startswith(("redis://", "rediss://", "unix://")):
        kinds = "redis://, rediss:// or unix://"
        raise ConfigError(f"--kv-shared-cache: expected {kinds}; other stores, such as S3, are not supported")
    if settings.kv_cache_key_file:
        read_secrets(settings.kv_cache_key_file)


def read_secrets(file: str) -> list[bytes]:
    """Returns the secrets in a file, one per line. The first seals; the others only open. Raises ConfigError."""
    try:
        mode = os.stat(file).st_mode
        lines = Path(file).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--kv-cache-key-file {file}: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"--kv-cache-key-file {file}: other users may read it; chmod 600")
    secrets = [line.strip() for line in lines if line.strip()]
    if not secrets or min(map(len, secrets)) < MIN_SECRET_LENGTH:
        raise ConfigError(
            f"--kv-cache-key-file {file}: expected secrets of {MIN_SECRET_LENGTH} characters or more, one a line, as "
            "`openssl rand -hex 32` makes them"
        )
    return secrets


def seal_of(secrets: Sequence[bytes], layout: KVLayout, origin: Sequence[str]) -> Seal:
    """Returns a Seal. `origin` identifies everything besides a block's hash that determines the block's bits."""
    from pd_cluster.kv.block_seal import Seal

    parts = layout.to_info(), KV_VERSION, list(origin)
    scope = hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).digest()
    return Seal(secrets, scope, layout.block_nbytes)


def open_disk(settings: HandoverSettings, name: str, seal: Seal, rank: int) -> DiskStore:
    from pd_cluster.kv.disk_store import DiskStore

    return DiskStore(Path(settings.kv_disk_cache).absolute(), f"{name}/rank-{rank}", seal)


def open_shared(settings: HandoverSettings, seal: Seal) -> SharedStore:
    from pd_cluster.kv.shared_store import SharedStore

    return SharedStore(settings.kv_shared_cache, seal)
