"""Reads the reasoning before a reply's content, such as `<think>…</think>`.

Blanks around the reasoning are markup and are dropped, as is a closing mark without an opening one. Reasoning without a
closing mark ends at the first call in it; a later pair of marks is content. Knows only the texts that begin calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pd_cluster.parsers.content_filters import Trimmed, Uncited
from pd_cluster.parsers.guide_nodes import BLANK, Node
from pd_cluster.parsers.text_stream import BLANKS, Emit, Steps, TextStream, ignore

OPEN, CLOSE = "<think>", "</think>"

# "reasoning": the model's first text is reasoning, with or without an opening mark; "perhaps": only after a mark.
Start = Literal["reasoning", "perhaps", "content"]


@dataclass(frozen=True)
class Thinking:
    """The marks of reasoning of one family of models.

    Prompts use the first of `opens` and of `closes`; models may write any.
    """

    unmarked: Start  # how a reply starts if the generation prompt has no mark
    opens: tuple[str, ...] = (OPEN,)  # the opening marks
    closes: tuple[str, ...] = (CLOSE,)  # the closing marks
    ends: tuple[str, ...] = ()  # texts that end the reasoning and begin the content
    wraps: tuple[str, ...] = ()  # texts dropped around content: one before it, then optional ones after it, in order
    may_close: bool = False  # guides let a reply begin with a closing mark
    pieces: tuple[str, ...] = ()  # the tokens of these texts
    bare: str = ""  # the text that opens the reasoning if the model leaves out the mark
    cites: bool = False  # texts may have citation marks, which are dropped
    also_wraps: tuple[str, ...] = ()  # alternatives to `wraps`

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the reader needs, even if they are special tokens, whose text is usually hidden."""
        return (*self.opens, *self.closes, *self.ends, *self.wraps, *self.also_wraps, *self.pieces)

    @property
    def pairs(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the opening and the closing marks, without those that are ordinary words."""
        return tuple(each for each in self.opens if each[0] in "<["), tuple(
            each for each in self.closes if each[0] in "<["
        )

    def start_of(self, prompt_end: str) -> Start:
        """Returns how the reply starts, by the generation prompt's last mark; text after the mark does not matter."""
        mark = self.last_mark(prompt_end)
        if mark is None:
            return self.unmarked
        return "reasoning" if mark[0] in self.opens else "content"

    def last_mark(self, text: str) -> re.Match[str] | None:
        return next(iter([*self._marks.finditer(text)][-1:]), None)

    def after(self, content: str) -> str:
        """Returns the mark before a reply that continues this content."""
        last_open = max(content.rfind(mark) for mark in self.opens)
        last_close = max(content.rfind(mark) for mark in self.closes)
        return self.opens[0] if last_open > last_close else self.closes[0]

    def before(self, start: Start, ends_early: bool = False) -> list[Node]:
        """Returns the guide's nodes for everything before the content. The reader accepts all that they permit.

        `ends_early`: one of `ends` may begin the content.
        """
        if start == "content":
            return []
        bare: list[Node] = [["marker", self.bare]] if self.bare else []
        opening: Node = ["any", *(["marker", mark] for mark in self.opens), *bare]
        again: Node = [
            "repeat",
            0,
            None,
            ["until", *self.opens, *self.wraps, *self.also_wraps],
        ]  # the marks that may occur as plain text in the reasoning
        thought: list[Node] = [again, ["until", *self.closes, *(self.ends if ends_early else ())], BLANK]
        if start == "perhaps":
            closing: list[Node] = [["marker", mark] for mark in self.closes] if self.may_close else []
            return [["repeat", 0, 1, ["any", ["seq", opening, *thought], *closing]]]
        return [["repeat", 0, 1, opening], *thought]

    def around(self, content: Node) -> list[Node]:
        """Returns the nodes of the content with the texts that the model may write around it."""
        nodes = [content]
        for wraps in (self.wraps, self.also_wraps):
            texts: list[Node] = [["repeat", 0, 1, ["seq", ["marker", text], BLANK]] for text in wraps]
            nodes = [*texts[:1], *nodes, *texts[1:]]
        return nodes

    def answer(self, start: Start, node: Node) -> Node:
        """Returns the node of an answer, with the mark that distinguishes it from calls, if the model has one."""
        return node

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(mark.strip(BLANKS)) for mark in (*self.opens, *self.closes)))


NONE = Thinking("content")


def read_reasoning(
    stream: TextStream, thinking: Thinking, start: Start, emit: Emit, begins: Sequence[str] = ()
) -> Steps[Emit | None]:
    """Takes everything before the content. `begins`: texts that begin a call.

    If the reply ends in unclosed reasoning that contains one of `begins`, the stream goes back to the first of these
    texts. The returned function then takes the text from there to the first call.
    """
    if thinking is NONE:
        return None
    stream.keep()
    yield from stream.blanks()
    opened = (yield from _opened(stream, thinking)) if start != "content" else ""
    if opened:
        stream.take(len(opened))
        yield from stream.blanks()
    elif start != "reasoning":
        if not (yield from _takes_close(stream, thinking.pairs[1])):
            stream.put_back()
        return None
    stream.kept()
    think, cited = Trimmed(emit).add, None
    if thinking.cites:
        cited = Uncited(think)
        think = cited.add
    ends = (*thinking.closes, *thinking.ends)
    begins = [text for text in begins if text not in ends]
    marker = yield from stream.until((*ends, *begins), think)
    if marker in begins:
        stream.keep()
        marker = yield from stream.until(ends, ignore)
        if not marker:
            stream.put_back()
            return think
        think(stream.kept())
    if cited is not None:
        cited.flush()
    if marker in thinking.closes:
        stream.take(len(marker))
        yield from stream.blanks()
    return None


def _opened(stream: TextStream, thinking: Thinking) -> Steps[str]:
    """Returns the opening mark that comes next; "" for none."""
    for mark in filter(None, (*thinking.opens, thinking.bare)):  # a mark is listed before marks that are its prefixes
        if (yield from stream.begins(mark)):
            return mark
    return ""


def _takes_close(stream: TextStream, closes: Sequence[str]) -> Steps[bool]:
    """Takes a closing mark and the blanks around it, if one comes next."""
    for mark in closes:
        if (yield from stream.begins(mark)):
            stream.take(len(mark))
            yield from stream.blanks()
            stream.kept()
            return True
    return False
