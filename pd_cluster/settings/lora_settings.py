"""Settings of adapters: those that an engine accepts, and those that it loads at its start. Reads no adapter."""

from __future__ import annotations

import json
import os
import re
import reprlib
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.model_names import fault_of_name
from pd_cluster.settings.setting import Form, Panel, Scope, Setting, at_least, at_most, check

SHIPPED_ADAPTER = Path(__file__).parents[1] / "models" / "pirate"  # made for settings.engine's SHIPPED_MODEL
SHIPPED_ADAPTER_FLAGS = ["--enable-lora", "--lora-modules", f"{SHIPPED_ADAPTER.name}={SHIPPED_ADAPTER}"]
MOST_RANK = 512
NAME = re.compile(r"[^/\\=][^\\=]{0,127}")
EXAMPLE = """NAME=PATH, or JSON such as '{"name": "NAME", "path": "PATH"}'"""


class LoraModule(msgspec.Struct, frozen=True):
    """An adapter under the name that requests give as their model. `path`: its folder."""

    name: str
    path: str


def lora_module(setting: str, name: str, path: str) -> LoraModule:
    """Checks a name and a path. Raises ConfigError that names the setting."""
    if NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{called(setting)} {reprlib.repr(name)}: not an adapter's name; expected at most 128 characters, without "
            f"= and backslashes, and not an absolute path"
        )
    if fault := fault_of_name(name):
        raise ConfigError(f"{called(setting)} {reprlib.repr(name)}: {fault}")
    if not path:
        raise ConfigError(f"{called(setting)} {name}: the path is missing; expected {EXAMPLE}")
    return LoraModule(name, os.path.abspath(path))


def _read(setting: str, written: list[str]) -> tuple[LoraModule, ...]:
    found: dict[str, LoraModule] = {}
    for text in written:
        module = _from_json(setting, text) if text.lstrip().startswith("{") else _from_pair(setting, text)
        if module.name in found:
            raise ConfigError(f"{called(setting)} {module.name}: given twice; each adapter needs its own name")
        found[module.name] = module
    return tuple(found.values())


def _from_pair(setting: str, text: str) -> LoraModule:
    name, equals, path = text.partition("=")
    if not equals:
        raise ConfigError(f"{called(setting)} {reprlib.repr(text)}: expected {EXAMPLE}")
    return lora_module(setting, name, path)


def _from_json(setting: str, text: str) -> LoraModule:
    """Reads vLLM's JSON form. `base_model_name` is only a label in vLLM, and has no effect here."""
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        raise ConfigError(f"{called(setting)} {reprlib.repr(text)}: expected {EXAMPLE}") from None
    name, path = given.pop("name", None), given.pop("path", None)
    given.pop("base_model_name", None)
    if unknown := [key for key, value in given.items() if value]:
        raise ConfigError(f"{called(setting)}: {reprlib.repr(unknown[0])} is not supported; leave it out")
    if not isinstance(name, str) or not isinstance(path, str):
        raise ConfigError(f"{called(setting)} {reprlib.repr(text)}: expected {EXAMPLE}")
    return lora_module(setting, name, path)


def _write(modules: tuple[LoraModule, ...]) -> list[str] | None:
    return [json.dumps({"name": each.name, "path": each.path}) for each in modules] or None


LORA = partial(Setting, panel=Panel.ENGINE, scope=Scope.ENGINE)


class AdapterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of adapters. Without `enable_lora` layers are computed without adapters."""

    enable_lora: Annotated[bool, LORA("Serve the model with LoRA adapters.", after="language_model_only")] = False
    lora_modules: Annotated[
        tuple[LoraModule, ...],
        LORA(
            "LoRA adapters (PEFT folders) to load at the start, as NAME=PATH or JSON; requests name one as their "
            "model.",
            form=Form(list[str], _read, _write),
            is_several=True,
            after="enable_lora",
        ),
    ] = ()
    max_loras: Annotated[
        int,
        LORA(
            "Maximum number of adapters in one step; if there are more, they take turns.",
            checks=(at_least(1),),
            after="lora_modules",
        ),
    ] = 1
    max_lora_rank: Annotated[
        int,
        LORA(
            f"Maximum rank of an adapter, up to {MOST_RANK}.",
            checks=(at_least(1), at_most(MOST_RANK)),
            after="max_loras",
        ),
    ] = 16
    enable_prompt_adapter: Annotated[
        bool,
        LORA(
            "Serve prompt adapters (prompt tuning, p-tuning, prefix tuning); on CPUs and CUDA.", after="max_cpu_loras"
        ),
    ] = False
    prompt_adapters: Annotated[
        tuple[LoraModule, ...],
        LORA(
            "Prompt adapters (PEFT folders) to load at the start, as NAME=PATH or JSON.",
            form=Form(list[str], _read, _write),
            is_several=True,
            after="enable_prompt_adapter",
        ),
    ] = ()
    max_prompt_adapter_token: Annotated[
        int,
        LORA(
            "Maximum number of virtual tokens of a prompt adapter; 0: any number.",
            checks=(at_least(0),),
            after="prompt_adapters",
        ),
    ] = 0
    max_cpu_loras: Annotated[
        int | None,
        LORA(
            "Maximum number of LoRA adapters in memory, at least --max-loras. Default: any number.",
            checks=(at_least(1),),
            after="max_lora_rank",
        ),
    ] = None

    def __post_init__(self) -> None:
        check(self)
        if self.lora_modules and not self.enable_lora:
            raise ConfigError(f"{called('lora_modules')}: needs {called('enable_lora')}")
        if self.prompt_adapters and not self.enable_prompt_adapter:
            raise ConfigError(f"{called('prompt_adapters')}: needs {called('enable_prompt_adapter')}")
        names = {each.name for each in self.lora_modules}
        if twice := next((each.name for each in self.prompt_adapters if each.name in names), ""):
            raise ConfigError(f"{called('prompt_adapters')} {twice}: {called('lora_modules')} also has this name")
        if self.max_cpu_loras is None:
            return
        most = f"{called('max_cpu_loras')} {self.max_cpu_loras}"
        if self.max_cpu_loras < self.max_loras:
            raise ConfigError(f"{most}: less than {called('max_loras')} {self.max_loras}; give at least that")

    @property
    def are_wanted(self) -> bool:
        """Whether the engine serves adapters of any kind."""
        return self.enable_lora or self.enable_prompt_adapter

    @property
    def paths(self) -> dict[str, str]:
        """Maps the name of each adapter to load at the start to its folder."""
        return {each.name: each.path for each in (*self.lora_modules, *self.prompt_adapters)}
