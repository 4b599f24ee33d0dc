"""Converts calls to lanes' ends on other ranks into messages.

The protocols in handover/links/link_ends.py declare the methods, their arguments' types and when they take effect, so
a method is changed only there. Knows nothing of what the methods do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import msgspec

from pd_cluster.engine.handover.links.link_ends import AfterSteps, AtOnce, ReceiveEnd, SendEnd
from pd_cluster.engine.ranks.rank_messages import Call, Reached


class _Method(NamedTuple):
    arguments: msgspec.msgpack.Decoder[tuple[Any, ...]]
    result: Any  # None, AfterSteps or AtOnce


class LaneCalls:
    """The methods of a protocol, SendEnd or ReceiveEnd, as messages."""

    def __init__(self, protocol: type) -> None:
        functions = [each for each in vars(protocol).values() if inspect.isfunction(each)]
        self._methods = {each.__name__: _method(each) for each in functions if not each.__name__.startswith("_")}

    def __contains__(self, method: str) -> bool:
        return method in self._methods

    def message(
        self, at: tuple[str, int], method: str, arguments: tuple[object, ...], progress: Callable[[], Reached]
    ) -> Call:
        """Returns a call's message. `at`: the end's connection and lane. `progress`: how far the caller's steps are."""
        result = self._methods[method].result
        after = None if result == AtOnce else progress() if result == AfterSteps else Reached()
        return Call(*at, method, msgspec.Raw(msgspec.msgpack.encode(arguments)), after)

    def arguments(self, call: Call) -> tuple[Any, ...]:
        """Raises ValidationError if the protocol does not have the method or these arguments."""
        if call.method not in self._methods:
            raise msgspec.ValidationError(f"an end of a lane has no method {call.method}")
        return self._methods[call.method].arguments.decode(call.arguments)


def _method(function: Callable[..., None]) -> _Method:
    hints = get_type_hints(function, include_extras=True)
    result = hints.pop("return")
    return _Method(msgspec.msgpack.Decoder(tuple[tuple(hints.values())]), result)  # type: ignore[misc]


SEND_CALLS, RECEIVE_CALLS = LaneCalls(SendEnd), LaneCalls(ReceiveEnd)
