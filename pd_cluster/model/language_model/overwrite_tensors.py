"""Copies the tensors of a new part of a model into those of an old part that was made in the same way.

The old part's memory stays where it is, so graphs that were captured with it compute with the new values. Both parts
are walked together: objects, modules, containers, and values that functions have bound. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch

from pd_cluster.model.lora.adapted_linear import LinearAdapters, StepRows
from pd_cluster.model.lora.embedding_adapters import EmbeddingAdapters, Norms

KEPT = (LinearAdapters, EmbeddingAdapters, Norms, StepRows)  # objects of loaded adapters, which stay in the old part
TENSORS = {"_parameters", "_buffers", "_modules"}  # where a module has its parts


class CannotOverwrite(Exception):
    """The parts differ in more than the contents of tensors; the message names the first such difference."""


def overwrite(old: Any, new: Any) -> None:
    """Copies every tensor of `new` into the tensor in its place in `old`. Raises CannotOverwrite, perhaps half-way."""
    _TensorWalk().pair(old, new, type(old).__name__)


class _TensorWalk:
    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], tuple[Any, Any]] = {}  # by ids; holding the objects keeps the ids unique

    def pair(self, old: Any, new: Any, place: str) -> None:
        if old is new or isinstance(old, KEPT) or (id(old), id(new)) in self._seen:
            return
        self._seen[id(old), id(new)] = old, new
        if type(old) is not type(new):
            raise CannotOverwrite(f"{place} is a {type(new).__name__}, and was a {type(old).__name__}")
        match old:
            case torch.Tensor():
                _copy(old, new, place)
            case dict():
                self._named(old, new, place)
            case list() | tuple():
                if len(old) != len(new):
                    raise CannotOverwrite(f"{place} has {len(new)} parts, and had {len(old)}")
                for at, (each, other) in enumerate(zip(old, new, strict=True)):
                    self.pair(each, other, f"{place}[{at}]")
            case FunctionType() | MethodType() | partial():
                self._bound(old, new, place)
            case _ if (parts := _parts_of(old)) is not None:
                self._named(parts, _parts_of(new) or {}, place)
            case _:
                if old != new:
                    raise CannotOverwrite(f"{place} is {new!r}, and was {old!r}")

    def _named(self, old: Mapping[Any, Any], new: Mapping[Any, Any], place: str) -> None:
        if old.keys() != new.keys():
            raise CannotOverwrite(f"{place} has other parts: {', '.join(sorted(map(str, old.keys() ^ new.keys())))}")
        for name, each in old.items():
            self.pair(each, new[name], f"{place}.{name}")

    def _bound(self, old: Any, new: Any, place: str) -> None:
        """Walks the values that a function, a method or a partial call has bound."""
        if isinstance(old, partial):
            self.pair((old.func, old.args, old.keywords), (new.func, new.args, new.keywords), place)
        elif isinstance(old, MethodType):
            self.pair((old.__func__, old.__self__), (new.__func__, new.__self__), place)
        elif old.__code__ is not new.__code__:
            raise CannotOverwrite(f"{place} is another function")
        else:
            before, after = ([cell.cell_contents for cell in each.__closure__ or ()] for each in (old, new))
            self.pair(before, after, place)
            self.pair(old.__defaults__, new.__defaults__, place)


def _copy(old: torch.Tensor, new: torch.Tensor, place: str) -> None:
    if (old.shape, old.dtype, old.stride()) != (new.shape, new.dtype, new.stride()):
        was, now = (f"{each.dtype} {list(each.shape)} {each.stride()}" for each in (old, new))
        raise CannotOverwrite(f"{place} is {now}, and was {was}")
    old.copy_(new)


def _parts_of(value: Any) -> dict[str, Any] | None:
    """Returns the attributes of an object of this package, or the tensors of a module; None for other values."""
    is_own = type(value).__module__.startswith("pd_cluster.")
    if isinstance(value, torch.nn.Module):
        left_out = vars(torch.nn.Module()).keys() - TENSORS
        return {
            name: each for name, each in vars(value).items() if name in TENSORS or (is_own and name not in left_out)
        }
    if not is_own:
        return None
    slots: Iterable[str] = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
