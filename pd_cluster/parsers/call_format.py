"""The interface of a format of tool calls, which consists of a reader and of guides for the same markup.

Formats that several models share are declarative (json_markup.py, xml_markup.py, pythonic.py); an operator's file may
add formats (parser_plugin.py). Knows nothing of reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pd_cluster.parsers.collected_reply import CollectedReply
from pd_cluster.parsers.guide_nodes import Node, Tool
from pd_cluster.parsers.text_stream import Steps, TextStream


class Format(Protocol):
    """A format of tool calls."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the reader needs, even if they are special tokens, whose text is usually hidden."""

    def read(self, stream: TextStream, out: CollectedReply) -> Steps[None]:
        """Reads a whole reply: calls and the content around them."""

    def calls(self, given: Sequence[Tool], most: int) -> Node:
        """Returns the guide for one or more calls without other text. Raises RequestError."""

    def perhaps(self, given: Sequence[Tool], most: int | None) -> Node:
        """Returns the guide for free text with calls; text that begins like a call must be one. Raises RequestError."""
