"""Converts vLLM's current structural tags, a tree of formats, to a guide of kind "reply".

parsers/guide_nodes.py defines the guide's nodes. guide_fields.py reads the earlier form, with structures and triggers.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.parsers.guide_nodes import FREE, Node
from pd_cluster.service.schema.structured_outputs.json_schemas import without_remarks
from pd_cluster.types import Guide

MAX_DEPTH = 16
MAX_FORMATS = 1024
Form = Mapping[str, Any]


def guide_of_format(field: str, value: Any) -> Guide:
    """Returns the guide. Raises RequestError that names the field."""
    tree = _Reader().node(f"{field}.format", value, 0)
    return Guide("reply", msgspec.json.encode(["seq", tree]).decode())


class _Reader:
    def __init__(self) -> None:
        self._num_formats = 0

    def node(self, field: str, form: Any, depth: int, end: str | None = None) -> Node:
        """Returns the node of a format, followed by the text `end` if there is one."""
        self._num_formats += 1
        if depth > MAX_DEPTH or self._num_formats > MAX_FORMATS:
            raise _wrong(field, f"at most {MAX_FORMATS} formats, nested {MAX_DEPTH} deep, are allowed")
        if not isinstance(form, dict) or form.get("type") not in KINDS:
            kind = form.get("type") if isinstance(form, dict) else form
            raise _wrong(f"{field}.type", f"{reprlib.repr(kind)}; known are {', '.join(KINDS)}")
        kind, known = form["type"], KINDS[form["type"]][1]
        for name in form:
            if name != "type" and name not in known and form[name] not in (None, [], False):
                raise _wrong(f"{field}.{name[:64]}", f"not supported for {kind}; known are {', '.join(known)}")
        if kind == "any_text":
            return FREE if end is None else ["until", end]
        made = KINDS[kind][0](self, field, form, depth)
        return made if end is None else ["seq", made, ["exact", end]]

    def const(self, field: str, form: Form, depth: int) -> Node:
        return ["exact", _text(f"{field}.value", form.get("value"))]

    def schema(self, field: str, form: Form, depth: int) -> Node:
        schema = form.get("json_schema")
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise _wrong(f"{field}.json_schema", "a schema must be a JSON object")
        return ["json", without_remarks(schema)]

    def regex(self, field: str, form: Form, depth: int) -> Node:
        return ["guide", "regex", _text(f"{field}.pattern", form.get("pattern"))]

    def grammar(self, field: str, form: Form, depth: int) -> Node:
        return ["guide", "grammar", _text(f"{field}.grammar", form.get("grammar"))]

    def sequence(self, field: str, form: Form, depth: int) -> Node:
        elements = _list(f"{field}.elements", form.get("elements"))
        for at, each in enumerate(elements[:-1]):
            if isinstance(each, dict) and each.get("type") in ("any_text", "triggered_tags"):
                raise _wrong(
                    f"{field}.elements[{at}]", f"{each['type']} has no end; it may only come last, or in a tag"
                )
        return ["seq", *(self.node(f"{field}.elements[{at}]", e, depth + 1) for at, e in enumerate(elements))]

    def either(self, field: str, form: Form, depth: int) -> Node:
        elements = _list(f"{field}.elements", form.get("elements"))
        return ["any", *(self.node(f"{field}.elements[{at}]", e, depth + 1) for at, e in enumerate(elements))]

    def tag(self, field: str, form: Form, depth: int) -> Node:
        begin = _text(f"{field}.begin", form.get("begin"))
        return ["seq", ["exact", begin], self._body(field, form, depth)]

    def _body(self, field: str, form: Form, depth: int) -> Node:
        """Returns the node of a tag's content and end."""
        ends = form.get("end")
        ends = ends if isinstance(ends, list) and ends else [ends]
        made = [
            self.node(f"{field}.content", form.get("content"), depth + 1, _text(f"{field}.end", each)) for each in ends
        ]
        return made[0] if len(made) == 1 else ["any", *made]

    def triggered(self, field: str, form: Form, depth: int) -> Node:
        """Allows free text, and after each trigger the rest of a tag that begins with it."""
        triggers = [_text(f"{field}.triggers", each) for each in _list(f"{field}.triggers", form.get("triggers"))]
        bodies: dict[str, list[Node]] = {trigger: [] for trigger in triggers}
        whole: list[Node] = []
        for at, tag in enumerate(_list(f"{field}.tags", form.get("tags"))):
            place = f"{field}.tags[{at}]"
            begin = _text(f"{place}.begin", tag.get("begin") if isinstance(tag, dict) else None)
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                raise _wrong(f"{place}.begin", f"{reprlib.repr(begin)} begins with none of the triggers")
            body, rest = self._body(place, tag, depth + 1), begin.removeprefix(trigger)
            bodies[trigger].append(["seq", ["exact", rest], body] if rest else body)
            whole.append(["seq", ["exact", begin], body])
        later: Node = ["any", *(["seq", ["until", each], ["any", *found]] for each, found in bodies.items() if found)]
        if form.get("at_least_one"):  # then the output must begin with a tag
            first: Node = ["any", *whole]
            return first if form.get("stop_after_first") else ["seq", first, ["repeat", 0, None, later], FREE]
        if form.get("stop_after_first"):
            return ["any", later, FREE]
        return ["seq", ["repeat", 0, None, later], FREE]

    def separated(self, field: str, form: Form, depth: int) -> Node:
        tags = _list(f"{field}.tags", form.get("tags"))
        one: Node = ["any", *(self.tag(f"{field}.tags[{at}]", _form(tag), depth + 1) for at, tag in enumerate(tags))]
        separator = _text(f"{field}.separator", form.get("separator"))
        many: Node = one
        if not form.get("stop_after_first"):
            many = ["seq", one, ["repeat", 0, None, ["seq", ["exact", separator], one]]]
        return many if form.get("at_least_one") else ["repeat", 0, 1, many]


KINDS: dict[str, tuple[Callable[[_Reader, str, Form, int], Node], tuple[str, ...]]] = {
    "const_string": (_Reader.const, ("value",)),
    "json_schema": (_Reader.schema, ("json_schema", "style")),
    "regex": (_Reader.regex, ("pattern",)),
    "grammar": (_Reader.grammar, ("grammar",)),
    "any_text": (_Reader.const, ()),
    "sequence": (_Reader.sequence, ("elements",)),
    "or": (_Reader.either, ("elements",)),
    "tag": (_Reader.tag, ("begin", "content", "end")),
    "triggered_tags": (_Reader.triggered, ("triggers", "tags", "at_least_one", "stop_after_first")),
    "tags_with_separator": (_Reader.separated, ("tags", "separator", "at_least_one", "stop_after_first")),
}


def _form(value: Any) -> Form:
    return value if isinstance(value, dict) else {}


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(field, "must be a string, and not empty")
    return value


def _list(field: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _wrong(field, "must be a list, and not empty")
    return value


def _wrong(field: str, why: str) -> RequestError:
    return RequestError(f"{field}: {why}", param=field.partition(".")[0])
