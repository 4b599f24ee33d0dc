"""gpt-oss's replies (harmony): messages in channels for reasoning, the answer, and one function call.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

Commentary without a recipient is content for the user. Messages of one kind are joined by newlines. A header that is
cut off by the end of the reply is dropped, unless it names a function or has words that no header has. Text after a
call's arguments is content. The model stops after a call, so guides permit one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pd_cluster.parsers.collected_reply import CollectedReply
from pd_cluster.parsers.content_filters import Trimmed
from pd_cluster.parsers.guide_nodes import FREE, Node, Tool, object_of
from pd_cluster.parsers.json_scan import scan_value
from pd_cluster.parsers.reasoning import Start, Thinking
from pd_cluster.parsers.text_stream import Emit, Steps, TextStream, ignore

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)
ENDS = (END, RETURN, CALL)
CHANNEL_NAMES = ("analysis", "commentary", "final")
MAX_HEADER_NUM_CHARS = 512
FUNCTIONS, TO = "functions.", "to="

_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HEADER_WORDS = ("assistant", "tool", "user", "system", "developer", *CHANNEL_NAMES, "json", "code")
_HEADER_WORD = re.compile(rf"\s*(?:{'|'.join(map(re.escape, (*MARKS, *_HEADER_WORDS)))})")
_TOO_MUCH = re.compile(r"[\s}]*")


class Channels(Thinking):
    """The reasoning format of harmony replies; its reader also reads the calls."""

    @property
    def markers(self) -> tuple[str, ...]:
        return MARKS

    def before(self, start: Start, ends_early: bool = False) -> list[Node]:
        if start == "content":
            return []
        rest = _rest("analysis") if start == "reasoning" else []
        return [*rest, ["repeat", 0, None, _THOUGHT]]

    def within_content(self, node: Node) -> Node:
        """Returns the node for a content message that the prompt began, and for later messages."""
        return ["any", FREE, ["seq", *_rest(*CHANNEL_NAMES), node]]

    def answer(self, start: Start, node: Node) -> Node:
        return node if start == "content" else ["seq", *_head("final"), node]


class ChannelCalls:
    """The call format of harmony replies. It is only used together with Channels."""

    markers = MARKS

    def read(self, stream: TextStream, out: CollectedReply) -> Steps[None]:
        return read_channels(stream, out, "perhaps", reads_calls=True)

    def calls(self, given: Sequence[Tool], most: int) -> Node:
        form: Node = ["any", ["seq", ["marker", CONSTRAIN], ["text", "json"]], ["text", " json"]]
        channel: Node = ["seq", ["marker", CHANNEL], ["text", "commentary"]]
        found: list[Node] = []
        for tool in given:
            to: Node = ["text", f" to={FUNCTIONS}{tool.name}"]
            body: list[Node] = [["repeat", 0, 1, form], ["marker", MESSAGE], ["json", object_of(tool)]]
            found += [["seq", channel, to, *body], ["seq", to, channel, *body]]  # models use both orders
        return ["any", *found]

    def perhaps(self, given: Sequence[Tool], most: int | None) -> Node:
        head = _head(*CHANNEL_NAMES)
        earlier: Node = ["seq", *head, *_rest(*CHANNEL_NAMES)]
        return ["seq", ["repeat", 0, None, earlier], ["any", ["seq", *head, FREE], self.calls(given, 1)]]


def _head(*channels: str) -> list[Node]:
    return [["marker", CHANNEL], ["any", *(["text", channel] for channel in channels)], ["marker", MESSAGE]]


def _rest(*channels: str) -> list[Node]:
    """Returns the nodes from the inside of one message to the header of the next.

    Other messages in these channels may come between; each may begin without an end mark of the previous message.
    """
    unended: Node = ["seq", ["until", CHANNEL], *_head(*channels)[1:]]
    ended: Node = ["seq", ["until", *ENDS], ["marker", START]]
    return [["repeat", 0, None, unended], ["any", ended, ["until", START]], ["text", "assistant"]]


_THOUGHT: Node = ["seq", *_head("analysis"), *_rest("analysis")]


def read_channels(stream: TextStream, out: CollectedReply, start: Start, reads_calls: bool) -> Steps[None]:
    """Reads a whole reply. `start`: the message that the prompt's end began, if any."""
    reasoning, content = _Joined(out.reasoning), _Joined(out.content)
    if start != "perhaps":
        yield from _body(stream, Trimmed(reasoning.next()).add if start == "reasoning" else content.next())
    while (yield from stream.peek()):
        header = yield from _header(stream)
        if header is None:
            yield from _body(stream, content.next())
            continue
        channel = (_CHANNEL.findall(header) or [""])[-1]
        recipient = (_RECIPIENT.findall(header) or [""])[-1]
        is_function = recipient.startswith(FUNCTIONS) or (recipient != "" and channel != "analysis")
        if is_function and reads_calls:
            yield from _call(stream, out, recipient.removeprefix(FUNCTIONS), content)
        elif channel == "analysis":
            yield from _body(stream, Trimmed(reasoning.next()).add)
        else:
            yield from _body(stream, content.next())


def _header(stream: TextStream) -> Steps[str | None]:
    """Takes a message's header; returns None if none follows."""
    stream.keep()
    yield from stream.blanks()
    for mark in (START, CHANNEL, MESSAGE, CONSTRAIN, TO):
        if (yield from stream.begins(mark)):
            break
    else:
        stream.put_back()
        return None
    pieces: list[str] = []
    end = yield from stream.short_until((MESSAGE, *ENDS), MAX_HEADER_NUM_CHARS, pieces.append)
    if end == MESSAGE:
        stream.take(len(MESSAGE))
        stream.kept()
        return "".join(pieces)
    stream.put_back()
    if mark == TO:
        return None
    if not end and (yield from stream.ends_within(MAX_HEADER_NUM_CHARS + len(MESSAGE))):
        stream.keep()
        yield from stream.until((), ignore)
        rest = stream.kept()
        if _is_cut_header(rest):
            return ""
        stream.add(rest)
    yield from stream.blanks()
    stream.take(len(mark))
    return None


def _is_cut_header(text: str) -> bool:
    at = 0
    while word := _HEADER_WORD.match(text, at):
        at = word.end()
    return any(each.startswith(text[at:].lstrip()) for each in (*MARKS, *_HEADER_WORDS))


def _body(stream: TextStream, emit: Emit) -> Steps[str]:
    """Takes a message's text, and its end mark, if it has one. Returns the mark after the text."""
    marker = yield from stream.until((*ENDS, START, CHANNEL), emit)
    if marker in ENDS:
        stream.take(len(marker))
    return marker


def _call(stream: TextStream, out: CollectedReply, name: str, content: _Joined) -> Steps[None]:
    yield from stream.blanks()
    out.begin(name)
    is_whole = False
    if (yield from stream.peek()) == "{":
        is_whole = yield from scan_value(stream, out.arguments)
    elif (yield from _ends_here(stream)):
        out.arguments("{}")
        is_whole = True
    if is_whole:
        yield from stream.run(_TOO_MUCH)
        yield from _body(stream, content.next())
    elif not (yield from _body(stream, out.arguments)):
        out.cut()


def _ends_here(stream: TextStream) -> Steps[bool]:
    for mark in ENDS:
        if (yield from stream.begins(mark)):
            return True
    return False


class _Joined:
    """Emits the texts of several messages with a newline between them."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._has_text = False
        self._is_next = False

    def next(self) -> Emit:
        """Begins a message."""
        self._is_next = self._has_text
        return self._add

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._is_next:
            self._emit("\n")
            self._is_next = False
        self._has_text = True
        self._emit(text)
