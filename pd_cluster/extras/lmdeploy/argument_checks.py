"""Checks arguments under other projects' names: refuses unknown arguments with the nearest name, reports unused ones.

Knows nothing of the arguments' meaning.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import reprlib
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from pd_cluster.errors import ConfigError

T = TypeVar("T")

PACKAGE = "pd_cluster."


def checks_names(kind: type[T]) -> type[T]:
    """Makes a dataclass raise ConfigError for an unknown field."""
    make: Any = kind.__init__
    known = [name for name in inspect.signature(make).parameters if name != "self"]

    @functools.wraps(make)
    def init(self: Any, *values: Any, **named: Any) -> None:
        refuse_unknown(kind.__name__, named, known)
        make(self, *values, **named)

    kind.__init__ = init  # type: ignore[method-assign]
    return kind


def refuse_unknown(owner: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises ConfigError for an unknown name."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            way_out = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"{owner}: {name} is unknown; {way_out}")


def refuse(owner: str, given: Mapping[str, Any], refused: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    """Refuses arguments. `refused`: name -> (values without effect, error for others). Raises ConfigError."""
    for name, (neutral, why) in refused.items():
        if name in given and not any(_is(given[name], value) for value in neutral):
            raise ConfigError(f"{owner}.{name} {reprlib.repr(given[name])}: {why}")


def idle(given: Mapping[str, Any], without_effect: Mapping[str, tuple[tuple[Any, ...], str]]) -> list[str]:
    """Returns remarks on arguments without effect; `without_effect` has the form of `refused`."""
    return [
        f"{name}={reprlib.repr(given[name])} ({why})"
        for name, (neutral, why) in without_effect.items()
        if name in given and not any(_is(given[name], value) for value in neutral)
    ]


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns, with the line in the caller's program that called this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def count(owner: str, name: str, value: Any, least: int) -> int:
    """Returns a count. Raises ConfigError for a value that is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{owner}.{name} {reprlib.repr(value)}: must be a whole number of at least {least}")
    return value


def _is(value: Any, neutral: Any) -> bool:
    return value is neutral or (value == neutral and isinstance(value, bool | int | float | str | dict | list))
