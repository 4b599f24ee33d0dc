"""Loads the logits processors that `--logits-processors` names. Does not use requests.

Only the operator's setting names modules, which run with all rights of the engine's process.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pd_cluster.errors import ConfigError, called, first_line
from pd_cluster.logits_processors import ProcessorConfig
from pd_cluster.types import Request

SETTING = "logits_processors"
OF_REQUESTS = ("new_req_logits_processor",)
OF_BATCHES = ("update_state", "apply")


class ProcessorCalls:
    """The call of operators' code that is running. The engine's thread writes it, and a watching thread reads it.

    `request`: the request that is being processed. `running`: the processor's name and its start time; None: none runs.
    """

    def __init__(self) -> None:
        self.request: Request | None = None
        self.running: tuple[str, float] | None = None


@dataclass(frozen=True, slots=True)
class LoadedProcessor:
    """A processor class of the operator. `adapter`: its only instance, which returns a function for each sequence;
    None: `make` creates an instance for each sequence. All processors of the engine share `calls`.
    """

    name: str
    kind: type[Any]
    is_argmax_invariant: bool
    adapter: Any | None
    make: Callable[[], Any]
    calls: ProcessorCalls


def load_processors(names: Sequence[str], config: ProcessorConfig, device: torch.device) -> tuple[LoadedProcessor, ...]:
    """Imports the classes MODULE:CLASS, in order. Raises ConfigError that names the class and says what is wrong."""
    calls = ProcessorCalls()
    return tuple(_load(name, config, device, calls) for name in names)


def _load(name: str, config: ProcessorConfig, device: torch.device, calls: ProcessorCalls) -> LoadedProcessor:
    place = f"{called(SETTING)} {name}"
    kind = _class_of(name, place)

    def make() -> Any:
        return kind(config, device, device.type != "cpu")

    try:
        instance = make()
        is_invariant = instance.is_argmax_invariant()
    except Exception as error:  # the operator's code may fail in any way
        raise ConfigError(f"{place}: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(is_invariant, bool):
        raise ConfigError(f"{place}: is_argmax_invariant returned {is_invariant!r}; expected True or False")
    return LoadedProcessor(name, kind, is_invariant, instance if _has(kind, OF_REQUESTS) else None, make, calls)


def _class_of(name: str, place: str) -> type[Any]:
    """Returns the class. Raises ConfigError."""
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # the operator's code may fail in any way
        raise ConfigError(
            f"{place}: cannot be imported: {type(error).__name__}: {first_line(error)}; "
            f"install it, or put its folder on PYTHONPATH"
        ) from error
    for part in path.split("."):
        if (found := getattr(found, part, None)) is None:
            raise ConfigError(f"{place}: the module {module_name} has no {path}")
    if not inspect.isclass(found):
        raise ConfigError(f"{place}: must be a class, not {type(found).__name__}; wrap it in an AdapterLogitsProcessor")
    if not (_has(found, OF_REQUESTS) or _has(found, OF_BATCHES)) or not _has(found, ("is_argmax_invariant",)):
        raise ConfigError(
            f"{place}: needs the methods is_argmax_invariant, and new_req_logits_processor or both update_state and "
            f"apply; see docs/extending.md"
        )
    return found


def _has(kind: type[Any], methods: Sequence[str]) -> bool:
    return all(callable(getattr(kind, method, None)) for method in methods)
