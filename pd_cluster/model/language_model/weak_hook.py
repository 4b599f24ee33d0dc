"""A module's hook that calls a method of the module's owner. Without a reference cycle, both are freed immediately."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class WeakHook:
    """Calls a bound method; does nothing once the method's object has been freed."""

    __slots__ = ("_method",)

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = self._method()
        return None if method is None else method(*args, **kwargs)
