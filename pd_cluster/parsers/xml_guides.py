"""Guides for calls with arguments as parameters between tags.

A text value is literal, up to its end marker; any other value is JSON. Raises RequestError for schemas that guides
cannot express.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pd_cluster.parsers.guide_nodes import BLANK, FREE, Node, Tool
from pd_cluster.parsers.schema_types import plain_texts, resolved, types_of
from pd_cluster.parsers.tool_schema import REMARKS, must_be_plain, refused, schema_of
from pd_cluster.parsers.xml_tags import TEXT, XmlTags

FOLLOWED_IN_TEXT = {"type", "enum", "const", "minLength", "maxLength", "pattern", "format", "default", "examples"}
ANY_KEY: Node = ["pattern", r"[A-Za-z0-9_.-]{1,64}"]
ANY_INDEX: Node = ["pattern", "[0-9]{1,3}"]


def required_calls(tags: XmlTags, given: Sequence[Tool], most: int) -> Node:
    """Returns the node of one or more calls without other text."""
    if tags.is_section:
        many: Node = ["repeat", 1, most, _one(tags, given)]
        leads = [["repeat", 0, 1, ["marker", text]] for text in tags.leads]
        return ["seq", *leads, ["marker", tags.begin], many, ["marker", tags.end], *_trails(tags)]
    return ["repeat", 1, most, ["seq", ["marker", tags.begin], _one(tags, given), ["marker", tags.end]]]


def optional_calls(tags: XmlTags, given: Sequence[Tool], most: int | None) -> Node:
    """Returns the node of free text with calls; text that begins like a call must be one."""
    if tags.is_section:
        many: Node = ["repeat", 1, most, _one(tags, given)]
        section: Node = ["seq", ["until", *tags.all_begins], many, ["marker", tags.end]]
        if tags.lone:
            alone: Node = ["seq", ["until", tags.name[0]], _named(tags, given), ["repeat", 0, 1, ["marker", tags.end]]]
            section = ["any", section, alone]
        return ["seq", ["repeat", 0, most, ["seq", *_plain_markup(tags), section]], *_plain_markup(tags), FREE]
    begun: Node = ["seq", ["until", *tags.all_begins], *_opening(tags)]
    end: Node = ["marker", tags.end]
    if tags.lone:
        begun, end = ["any", begun, ["until", tags.name[0]]], ["repeat", 0, 1, end]
    return ["seq", ["repeat", 0, most, ["seq", begun, _named(tags, given), end]], FREE]


def _trails(tags: XmlTags) -> list[Node]:
    """Returns the nodes of the model's markup after calls."""
    trails = [text for text in tags.fillers if text not in tags.leads] if tags.leads else []
    return [["repeat", 0, 1, ["marker", text]] for text in trails]


def _plain_markup(tags: XmlTags) -> list[Node]:
    """Returns the nodes of free text, in which markup of special tokens may surround the answer."""
    return [["repeat", 0, None, ["until", *tags.fillers]]] if tags.leads else []


def _one(tags: XmlTags, given: Sequence[Tool]) -> Node:
    before, after = ([["marker", text]] if text else [] for text in tags.around)
    return ["seq", *before, *_opening(tags), _named(tags, given), *after]


def _opening(tags: XmlTags) -> list[Node]:
    """Returns the nodes before a name. The marker includes the blanks around it, so that guides need no lookahead."""
    if tags.name[0]:
        return [["marker", tags.name[0]]]
    return [] if tags.begin.endswith('"') else [BLANK]


def _named(tags: XmlTags, given: Sequence[Tool]) -> Node:
    """Returns the node of a call, from its name to its end."""
    return ["any", *(_tool(tags, tool) for tool in given)]


def _tool(tags: XmlTags, tool: Tool) -> Node:
    parameters: list[Node] = []
    if not tool.parameters:  # any arguments are valid
        parameters = [["repeat", 0, None, ["seq", _key(tags, ANY_KEY), _any_value(tags)]]]
    else:
        must_be_plain(tool)
        required = tool.parameters.get("required", [])
        properties: dict[str, Any] = tool.parameters.get("properties", {})
        for name in dict.fromkeys((*properties, *required)):
            key = _key(tags, ["text", tags.written(name)])
            one: Node = ["seq", key, _value(tags, tool, name, properties.get(name, True))]
            parameters.append(one if name in required else ["repeat", 0, 1, one])
    index: list[Node] = [["text", f'" {tags.index}="'], ANY_INDEX] if tags.index else []
    close: list[Node] = [["marker", tags.close]] if tags.close else []
    after: list[Node] = [["exact", tags.name[1]]] if tags.name[1] else []
    return ["seq", ["text", tags.written(tool.name)], *index, *after, *parameters, *close]


def _key(tags: XmlTags, name: Node) -> Node:
    """Returns the node up to the end of the key or to the attribute after it."""
    return ["seq", ["marker", tags.key[0]], name]


def _opened(tags: XmlTags, said: str) -> list[Node]:
    """Returns the nodes between the key and the value. `said`: the attribute's value."""
    attribute: list[Node] = [["text", f'" {tags.kind.attribute}="{said}']] if tags.kind is not None else []
    opening: list[Node] = [["marker", tags.value[0]]] if tags.value[0] else []
    return [*attribute, ["exact", tags.key[1]], *opening]


def _any_value(tags: XmlTags) -> Node:
    text = _free_text(tags, tags.value[1])
    if tags.kind is None:
        return ["seq", *_opened(tags, ""), text]
    others = (_json(tags, said, {}) for said in tags.kind.values(frozenset()))
    return ["any", ["seq", *_opened(tags, tags.kind.text), text], *others]


def _free_text(tags: XmlTags, end: str) -> Node:
    """Returns the node of any text and its end. Unquoted text must not contain an opening quote."""
    before, after = tags.quote
    if not before:
        return ["until", end]
    quoted: Node = ["seq", ["text", before], ["until", after], ["exact", end]]
    return ["any", quoted, ["seq", ["pattern", f"[^{before[0]}]*"], ["exact", end]]]


def _text(tags: XmlTags, tool: Tool, name: str, schema: Mapping[str, Any]) -> list[Node]:
    """Returns the nodes of a text with its schema, and of its end."""
    return text_nodes(tool, name, schema, tags.line, tags.value[1]) or [_free_text(tags, f"{tags.line}{tags.value[1]}")]


def _value(tags: XmlTags, tool: Tool, name: str, given: Any) -> Node:
    """Returns the node of a value, with the markup before it and its end."""
    types, schema = types_of(tool.parameters, name), resolved(given, tool.parameters)
    line: list[Node] = [["text", tags.line]] if tags.line else []
    if types == TEXT:
        said = tags.kind.text if tags.kind is not None else ""
        return ["seq", *_opened(tags, said), *line, *_text(tags, tool, name, schema)]
    if tags.kind is None:
        return _json(tags, "", schema_of(tool, given))
    found = [_json(tags, said, schema_of(tool, given)) for said in tags.kind.values(types)]
    opened = [*_opened(tags, tags.kind.text), *line]
    texts = _text_schemas(schema, tool.parameters)
    return ["any", *found, *(["seq", *opened, *_text(tags, tool, name, text)] for text in texts)]


def _text_schemas(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the schema if it allows texts, or those of its alternatives that do; may be empty."""
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            each = [resolved(one, root) for one in schema[key]]
            return [text for one in each for text in _text_schemas(one, root)]
    types = types_of({"properties": {"": schema}}, "")
    return [schema] if not types or "string" in types else []


def _json(tags: XmlTags, said: str, schema: Mapping[str, Any]) -> Node:
    line: list[Node] = [["text", tags.line]] if tags.line else []
    return ["seq", *_opened(tags, said), *line, ["json", schema], *line, ["exact", tags.value[1]]]


def text_nodes(tool: Tool, name: str, schema: Mapping[str, Any], line: str, end: str) -> list[Node]:
    """Returns the nodes of a text and of the marker after it; empty if any text is allowed. Raises RequestError."""
    closing: list[Node] = [*([["text", line]] if line else []), ["exact", end]]
    if others := sorted(set(schema) - FOLLOWED_IN_TEXT - REMARKS):
        raise refused(tool, f"{others[0]} of {name}")
    if (texts := plain_texts(schema)) is not None:
        return [["any", *(["text", text] for text in texts)], *closing]
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if pattern := schema.get("pattern"):
        if least or most is not None or not (pattern.startswith("^") and pattern.endswith("$")):
            raise refused(tool, f"pattern of {name}, unless it is from ^ to $ and without lengths,")
        return [["pattern", pattern[1:-1].replace("/", r"\/")], *closing]
    if least or most is not None:
        return [["pattern", f"[^<\\n]{{{least},{'' if most is None else most}}}"], *closing]
    return []
