"""A description of calls with nested elements as arguments. Knows only the texts of their tags."""

from __future__ import annotations

from dataclasses import dataclass

ITEM = "item"  # the element of an array


@dataclass(frozen=True)
class NestedTags:
    """`mark`: the text before each tag. `section`: the element around all calls."""

    mark: str
    section: str = "tool_call"

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.mark,)

    @property
    def tag(self) -> str:
        """Returns the beginning of each tag."""
        return f"{self.mark}<"

    @property
    def begin(self) -> str:
        return f"{self.tag}{self.section}>"

    @property
    def end(self) -> str:
        return f"{self.tag}/{self.section}>"

    @property
    def call(self) -> str:
        """Returns the text before a name."""
        return f'{self.tag}invoke name="'

    @property
    def close(self) -> str:
        return f"{self.tag}/invoke>"
