"""The adapters of one worker: those that its scheduler wants, loaded beside the steps. The table is in protocol.md.

All but the loading itself is on the engine's thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from pd_cluster import wire
from pd_cluster.checkpoints.prompt_folder import AdapterFolder, read_adapter
from pd_cluster.engine.handover.events import AdapterLoaded
from pd_cluster.errors import PdClusterError, told
from pd_cluster.settings.adapters import AdapterSettings

log = logging.getLogger(__name__)


class Keeper(Protocol):
    """The model's adapters: HeldAdapters, or those of all ranks together."""

    @property
    def variants(self) -> Mapping[str, int]: ...
    def load_adapter(self, folder: AdapterFolder) -> None:
        """On any thread. Raises ModelError, ConfigError."""

    def drop_adapter(self, digest: str) -> None:
        """Between two steps; no request has it."""


Read = Callable[[Path], AdapterFolder]  # raises ModelError


def reader_of(settings: AdapterSettings) -> Read:
    """Returns what reads a folder within these settings' limits."""
    return partial(read_adapter, max_rank=settings.max_lora_rank, max_tokens=settings.max_prompt_adapter_token)


def load_from(path: str, digest: str, read: Read, load: Callable[[AdapterFolder], None]) -> str:
    """Loads the adapter of this folder; returns why it could not be, in one line, or ""."""
    try:
        folder = read(Path(path))
        if folder.digest != digest:
            return f"{path}: another content ({folder.digest[:12]}) than the scheduler's ({digest[:12]})"
        load(folder)
    except PdClusterError as error:
        return told(error.text)
    except (OSError, MemoryError) as error:
        return f"{path}: {error or type(error).__name__}"
    return ""


class WorkerAdapters:
    """`send(conn, states)` answers the scheduler; `put` takes events of the loading thread to the engine's.

    `used()` returns the digests of requests that are here.
    """

    def __init__(
        self,
        keeper: Keeper | None,
        read: Read,
        send: Callable[[str, wire.Body], None],
        put: Callable[[AdapterLoaded], None],
        used: Callable[[], Collection[str]],
    ) -> None:
        """`keeper` None: the model was loaded without places for adapters."""
        self._keeper = keeper
        self._read_folder = read
        self._send, self._put, self._used = send, put, used
        self._conn = ""  # of the scheduler whose list counts
        self._wanted: dict[str, str] | None = None  # paths by digest; None: no list has come
        self._problems: dict[str, str] = {}
        self._loading: set[str] = set()
        self._jobs: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def read(self, conn: str, news: wire.WantedAdapters) -> None:
        """Follows the list; what failed before is tried again."""
        self._conn, self._wanted = conn, {each.digest: each.path for each in news.adapters}
        self._problems = {}
        for digest, path in self._wanted.items():
            if self._keeper is None:
                self._problems[digest] = "--enable-lora, --enable-prompt-adapter: this worker was started without them"
            elif digest not in self._keeper.variants and digest not in self._loading:
                self._loading.add(digest)
                self._jobs.put((digest, path))
                self._start()
        self._report()

    def loaded(self, event: AdapterLoaded) -> None:
        self._loading.discard(event.digest)
        if event.problem:
            log.warning("adapter %s: %s", event.digest[:12], event.problem)
            self._problems[event.digest] = event.problem
        self._report()

    def tick(self) -> None:
        """Drops what is neither wanted nor used."""
        if self._keeper is None or self._wanted is None:
            return
        unwanted = self._keeper.variants.keys() - self._wanted.keys()
        if unwanted:
            for digest in unwanted - set(self._used()):
                self._keeper.drop_adapter(digest)

    def _report(self) -> None:
        wanted = self._wanted or {}
        have = self._keeper.variants if self._keeper is not None else {}
        problems = {digest: why[:1000] for digest, why in self._problems.items() if digest in wanted}
        self._send(self._conn, wire.AdapterStates([digest for digest in wanted if digest in have], problems))

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="adapters", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        assert self._keeper is not None
        while True:
            digest, path = self._jobs.get()
            self._put(AdapterLoaded(digest, load_from(path, digest, self._read_folder, self._keeper.load_adapter)))
