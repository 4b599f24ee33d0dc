"""vLLM's `LoRARequest`: the adapter that a prompt is for, by its folder's content, loaded on first use."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd_cluster.checkpoints.lora_folder import CONFIG_FILE, WEIGHTS_FILE, LoraFolder
from pd_cluster.errors import ConfigError, RequestError, told
from pd_cluster.settings.adapters import AdapterSettings

NAME = "lora_request"
WITHOUT = "needs LLM(…, enable_lora=True)"


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter in the folder `lora_path`, or `lora_local_path`, its former name.

    The content of the folder counts, so `lora_name` and `lora_int_id` may be reused for another.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_local_path: str | None = None
    long_lora_max_len: int | None = None
    base_model_name: str | None = None

    @property
    def path(self) -> str:
        return self.lora_path or self.lora_local_path or ""

    def checked(self, place: str) -> LoRARequest:
        """Raises RequestError."""
        if not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise RequestError(f"{place}.lora_int_id: {self.lora_int_id!r}; must be an integer from 1 up", param=NAME)
        if not isinstance(self.path, str | os.PathLike) or not self.path:
            raise RequestError(f"{place}.lora_path: none; give the adapter's folder", param=NAME)
        if self.long_lora_max_len is not None:
            raise RequestError(
                f"{place}.long_lora_max_len: {self.long_lora_max_len}; not supported; leave it out", param=NAME
            )
        return self


def paired_lora(given: Any, num_prompts: int) -> list[LoRARequest | None]:
    """Returns one for each prompt; None: the model itself. Raises RequestError."""
    if given is None:
        return [None] * num_prompts
    if isinstance(given, LoRARequest):
        return [given.checked(NAME)] * num_prompts
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RequestError(
            f"{NAME}: {reprlib.repr(given)}; expected a LoRARequest, or a list with one for each prompt", NAME
        )
    if len(given) != num_prompts:
        raise RequestError(f"{NAME}: {len(given)} for {num_prompts} prompts; give one for all, or one for each", NAME)
    found: list[LoRARequest | None] = []
    for at, each in enumerate(given):
        if each is not None and not isinstance(each, LoRARequest):
            raise RequestError(f"{NAME}[{at}]: {reprlib.repr(each)}; expected a LoRARequest, or None", NAME)
        found.append(None if each is None else each.checked(f"{NAME}[{at}]"))
    return found


class LoraFolders:
    """The adapters of one engine, by their folders. `load` gives one to the engine."""

    def __init__(
        self, settings: AdapterSettings, started: Mapping[str, str], load: Callable[[LoraFolder], None]
    ) -> None:
        """`started`: digests of the adapters that the engine has had from its start, by name."""
        self._settings, self._started, self._load = settings, set(started.values()), load
        self._known: dict[tuple[object, ...], str] = {}  # digests by the files that were read

    def variants(self, requests: Sequence[LoRARequest | None]) -> list[str]:
        """Returns each one's variant, loaded. Raises RequestError."""
        found: dict[LoRARequest | None, str] = {None: ""}
        for each in requests:
            if each not in found and each is not None:
                found[each] = self._variant(each)
        return [found[each] for each in requests]

    def _variant(self, request: LoRARequest) -> str:
        if not self._settings.enable_lora:
            raise RequestError(f"{NAME}: {request.lora_name!r}: {WITHOUT}", param=NAME)
        path = Path(request.path)
        try:
            key = path, *(_stamp(path / name) for name in (CONFIG_FILE, WEIGHTS_FILE))
            if key not in self._known:
                self._known[key] = self._digest(LoraFolder.read(path, self._settings.max_lora_rank))
            return self._known[key]
        except ConfigError as error:
            raise RequestError(f"{NAME}: {told(error.text, str)}", param=NAME) from error

    def _digest(self, folder: LoraFolder) -> str:
        if folder.digest not in self._started:
            self._load(folder)
        return folder.digest


def _stamp(file: Path) -> object:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
