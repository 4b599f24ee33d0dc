"""Reads the reasoning before a reply's content, such as `<think>…</think>`.

Blanks around the reasoning are markup and are dropped. Reasoning that never ends stays reasoning up to a call in it;
later marks are content. Knows only the texts that begin tool calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pd_cluster.parsers.guide_nodes import BLANK, Node
from pd_cluster.parsers.text_stream import BLANKS, Emit, Steps, TextStream, ignore

OPEN, CLOSE = "<think>", "</think>"
MOST_BLANKS = 64  # the most blanks that belong to the closing text after them
_CITATION = re.compile(r"<(?:co>|/co:[ 0-9:,\[\]]{0,256}>)")
_BEGUN_CITATION = re.compile(r"<(?:|co?|/(?:|co?|co:[ 0-9:,\[\]]{0,256}))\Z")

# The model's first text is reasoning (with or without an opening mark), reasoning only after a mark, or content.
Start = Literal["reasoning", "perhaps", "content"]


@dataclass(frozen=True)
class Thinking:
    """The marks of reasoning of one family of models.

    `unmarked`: how a reply starts if the generation prompt has no mark. `opens` and `closes`: the opening and closing
    marks; prompts use the first of each, models may write any. `ends`: texts that end the reasoning and begin the
    content. `wraps`: the texts around the content, which are dropped: one before it, then optional ones after it, in
    order. `may_close`: a reply without reasoning may begin with a closing mark. `pieces`: the tokens of these texts.
    `bare`: the text that opens the reasoning if the model leaves out the mark. `cites`: texts may have citation marks,
    which are dropped. `also_wraps`: alternatives to `wraps`.
    """

    unmarked: Start
    opens: tuple[str, ...] = (OPEN,)
    closes: tuple[str, ...] = (CLOSE,)
    ends: tuple[str, ...] = ()
    wraps: tuple[str, ...] = ()
    may_close: bool = False
    pieces: tuple[str, ...] = ()
    bare: str = ""
    cites: bool = False
    also_wraps: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must reach the reader even if the tokenizer has them as special tokens."""
        return (*self.opens, *self.closes, *self.ends, *self.wraps, *self.also_wraps, *self.pieces)

    def start_of(self, prompt_end: str) -> Start:
        """Returns how the reply starts, from the last mark of the generation prompt, whatever text follows the mark."""
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
        ]  # marks that are plain text within the reasoning
        thought: list[Node] = [again, ["until", *self.closes, *(self.ends if ends_early else ())], BLANK]
        if start == "perhaps":
            closing: list[Node] = [["marker", mark] for mark in self.closes] if self.may_close else []
            return [["repeat", 0, 1, ["any", ["seq", opening, *thought], *closing]]]
        return [["repeat", 0, 1, opening], *thought]

    def around(self, content: Node) -> list[Node]:
        """Allows a model's texts around its content."""
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

    If the reply ends in unclosed reasoning that contains one of `begins`, the stream returns to the first of these
    texts, and the result takes the text from there to the first call.
    """
    if start == "content":
        return None
    stream.keep()
    yield from stream.blanks()
    opened = yield from _opened(stream, thinking)
    if opened:
        stream.take(len(opened))
        yield from stream.blanks()
    elif start == "perhaps":
        if not (thinking.may_close and (yield from _takes_close(stream, thinking))):
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
    for mark in filter(None, (*thinking.opens, thinking.bare)):  # a mark comes before its own prefixes
        if (yield from stream.begins(mark)):
            return mark
    return ""


def _takes_close(stream: TextStream, thinking: Thinking) -> Steps[bool]:
    """Takes a closing mark and the blanks around it, if one comes next."""
    for mark in thinking.closes:
        if (yield from stream.begins(mark)):
            stream.take(len(mark))
            yield from stream.blanks()
            stream.kept()
            return True
    return False


class Unwrapped:
    """Emits content without the texts around it, the first at its beginning and the others, with blanks, at its end."""

    def __init__(self, wraps: Sequence[str], emit: Emit) -> None:
        self._before = wraps[0]
        some, ending, may_end = f"[{BLANKS}]{{0,{MOST_BLANKS}}}", "", ""
        for after in reversed(wraps[1:]):
            whole, others = rf"{re.escape(after)}[{BLANKS}]*", "|" if ending else ""
            may_end = f"(?:{_begun(after)}|{whole}{may_end}{others}{may_end})"
            ending = f"(?:{whole}(?:{ending})?{others}{ending})"
        self._may_end = re.compile(rf"{some}{may_end}\Z")  # an ending that may be markup
        self._ends = re.compile(rf"{some}{ending}\Z")
        self._emit = emit
        self._state: Literal["before", "blanks", "within"] = "before"
        self._held = ""

    def add(self, text: str) -> None:
        self._held += text
        if self._state == "before":
            begun = self._held.lstrip(BLANKS)
            if begun != self._before and self._before.startswith(begun):  # also if it is only blanks
                return
            is_open = begun.startswith(self._before)
            self._held = begun.removeprefix(self._before) if is_open else self._held
            self._state = "blanks" if is_open else "within"
        if self._state == "blanks":
            self._held = self._held.lstrip(BLANKS)
            if not self._held:
                return
            self._state = "within"
        found = self._may_end.search(self._held)
        self._show(found.start() if found is not None else len(self._held))

    @property
    def num_held(self) -> int:
        return len(self._held)

    def flush(self) -> None:
        """Emits the held-back text, because no more content follows directly."""
        self._state = "within"
        if (found := self._ends.search(self._held)) is not None:
            self._held = self._held[: found.start()]
        self._show(len(self._held))

    def _show(self, num_chars: int) -> None:
        if num_chars:
            shown, self._held = self._held[:num_chars], self._held[num_chars:]
            self._emit(shown)


def _begun(text: str) -> str:
    """Returns a pattern of the text's prefixes, including the empty one."""
    begun = ""
    for char in reversed(text[:-1]):
        begun = f"(?:{re.escape(char)}{begun})?"
    return begun


class Uncited:
    """Emits text without citation marks, `<co>` and `</co: 0:[1,2]>`."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held = ""

    def add(self, text: str) -> None:
        text = _CITATION.sub("", self._held + text)
        begun = _BEGUN_CITATION.search(text)
        self._held = begun[0] if begun is not None else ""
        if shown := text[: len(text) - len(self._held)]:
            self._emit(shown)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def flush(self) -> None:
        """Emits the held-back text at the end."""
        if self._held:
            self._emit(self._held)
        self._held = ""


class Trimmed:
    """Emits text without blanks at its end."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._blanks: list[str] = []

    def add(self, text: str) -> None:
        solid = text.rstrip(BLANKS)
        if solid:
            self._emit("".join([*self._blanks, solid]))
            self._blanks = []
        self._blanks.append(text[len(solid) :])
