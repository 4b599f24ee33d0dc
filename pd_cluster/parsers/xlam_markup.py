"""xLAM's calls: a JSON array as the whole reply, or after reasoning or an introductory text."""

from __future__ import annotations

from collections.abc import Sequence

from pd_cluster.parsers.collected_reply import CollectedReply
from pd_cluster.parsers.guide_nodes import BLANK, FREE, MAX_CALLS, Node, Tool, array_schema
from pd_cluster.parsers.irregular_readers import TOOL_CALLS, close_calls, read_objects
from pd_cluster.parsers.text_stream import Steps, TextStream

FENCE = "```json"
ENDS = {TOOL_CALLS: "", "<tool_call>": "</tool_call>", FENCE: "```"}  # text before an array -> text after it
THINK, THINK_END = "<think>", "</think>"  # this reasoning is content, unless a reasoning parser has taken it
_NO_CALL: Node = [  # the beginning of a reply that starts with other text
    "pattern",
    r"[^ \t\r\n{\[<`]|<[^t]|<t[^ho]|`[^`]|``[^`]|```[^j]",
]
_NOTHING: Node = ["repeat", 0, 1, ["pattern", r"<t?|`{1,3}"]]
_BLANKS: Node = ["repeat", 0, 1, ["pattern", r"[ \t\r\n]{1,64}"]]


class XlamCalls:
    """`[{"name": …, "arguments": …}, …]`, alone or after one of the texts in `ENDS`."""

    markers: tuple[str, ...] = (TOOL_CALLS, "<tool_call>", "</tool_call>", THINK, THINK_END)

    def read(self, stream: TextStream, out: CollectedReply) -> Steps[None]:
        starts = tuple(ENDS)
        yield from _pass_thought(stream, out)
        stream.keep()
        yield from stream.blanks()
        yield from read_objects(stream, out, starts, is_marked=False)
        while begin := (yield from stream.until(starts, out.content)):
            stream.keep()
            stream.take(len(begin))
            yield from stream.blanks()
            end = ENDS[begin]
            if not (yield from read_objects(stream, out, (*starts, end) if end else starts)):
                out.content(stream.take(len(begin)))
            elif begin == FENCE:
                yield from stream.take_after_blanks(end)
            elif end:
                yield from close_calls(stream, out, end, starts)

    def calls(self, given: Sequence[Tool], most: int) -> Node:
        return ["json", array_schema(given, "arguments", most)]

    def perhaps(self, given: Sequence[Tool], most: int | None) -> Node:
        array: list[Node] = [BLANK, self.calls(given, most or MAX_CALLS)]
        ends: dict[str, list[Node]] = {begin: [["marker", end]] if end else [] for begin, end in ENDS.items()}
        later: Node = ["any", *(["seq", ["until", begin], *array, *end] for begin, end in ends.items())]
        first: Node = ["any", *(["seq", ["exact", begin], *array, *end] for begin, end in ends.items())]
        text: list[Node] = [["repeat", 0, most, later], FREE]
        thought: Node = ["repeat", 0, 1, ["seq", ["exact", THINK], ["until", THINK_END], _BLANKS]]
        return ["seq", _BLANKS, thought, ["any", array[-1], ["seq", ["any", first, _NO_CALL], *text], _NOTHING]]


def _pass_thought(stream: TextStream, out: CollectedReply) -> Steps[None]:
    """Takes reasoning at the reply's beginning as content."""
    stream.keep()
    yield from stream.blanks()
    is_thought = yield from stream.begins(THINK)
    stream.put_back()
    if is_thought and (yield from stream.until((THINK_END,), out.content)):
        out.content(stream.take(len(THINK_END)))
