"""The parts of a reply, in the model's order. Knows nothing of their markup.

If the model writes content within a call, the call's arguments continue after the content.
"""

from __future__ import annotations

from typing import NamedTuple


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallBegin(NamedTuple):
    """Reports that the name is complete and the arguments have begun. `index` counts the calls of one reply from 0."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    name: str


class CallArguments(NamedTuple):
    """The next part of the arguments' JSON text, verbatim."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    text: str


Part = Content | Reasoning | CallBegin | CallArguments
