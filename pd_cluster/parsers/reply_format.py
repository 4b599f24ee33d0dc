"""A model's reply format: parsers that read replies, guides that constrain them, ids of calls.

Other packages use only this module of the folder. Knows nothing of requests. The guide compiler decides whether a
tool's schema is supported.
"""

from __future__ import annotations

import difflib
import logging
import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from pd_cluster.errors import ConfigError, RequestError, called, told
from pd_cluster.parsers import irregular_readers, reasoning, reply_guides
from pd_cluster.parsers.auto_format import AUTO, formats_of_model
from pd_cluster.parsers.call_format import Format
from pd_cluster.parsers.collected_reply import NO_SCHEMAS, CollectedReply
from pd_cluster.parsers.format_table import (
    CHANNEL_CALLS,
    FORMATS,
    THINKING,
    TOKEN_MARKUP,
    TURN_MARKS,
    UNMARKED,
    begins_of,
)
from pd_cluster.parsers.guide_nodes import Tool
from pd_cluster.parsers.harmony import ChannelCalls, Channels, read_channels
from pd_cluster.parsers.reasoning import NONE, Start, Thinking
from pd_cluster.parsers.reply_guides import ToolChoice
from pd_cluster.parsers.reply_parts import CallBegin, Part
from pd_cluster.parsers.text_stream import Steps, TextStream
from pd_cluster.types import Guide

log = logging.getLogger(__name__)

BUDGET = "thinking_token_budget"  # a request's field

__all__ = ["ReplyFormat", "ReplyReader", "Tool", "ToolChoice"]


def own_tool_parser(tokenizer_config: Mapping[str, Any]) -> str:
    """Returns the call format in tokenizer_config.json (tool_call_parser); "" if it names none."""
    named = tokenizer_config.get("tool_call_parser")
    return named if isinstance(named, str) and named in FORMATS else ""


def resolved_names(tool_parser: str, reasoning_parser: str, template: str, model_type: str) -> tuple[str, str]:
    """Returns and logs the names of both parsers; `auto` becomes the model's own."""
    if AUTO not in (tool_parser, reasoning_parser):
        return tool_parser, reasoning_parser
    formats, because = formats_of_model(template, model_type)
    calls = formats.tool_parser if tool_parser == AUTO else tool_parser
    is_one = calls == "openai" and reasoning_parser == ""
    thinking = formats.reasoning_parser if reasoning_parser == AUTO or is_one else reasoning_parser
    for setting, given, name in (
        ("tool_call_parser", tool_parser, calls),
        ("reasoning_parser", reasoning_parser, thinking),
    ):
        if given == AUTO and name:
            log.info("%s auto: %s, because of %s", told(called(setting)), name, because)
        elif given == AUTO:
            log.warning("%s auto: the model has no known format, so none is read; name a parser", told(called(setting)))
    return calls, thinking


def check_names(tool_parser: str, reasoning_parser: str, more: Mapping[str, Format]) -> None:
    """Raises ConfigError for an unknown name or an incompatible pair."""
    if AUTO not in (tool_parser, reasoning_parser):
        ReplyFormat(tool_parser, reasoning_parser, more)
        return
    _must_be_known(called("tool_call_parser"), tool_parser, {AUTO, *FORMATS, *more})
    _must_be_known(called("reasoning_parser"), reasoning_parser, {AUTO, *THINKING})


def check_markers(reasoning_parser: str, start: str, end: str) -> None:
    """Raises ConfigError for a marker of reasoning that the parser does not have; "" is no marker."""
    if reasoning_parser == AUTO:
        return
    thinking = THINKING.get(reasoning_parser)
    for name, given, own in (
        ("reasoning_start_str", start, thinking.opens if thinking is not None else ()),
        ("reasoning_end_str", end, thinking.closes if thinking is not None else ()),
    ):
        if given and given.strip() not in own:
            parser = f"{called('reasoning_parser')} {reasoning_parser}" if thinking else "no reasoning parser"
            raise ConfigError(
                f"{called('reasoning_config')}: {name} {given!r}: {parser} has {' and '.join(own) or 'none'}; leave it "
                f"out, or choose a parser with this marker"
            )


class ReplyFormat:
    """The names of both parsers; "" for none."""

    def __init__(
        self, tool_parser: str = "", reasoning_parser: str = "", more: Mapping[str, Format] = NO_SCHEMAS
    ) -> None:
        """`more`: formats from an operator's file. Raises ConfigError for an unknown name."""
        formats = {**FORMATS, **more}
        _must_be_known(called("tool_call_parser"), tool_parser, formats)
        _must_be_known(called("reasoning_parser"), reasoning_parser, THINKING)
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        self._calls = formats[tool_parser] if tool_parser else None
        self._thinking = THINKING[reasoning_parser] if reasoning_parser else None
        if isinstance(self._thinking, Channels):
            self._calls = self._calls or CHANNEL_CALLS
        if isinstance(self._calls, ChannelCalls) != isinstance(self._thinking, Channels):
            raise ConfigError(
                f"{called('tool_call_parser')} {tool_parser!r} and {called('reasoning_parser')} {reasoning_parser!r}: "
                f"gpt-oss's calls and reasoning are one format; name it for both (openai, openai_gptoss), or neither"
            )

    @property
    def markers(self) -> frozenset[str]:
        """Texts that the reader needs, even if they are special tokens, whose text is usually hidden."""
        calls = self._calls.markers if self._calls is not None else ()
        return frozenset((*calls, *(self._thinking.markers if self._thinking is not None else ())))

    @property
    def history_marks(self) -> frozenset[str]:
        """Marks that stay control tokens in earlier assistant replies, because the model's template reads them.

        Without a parser, clients receive replies with all marks and send them back unchanged. Marks of turns are never
        included: with them, a forged earlier reply could contain a turn of another role.
        """
        calls = FORMATS.values() if self._calls is None else (self._calls,)
        thinking = THINKING.values() if self._thinking is None else (self._thinking,)
        return frozenset(mark for each in (*calls, *thinking) for mark in each.markers).difference(TURN_MARKS)

    def reader(
        self, choice: ToolChoice, prompt_end: str, most_calls: int | None = None, given: Sequence[Tool] = ()
    ) -> ReplyReader:
        """Returns a reader for one reply. `prompt_end`: the generation prompt's text, or its last mark of reasoning."""
        schemas = {tool.name: tool.parameters for tool in given}
        start = self._start(prompt_end)
        if isinstance(self._thinking, Channels):
            reads_calls = choice in ("required", "named") or (choice == "auto" and bool(self.tool_parser))
            read = partial(read_channels, start=start, reads_calls=reads_calls)
            return ReplyReader(NONE, "content", read, most_calls)
        begins = begins_of(self._calls) if self._calls is not None and choice != "none" else ()
        if choice == "none" and self.tool_parser in TOKEN_MARKUP:
            choice, most_calls = "auto", 0
        return ReplyReader(self._thinking, start, self._content_reader(choice), most_calls, schemas, begins)

    def guide(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        prompt_end: str,
        most_calls: int | None = None,
        answer: Guide | None = None,
        are_some: bool = False,
    ) -> Guide | None:
        """Returns the guide for a whole reply, whose content must follow `answer`; None: no constraint. `are_some`: the
        model also sees tools not in `tools`. Raises RequestError.
        """
        calls = reply_guides.CallRules(tools, choice, most_calls, are_some)
        return reply_guides.guide_of(self._calls, self._thinking, self._start(prompt_end), calls, answer)

    def budgeted(self, guide: Guide | None, num_tokens: int, prompt_end: str) -> Guide | None:
        """Returns the guide, if any, of a reply whose reasoning has at most this many tokens.

        Raises RequestError if no parser reads the reasoning, or the reasoning has no marks.
        """
        thinking = self._thinking
        if thinking is None or isinstance(thinking, Channels):
            named = called("reasoning_parser")
            why = f"needs {told(named)}" if thinking is None else f"is not for {told(named)} {self.reasoning_parser}"
            raise RequestError(f"{BUDGET}: {num_tokens} {why}; leave it out", param=BUDGET)
        start = self._start(prompt_end)
        if start == "content":
            return guide
        tree = {
            "num_tokens": num_tokens,
            "starts": start,
            "opens": thinking.opens,
            "closes": (*thinking.closes, *thinking.ends),
            "inner": guide,
        }
        return Guide("budget", msgspec.json.encode(tree).decode())

    def last_mark(self, text: str, start: int = 0) -> tuple[str, str]:
        """Returns the last mark of reasoning that ends after `start`, with the text after it; "" for none."""
        mark = self._thinking.last_mark(text) if self._thinking is not None else None
        return (mark[0], text[mark.end() :]) if mark is not None and mark.end() > start else ("", "")

    def mark_after(self, content: str) -> str:
        """Returns the mark before a reply that continues this content."""
        return (self._thinking or NONE).after(content)

    def call_id(self, name: str, number: int, draw: Callable[[int], bytes] = secrets.token_bytes) -> str:
        """Returns a new call's id. `number`: the number of earlier calls. `draw`: returns that many random bytes.

        Mistral's chat templates require nine letters and digits. Kimi K2's templates write only a call's id and
        arguments.
        """
        if self.tool_parser == "kimi_k2":
            return f"functions.{name}:{number}"
        if self.tool_parser == "mistral":
            characters = string.ascii_letters + string.digits
            return "".join(characters[int.from_bytes(draw(8), "big") % len(characters)] for _ in range(9))
        return f"call_{draw(12).hex()}"

    def _start(self, prompt_end: str) -> Start:
        return self._thinking.start_of(prompt_end) if self._thinking is not None else "content"

    def _content_reader(self, choice: ToolChoice) -> irregular_readers.Reader:
        if choice == "none" or (choice == "auto" and self._calls is None):
            return irregular_readers.read_content
        return (self._calls or UNMARKED).read


class ReplyReader:
    """Reads one reply as text arrives. How the text is split affects only where parts are split."""

    def __init__(
        self,
        thinking: Thinking | None,
        start: Start,
        read_content: irregular_readers.Reader,
        most_calls: int | None,
        schemas: Mapping[str, Mapping[str, Any]] = NO_SCHEMAS,
        begins: Sequence[str] = (),
    ) -> None:
        """`begins`: texts that begin a call even within reasoning that never ends."""
        self._stream = TextStream()
        self._out, self._schemas = CollectedReply(most_calls, schemas), schemas
        self.is_reasoning = True  # until the first character after the reasoning, if there is any
        self._steps = self._read(thinking or NONE, start, begins, read_content)

    def feed(self, text: str) -> list[Part]:
        """Returns the parts that are already certain."""
        self._stream.add(text)
        next(self._steps, None)
        return self._out.take()

    def finish(self) -> list[Part]:
        """Returns the remaining parts. No text may be fed afterwards."""
        self._stream.end()
        next(self._steps, None)
        self._out.end()
        return self._out.take()

    @property
    def num_held(self) -> int:
        """The number of characters at the end of the text that may be content but are not in a part yet."""
        return self._stream.num_held + self._out.num_held

    @property
    def num_calls(self) -> int:
        return self._out.num_calls

    @property
    def in_call(self) -> bool:
        """Whether the latest call's arguments may continue, even after content."""
        return self._out.in_call

    @property
    def is_cut(self) -> bool:
        """Whether the text ended within a call."""
        return self._out.is_cut

    def _read(
        self, thinking: Thinking, start: Start, begins: Sequence[str], read_content: irregular_readers.Reader
    ) -> Steps[None]:
        unclosed = yield from reasoning.read_reasoning(self._stream, thinking, start, self._out.reasoning, begins)
        if unclosed is not None and self._calls_others(read_content):
            unclosed(self._stream.take(self._stream.num_held))
        elif unclosed is not None:
            self._out.think(unclosed)
        for wraps in filter(None, (thinking.wraps, thinking.also_wraps)):
            self._out.unwrap(wraps)
        if thinking.cites:
            self._out.leave_out_citations()
        if thinking is not NONE:
            self._out.leave_out_closes(*thinking.pairs)
        self.is_reasoning = False
        yield from read_content(self._stream, self._out)

    def _calls_others(self, read_content: irregular_readers.Reader) -> bool:
        """Whether the rest of the complete text calls an unknown tool, which is possible if no guide prevented it."""
        if not self._schemas:
            return False
        self._stream.keep()
        rest, trial, out = self._stream.take(self._stream.num_held), TextStream(), CollectedReply(None, self._schemas)
        self._stream.put_back()
        trial.add(rest)
        trial.end()
        for _ in read_content(trial, out):
            pass
        out.end()
        return any(isinstance(part, CallBegin) and part.name not in self._schemas for part in out.take())


def _must_be_known(setting: str, name: str, known: Iterable[str]) -> None:
    if not name or name in known:
        return
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"{setting} {name}: not known; known are {', '.join(sorted(known))}{hint}")
