"""vLLM's `LoRARequest` and `PromptAdapterRequest`, which name a prompt's adapter; adapters are loaded on first use."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pd_cluster.checkpoints.lora_folder import CONFIG_FILE, WEIGHTS_FILE, LoraFolder
from pd_cluster.checkpoints.prompt_adapter_folder import AdapterFolder, PromptFolder
from pd_cluster.errors import ConfigError, RequestError, told
from pd_cluster.settings.lora_settings import AdapterSettings
from pd_cluster.types.variants import num_virtual_tokens

LORA, PROMPT = "lora_request", "prompt_adapter_request"

R = TypeVar("R", "LoRARequest", "PromptAdapterRequest")


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter in the folder `lora_path`, or `lora_local_path`, its former name.

    The folder's content identifies the adapter, so `lora_name` and `lora_int_id` may be reused.
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
        _check_number(f"{place}.lora_int_id", self.lora_int_id, LORA)
        _check_path(f"{place}.lora_path", self.path, LORA)
        if self.long_lora_max_len is not None:
            raise RequestError(
                f"{place}.long_lora_max_len: {self.long_lora_max_len}; not supported; leave it out", param=LORA
            )
        return self


@dataclass(frozen=True, slots=True)
class PromptAdapterRequest:
    """A prompt adapter in the folder `prompt_adapter_local_path`: its virtual tokens come before the prompt's tokens.

    `prompt_adapter_num_virtual_tokens` must equal the number in the folder. The folder's content identifies the
    adapter, so name and id may be reused.
    """

    prompt_adapter_name: str
    prompt_adapter_id: int
    prompt_adapter_local_path: str
    prompt_adapter_num_virtual_tokens: int

    @property
    def path(self) -> str:
        return self.prompt_adapter_local_path

    def checked(self, place: str) -> PromptAdapterRequest:
        """Raises RequestError."""
        _check_number(f"{place}.prompt_adapter_id", self.prompt_adapter_id, PROMPT)
        number = self.prompt_adapter_num_virtual_tokens
        _check_number(f"{place}.prompt_adapter_num_virtual_tokens", number, PROMPT)
        _check_path(f"{place}.prompt_adapter_local_path", self.path, PROMPT)
        return self


def _check_number(place: str, number: object, param: str) -> None:
    if not isinstance(number, int) or number < 1:
        raise RequestError(f"{place}: {number!r}; must be an integer of at least 1", param=param)


def _check_path(place: str, path: object, param: str) -> None:
    if not isinstance(path, str | os.PathLike) or not path:
        raise RequestError(f"{place}: missing; give the adapter's folder", param=param)


def paired_lora(given: Any, num_prompts: int) -> list[LoRARequest | None]:
    """Returns an adapter for each prompt; None: the model itself. Raises RequestError."""
    return _paired(given, num_prompts, LoRARequest, LORA)


def paired_prompt_adapters(given: Any, num_prompts: int) -> list[PromptAdapterRequest | None]:
    """Returns a prompt adapter for each prompt; None: no adapter. Raises RequestError."""
    return _paired(given, num_prompts, PromptAdapterRequest, PROMPT)


def _paired(given: Any, num_prompts: int, kind: type[R], name: str) -> list[R | None]:
    article = "an" if kind.__name__[0] in "AEIO" else "a"
    if given is None:
        return [None] * num_prompts
    if isinstance(given, kind):
        return [given.checked(name)] * num_prompts
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RequestError(
            f"{name}: {reprlib.repr(given)}; expected {article} {kind.__name__}, or a list with one for each prompt",
            name,
        )
    if len(given) != num_prompts:
        raise RequestError(f"{name}: {len(given)} for {num_prompts} prompts; give one for all, or one for each", name)
    found: list[R | None] = []
    for at, each in enumerate(given):
        if each is not None and not isinstance(each, kind):
            raise RequestError(f"{name}[{at}]: {reprlib.repr(each)}; expected {article} {kind.__name__}, or None", name)
        found.append(None if each is None else each.checked(f"{name}[{at}]"))
    return found


class RequestedAdapters:
    """The adapters of one engine, by folder. `load` loads one into the engine."""

    def __init__(
        self, settings: AdapterSettings, started: Mapping[str, str], load: Callable[[AdapterFolder], None]
    ) -> None:
        """`started`: name -> digest of the adapters that the engine has had from its start."""
        self._settings, self._started, self._load = settings, set(started.values()), load
        self._known: dict[tuple[object, ...], str] = {}  # identity of the files -> digest

    def variants(
        self, requests: Sequence[LoRARequest | None], prompts: Sequence[PromptAdapterRequest | None] = ()
    ) -> list[str]:
        """Loads and returns the variant of each prompt. `prompts`: prompt adapters, if any. Raises RequestError."""
        found: dict[LoRARequest | PromptAdapterRequest | None, str] = {None: ""}
        for each in (*requests, *prompts):
            if each not in found and each is not None:
                found[each] = self._variant(each)
        for lora, prompt in zip(requests, prompts, strict=False):
            if lora is not None and prompt is not None:
                raise RequestError(f"{PROMPT}: not with {LORA} for one prompt; give one of them", param=PROMPT)
        return [found[each or next(iter(prompts[at : at + 1]), None)] for at, each in enumerate(requests)]

    def _variant(self, request: LoRARequest | PromptAdapterRequest) -> str:
        settings, is_lora = self._settings, isinstance(request, LoRARequest)
        name = LORA if is_lora else PROMPT
        enabling = "enable_lora" if is_lora else "enable_prompt_adapter"
        if not getattr(settings, enabling):
            own = request.lora_name if isinstance(request, LoRARequest) else request.prompt_adapter_name
            raise RequestError(f"{name}: {own!r}: needs LLM(…, {enabling}=True)", param=name)
        path = Path(request.path)
        try:
            key = is_lora, path, *(_stamp(path / file) for file in (CONFIG_FILE, WEIGHTS_FILE))
            if key not in self._known:
                self._known[key] = self._digest(
                    LoraFolder.read(path, settings.max_lora_rank)
                    if is_lora
                    else PromptFolder.read(path, settings.max_prompt_adapter_token)
                )
        except ConfigError as error:
            raise RequestError(f"{name}: {told(error.text, str)}", param=name) from error
        variant = self._known[key]
        if isinstance(request, PromptAdapterRequest):
            given, number = request.prompt_adapter_num_virtual_tokens, num_virtual_tokens(variant)
            if given != number:
                raise RequestError(
                    f"{name}.prompt_adapter_num_virtual_tokens: {given}, but {path} has {number}", param=name
                )
        return variant

    def _digest(self, folder: AdapterFolder) -> str:
        if folder.digest not in self._started:
            self._load(folder)
        return folder.digest


def _stamp(file: Path) -> object:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
