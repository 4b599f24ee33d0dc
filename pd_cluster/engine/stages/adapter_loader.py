"""Reads adapters on a separate thread, during steps. Knows nothing of the requests that need them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from pd_cluster.checkpoints.prompt_adapter_folder import AdapterFolder, read_adapter
from pd_cluster.engine.handover.engine_events import AdapterLoaded
from pd_cluster.errors import PdClusterError, told
from pd_cluster.settings.lora_settings import AdapterSettings

Read = Callable[[Path], AdapterFolder]  # raises ModelError


def reader_of(settings: AdapterSettings) -> Read:
    """Returns a function that reads an adapter's folder within the limits of these settings."""
    return partial(read_adapter, max_rank=settings.max_lora_rank, max_tokens=settings.max_prompt_adapter_token)


def load_from(path: str, digest: str, read: Read, load: Callable[[AdapterFolder], None]) -> str:
    """Loads the adapter in a folder. Returns one line that says why it could not be loaded, or ""."""
    try:
        folder = read(Path(path))
        if folder.digest != digest:
            return f"{path}: its content ({folder.digest[:12]}) differs from the scheduler's ({digest[:12]})"
        load(folder)
    except PdClusterError as error:
        return told(error.text)
    except (OSError, MemoryError) as error:
        return f"{path}: {error or type(error).__name__}"
    return ""


class Keeper(Protocol):
    """Holds adapters: ModelAdapters for this rank, or LeadAdapters for all ranks."""

    @property
    def variants(self) -> Mapping[str, int]: ...
    def load_adapter(self, folder: AdapterFolder) -> None:
        """Loads an adapter; any thread may call this. Raises ModelError, ConfigError."""

    def drop_adapter(self, digest: str) -> None:
        """Drops an adapter that no request uses. Call it between two steps."""


class AdapterThread:
    """Reads adapters during steps, one at a time; `put` passes each result to the engine's thread."""

    def __init__(self, keeper: Keeper, read: Read, put: Callable[[AdapterLoaded], None]) -> None:
        self._keeper, self._read, self._put = keeper, read, put
        self._jobs: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()  # None: the end
        self._thread: threading.Thread | None = None

    def load(self, digest: str, path: str) -> None:
        self._jobs.put((digest, path))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="adapters", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread once it has loaded the adapters in its queue."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            digest, path = job
            self._put(AdapterLoaded(digest, load_from(path, digest, self._read, self._keeper.load_adapter)))


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """The adapters that a model can have. `named`: the adapters that this process was started with, as paths by digest.

    At most `most` LoRA adapters are in memory; None: any number.
    """

    keeper: Keeper
    thread: AdapterThread
    named: Mapping[str, str] = field(default_factory=dict)
    most: int | None = None
