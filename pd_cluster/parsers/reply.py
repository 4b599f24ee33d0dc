"""How one model writes replies: the parsers that read them, the guides that constrain them, the ids of calls.

Other packages need only this module. Knows nothing of requests; the guide compiler decides whether a tool's schema is
supported.
"""

from __future__ import annotations

import difflib
import secrets
import string
from collections.abc import Iterable, Sequence

from pd_cluster.errors import ConfigError, called
from pd_cluster.parsers import reasoning, reply_guides, tools
from pd_cluster.parsers.calls import Gathered
from pd_cluster.parsers.parts import Part
from pd_cluster.parsers.reply_guides import Tool, ToolChoice
from pd_cluster.parsers.stream import Steps, TextStream
from pd_cluster.types import Guide

__all__ = ["ReplyFormat", "ReplyReader", "Tool", "ToolChoice"]


class ReplyFormat:
    """The two parsers that an operator names; "" for none."""

    def __init__(self, tool_parser: str = "", reasoning_parser: str = "") -> None:
        """Raises ConfigError for an unknown name."""
        _must_be_known(called("tool_call_parser"), tool_parser, tools.READERS)
        _must_be_known(called("reasoning_parser"), reasoning_parser, reasoning.PARSERS)
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser

    @property
    def markers(self) -> frozenset[str]:
        """Texts that must reach the reader even if the tokenizer has them as special tokens."""
        thinking = (reasoning.OPEN, reasoning.CLOSE) if self.reasoning_parser else ()
        return frozenset((*tools.MARKERS.get(self.tool_parser, ()), *thinking))

    @property
    def history_marks(self) -> frozenset[str]:
        """Marks that stay control tokens in the assistant's earlier replies, because the model's template reads them.

        Without a parser, clients receive replies with all marks and send them back that way.
        """
        names = (self.tool_parser,) if self.tool_parser else tuple(tools.MARKERS)
        return frozenset((reasoning.OPEN, reasoning.CLOSE, *(mark for name in names for mark in tools.MARKERS[name])))

    def reader(self, choice: ToolChoice, prompt_end: str, most_calls: int | None = None) -> ReplyReader:
        """Returns a reader for one reply. `prompt_end`: the text of the prompt's last tokens, special ones included."""
        start = reasoning.start_of(self.reasoning_parser, prompt_end)
        return ReplyReader(start, self._content_reader(choice), most_calls)

    def guide(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        prompt_end: str,
        most_calls: int | None = None,
        answer: Guide | None = None,
    ) -> Guide | None:
        """Returns the guide for a whole reply, whose content must follow `answer`; None: anything goes. Raises
        RequestError.
        """
        start = reasoning.start_of(self.reasoning_parser, prompt_end)
        return reply_guides.guide_of(self.tool_parser, start, tools, choice, most_calls, answer)

    def call_id(self) -> str:
        """Returns a new id. Mistral's chat templates accept only nine letters and digits."""
        if self.tool_parser == "mistral":
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def _content_reader(self, choice: ToolChoice) -> tools.Reader:
        if choice == "none" or (choice == "auto" and not self.tool_parser):
            return tools.read_content
        return tools.READERS.get(self.tool_parser, tools.read_array)


class ReplyReader:
    """Reads one reply as text arrives. How the text is split affects only how the parts are split."""

    def __init__(self, start: reasoning.Start, read_content: tools.Reader, most_calls: int | None) -> None:
        self._stream = TextStream()
        self._out = Gathered(most_calls)
        self.is_reasoning = True  # until the first character after any reasoning has been read
        self._steps = self._read(start, read_content)

    def feed(self, text: str) -> list[Part]:
        """Returns the parts that are certain so far."""
        self._stream.add(text)
        next(self._steps, None)
        return self._out.take()

    def finish(self) -> list[Part]:
        """Returns the remaining parts. Nothing may be fed afterwards."""
        self._stream.end()
        next(self._steps, None)
        self._out.end()
        return self._out.take()

    @property
    def num_calls(self) -> int:
        return self._out.num_calls

    def _read(self, start: reasoning.Start, read_content: tools.Reader) -> Steps[None]:
        yield from reasoning.read_reasoning(self._stream, start, self._out.reasoning)
        self.is_reasoning = False
        yield from read_content(self._stream, self._out)


def _must_be_known(setting: str, name: str, known: Iterable[str]) -> None:
    if not name or name in known:
        return
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"{setting} {name}: not known; known are {', '.join(sorted(known))}{hint}")
