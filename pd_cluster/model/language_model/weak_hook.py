"""A module's hook that calls an object which holds the module: without a cycle, so both are freed at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class WeakHook:
    """Calls a bound method, and does nothing once its object is gone."""

    __slots__ = ("_method",)

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = self._method()
        return None if method is None else method(*args, **kwargs)
