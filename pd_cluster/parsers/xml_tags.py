"""A description of calls with arguments as parameters between tags. Reads only the insides of tags."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

from pd_cluster.parsers.schema_types import Types

TEXT: Types = frozenset({"string"})
OTHER_TYPES = ("number", "boolean", "object", "array", "null")
TYPES = ("string", "integer", *OTHER_TYPES)
NUMBER: dict[str, str] = {"integer": "number"}  # tags have one type for all numbers

_UNCLEAN = re.compile(r"[\s<>{}\"]")
_UNCLEAN_KEY = re.compile(r"[<>\n]")
_ATTRIBUTE = re.compile(r'(?P<text>[^"\n]*)(?:" (?P<attribute>[a-z]+)="(?P<value>[^"\n]*))?')
_CUT_ATTRIBUTE = re.compile(r'" ?[a-z]*(?:="[a-z]*"?)?$')


@dataclass(frozen=True)
class ValueKind:
    """The attribute, after a key, that states the type of the value.

    `text`: the attribute's value if the parameter is literal text. `other`: its value if the parameter is JSON; if this
    is "", the attribute names the JSON type.
    """

    attribute: str
    text: str
    other: str = ""

    def of(self, json_type: str) -> str:
        """Returns the attribute's value for a type."""
        if json_type == "string":
            return self.text
        return self.other or NUMBER.get(json_type, json_type)

    def may_be(self, said: str) -> bool:
        """Returns whether the attribute may have this value."""
        return said in ((self.text, self.other) if self.other else TYPES)

    def values(self, types: Types) -> list[str]:
        """Returns the values for these types except strings; without types, all values."""
        return list(dict.fromkeys(self.of(each) for each in sorted(types or OTHER_TYPES) if each != "string"))


@dataclass(frozen=True)
class XmlTags:
    """Calls between `begin` and `end`. A call has a name between the two texts of `name`, then parameters, then
    `close`.

    A parameter has a key between the texts of `key`, and a value between those of `value`.
    """

    begin: str
    end: str
    name: tuple[str, str]
    close: str
    key: tuple[str, str]
    value: tuple[str, str]
    line: str = ""  # a newline at each end of a value, not part of it
    lone: bool = False  # models also write a call without `begin`
    is_section: bool = False  # there may be several calls between `begin` and `end`
    begins: tuple[str, ...] = ()  # alternatives to `begin`
    keys: tuple[str, ...] = ()  # alternatives to the first text of `key`
    around: tuple[str, str] = ("", "")  # the texts that a guide requires around each call of a section
    fillers: tuple[str, ...] = ()  # meaningless markup, dropped outside of calls
    leads: tuple[str, ...] = ()  # the texts that a guide allows before the first call
    kind: ValueKind | None = None  # the attribute, after a key, that states the value's type
    index: str = ""  # the attribute, after a name, with the call's number
    escapes: bool = False  # names and keys are escaped as in XML
    quote: tuple[str, str] = ("", "")  # texts around a value, which may then contain tags
    body: tuple[str, str] = ("", "")  # texts around all arguments as one JSON object
    wrappers: tuple[str, ...] = ()  # keys under which models write all arguments as one object
    needs_tool: bool = False  # only a known tool can be called
    pieces: tuple[str, ...] = ()  # the tokens of the tags

    @property
    def markers(self) -> tuple[str, ...]:
        own = (self.begin, *self.begins, self.end, self.close, *self.name, *self.key, *self.value)
        tags = (*own, *self.around, *self.fillers, *self.quote, *self.body)
        return (*(text for text in tags if text.startswith("<") and text.endswith(">")), *self.pieces)

    @property
    def all_begins(self) -> tuple[str, ...]:
        """Returns the texts that open a section, or a call if there are no sections."""
        return (self.begin, *self.begins)

    @property
    def all_keys(self) -> tuple[str, ...]:
        return (self.key[0], *self.keys)

    def written(self, text: str) -> str:
        """Returns a name or a key as written in a tag."""
        return html.escape(text, quote=False).replace('"', "&quot;") if self.escapes else text

    def name_in(self, text: str) -> str:
        """Returns the name in a tag; "" if there is none."""
        text = text.strip()
        if self.index:
            found = _ATTRIBUTE.fullmatch(text)
            if found is None or found["attribute"] not in (None, self.index) or not (found["value"] or "0").isdigit():
                return ""
            text = found["text"]
        if self.escapes:
            return html.unescape(text) if text and not re.search(r"\s", text) else ""
        return text if text and not _UNCLEAN.search(text) else ""

    def key_in(self, text: str) -> tuple[str, str] | None:
        """Returns the key in a tag and its attribute's value; None if there is no key."""
        if self.kind is None:
            text = text.strip()
            return (text, "") if text and not _UNCLEAN_KEY.search(text) else None
        found = _ATTRIBUTE.fullmatch(text)
        if found is None or not found["text"] or found["attribute"] not in (None, self.kind.attribute):
            return None
        if found["attribute"] is not None and not self.kind.may_be(found["value"]):
            return None
        key = html.unescape(found["text"]) if self.escapes else found["text"]
        return (key, found["value"] or "") if self.escapes or not _UNCLEAN_KEY.search(key) else None

    def cut_key_in(self, text: str) -> str:
        """Returns the beginning of a key in a tag that the reply's end cuts short."""
        return _CUT_ATTRIBUTE.sub("", text) if self.kind is not None else text

    def types_of_value(self, types: Types, said: str) -> Types:
        """Returns a value's types. `types`: the schema's. `said`: the attribute's value; "" if it is missing.

        The schema decides, unless it allows both strings and other types; then the attribute decides.
        """
        if self.kind is None or not said or types == TEXT:
            return types
        if said == self.kind.text:
            return TEXT if not types or "string" in types else types
        return types


def present(*texts: str) -> tuple[str, ...]:
    """Returns the description's texts."""
    return tuple(text for text in texts if text)
