"""Loads and unloads adapters at the workers while requests run, and maps their names.

The states are in docs/protocol/membership.md. Everything runs on the event loop except reading folders.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple, Protocol

from pd_cluster import wire
from pd_cluster.checkpoints.prompt_adapter_folder import AdapterFolder, read_adapter
from pd_cluster.cluster.members.worker_membership import Membership
from pd_cluster.errors import ConfigError, ModelNotFound, RequestError, told
from pd_cluster.settings.lora_settings import AdapterSettings, lora_module

log = logging.getLogger(__name__)

TICK_S = 0.2
GRACE_S = 1.0  # an adapter is removed this long after its last request, because others may be about to be routed
RETRY_S = 5.0  # the time until a worker that could not load an adapter tries again
LOAD_TIMEOUT_S = 300.0  # the limit for all workers together


class AdapterUsers(Protocol):
    """The processes that serve requests."""

    def adapters_in_use(self) -> Collection[str]:
        """Returns the digests of adapters that running requests use."""

    async def publish_adapters(self, names: dict[str, str]) -> None:
        """Sends name -> digest to every process; returns when all have it."""


class AdapterRules(NamedTuple):
    """`root`: the folder below which adapters may be loaded. `model_names`: the names of the model itself."""

    settings: AdapterSettings
    root: str
    model_names: Collection[str]
    drain_timeout_s: float


class AdapterBook:
    """The loaded adapters. `names`: name -> digest of the adapters that requests may use now; mutated in place."""

    def __init__(
        self,
        membership: Membership,
        users: AdapterUsers,
        names: dict[str, str],
        rules: AdapterRules,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership, self._users, self._rules, self._clock = membership, users, rules, clock
        self._root = Path(rules.root).resolve()
        self.names = names
        paths = rules.settings.paths
        # digest -> folder of every adapter that workers must load
        self._paths = {digest: paths[name] for name, digest in names.items()}
        self._leaving: dict[str, tuple[float, float]] = {}  # digest -> (deadline, when it was last used)
        self._one_at_a_time = asyncio.Lock()
        self._retry_s = 0.0
        self._send_list()

    async def load(self, name: str, path: str, replaces: bool = False) -> None:
        """Loads an adapter at all workers; returns when requests may use it under this name.

        Raises RequestError for an adapter that cannot be loaded, ModelNotFound if nothing is at the path.
        """
        async with self._one_at_a_time:
            self._check(name, replaces)
            folder = await asyncio.to_thread(self._read, name, path)
            digest, before = folder.digest, self.names.get(name)
            is_new = digest not in self._paths
            self._leaving.pop(digest, None)
            if is_new:
                self._paths[digest] = str(folder.path)
                self._send_list()
            try:
                await self._until_loaded(digest)
            except BaseException:
                if digest not in self.names.values():
                    self._paths.pop(digest, None)
                    self._send_list()
                raise
            self.names[name] = digest
            log.info("adapter %s is %s of %s", name, digest[:12], folder.path)
            if before is not None:
                self._leave(before)
            await self._users.publish_adapters(self.names)

    async def unload(self, name: str) -> None:
        """Returns when new requests can no longer use the adapter; running requests finish with it. Raises
        ModelNotFound.
        """
        if name not in self.names:
            raise ModelNotFound(
                f"lora_name: there is no adapter {name[:128]!r}; loaded are {', '.join(self.names) or 'none'}",
                param="lora_name",
            )
        self._leave(self.names.pop(name))
        log.info("adapter %s is no longer available", name)
        await self._users.publish_adapters(self.names)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        """Removes adapters that no request uses any more, and lets workers retry failed loads."""
        now_s = self._clock()
        if self._leaving:
            used = self._users.adapters_in_use()
            for digest, (deadline_s, used_s) in list(self._leaving.items()):
                if digest in used:
                    self._leaving[digest] = deadline_s, now_s
                if now_s >= deadline_s or (digest not in used and now_s >= used_s + GRACE_S):
                    del self._leaving[digest], self._paths[digest]
                    self._send_list()
        if now_s >= self._retry_s:
            self._retry_s = now_s + RETRY_S
            if any(each.adapter_problems for each in self._membership.instances):
                self._send_list()

    # ---- one load

    def _check(self, name: str, replaces: bool) -> None:
        """Raises RequestError if the name cannot be used."""
        try:
            lora_module("lora_name", name, "/")
        except ConfigError as error:
            raise RequestError(told(error.text, str), "lora_name") from None
        if name in self._rules.model_names:
            raise RequestError(f"lora_name: {name} is the name of the model itself; use another name", "lora_name")
        if name in self.names and not replaces:
            raise RequestError(
                f"lora_name: {name} is already loaded; unload it first, or send load_inplace true", "lora_name"
            )

    def _read(self, name: str, path: str) -> AdapterFolder:
        """Returns the adapter in a folder. Raises RequestError, ModelNotFound."""
        given = Path(path)
        try:
            folder = (given if given.is_absolute() else self._root / given).resolve()
            is_there = folder.is_dir()  # raises for names that no file system accepts
        except (OSError, ValueError, RuntimeError):
            raise RequestError("lora_path: is not a valid path", param="lora_path") from None
        if not folder.is_relative_to(self._root):
            raise RequestError(f"lora_path: {path[:256]!r} is not below --lora-root {self._root}", param="lora_path")
        if not is_there:
            raise ModelNotFound(f"lora_path: there is no folder {str(folder)[:512]}", param="lora_path")
        try:
            settings = self._rules.settings
            return read_adapter(folder, settings.max_lora_rank, settings.max_prompt_adapter_token)
        except ConfigError as error:
            raise RequestError(f"lora_path: {told(error.text)}", "lora_path") from None

    async def _until_loaded(self, digest: str) -> None:
        """Waits until all connected workers have the adapter. Raises RequestError with a worker's reason."""
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                while True:
                    lacking = [i for i in self._membership.instances if i.is_ready and digest not in i.adapters]
                    for instance in lacking:
                        if digest in instance.adapter_problems:
                            raise RequestError(
                                f"lora_path: {instance.name}: {instance.adapter_problems[digest]}", param="lora_path"
                            )
                    if not lacking:
                        return
                    await self._membership.change()
        except TimeoutError:
            names = ", ".join(instance.name for instance in lacking)
            raise RequestError(
                f"lora_path: {names} did not load it within {LOAD_TIMEOUT_S:g} s", param="lora_path"
            ) from None

    def _leave(self, digest: str) -> None:
        if digest not in self.names.values():
            now_s = self._clock()
            self._leaving[digest] = now_s + self._rules.drain_timeout_s, now_s

    def _send_list(self) -> None:
        places = [wire.AdapterLocation(digest, path) for digest, path in self._paths.items()]
        self._membership.send_adapters(wire.WantedAdapters(places))
