"""How models write tool calls, by the name of their format: a reader and the guides made of the same markup.

A format that several models share is a description (json_markup.py, xml_markup.py, pythonic.py); an operator's file may
add others (parser_plugin.py). Knows nothing of reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pd_cluster.parsers.collected_reply import CollectedReply
from pd_cluster.parsers.guide_nodes import Node, Tool
from pd_cluster.parsers.text_stream import Steps, TextStream


class Format(Protocol):
    """One way to write calls."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must reach the reader even if the tokenizer has them as special tokens."""

    def read(self, stream: TextStream, out: CollectedReply) -> Steps[None]:
        """Reads a whole reply: calls, and content around them."""

    def calls(self, given: Sequence[Tool], most: int) -> Node:
        """Returns the guide for at least one call, and nothing else. Raises RequestError."""

    def perhaps(self, given: Sequence[Tool], most: int | None) -> Node:
        """Returns the guide for free text in which whatever begins like a call is one. Raises RequestError."""
