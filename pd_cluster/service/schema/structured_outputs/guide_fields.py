"""Converts a request's fields (vLLM's old and new ones, and OpenAI's) to the guide that they ask for.

Every refusal is a RequestError that names the field. guide_check.py decides whether a guide can be used.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.service.schema.structured_outputs.json_schemas import without_remarks
from pd_cluster.service.schema.structured_outputs.structural_tags import guide_of_format
from pd_cluster.settings.request_settings import GUIDED_BACKENDS
from pd_cluster.types import MAX_GUIDE_NUM_CHARS, Guide

MAX_SCHEMA_DEPTH = 64
MAX_WHITESPACE_NUM_CHARS = 256
NO_WHITESPACE = ""
OPTIONS = "x-guidance"  # llguidance's key for a schema's whitespace; not for clients
NAMES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {  # parameters of structured_outputs -> the values without effect
    "disable_fallback": (False, True),  # there is only one library
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False, True),  # handled separately
    "whitespace_pattern": (),
}


class Asked(NamedTuple):
    field: str
    guide: Guide


class GuideFields(Protocol):
    """The fields of a request that determine its guide."""

    guided_json: str | dict[str, Any] | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    guided_decoding_backend: str | None
    guided_whitespace_pattern: str | None
    structured_outputs: dict[str, Any] | None
    response_format: dict[str, Any] | None

    @property
    def model_fields_set(self) -> set[str]: ...


_NAMES = frozenset(GuideFields.__annotations__)


def guide_of(request: GuideFields) -> Asked | None:
    """Returns the guide that the output must follow, and the field that asks for it. Raises RequestError."""
    if _NAMES.isdisjoint(request.model_fields_set):
        return None
    backend = request.guided_decoding_backend
    if backend is not None and backend not in GUIDED_BACKENDS:
        raise RequestError(
            f"guided_decoding_backend: {reprlib.repr(backend)} is unknown; "
            f"expected one of {', '.join(GUIDED_BACKENDS)}",
            param="guided_decoding_backend",
        )
    found = [*_guided(request), *_structured_outputs(request), *_response_format(request)]
    if len(found) > 1:
        raise RequestError(
            f"{found[1].field}: {found[0].field} also constrains the output; give one of the two",
            param=found[1].field.partition(".")[0],
        )
    if request.guided_whitespace_pattern is not None and not (found and found[0].guide.kind.startswith("json")):
        raise RequestError(
            "guided_whitespace_pattern: needs a constraint to JSON, such as guided_json",
            param="guided_whitespace_pattern",
        )
    for field, guide in found:
        if len(guide.text) > MAX_GUIDE_NUM_CHARS:
            raise _wrong(field, f"{len(guide.text)} characters, at most {MAX_GUIDE_NUM_CHARS} are allowed")
    return found[0] if found else None


def _guided(request: GuideFields) -> list[Asked]:
    """Reads vLLM's parameters of 0.6."""
    found = []
    for name in ("json", "regex", "choice", "grammar"):
        field = f"guided_{name}"
        value = getattr(request, field)
        if value is not None:
            whitespace = _whitespace("guided_whitespace_pattern", request.guided_whitespace_pattern)
            found.append(Asked(field, MAKERS[name](field, value, whitespace)))
    return found


def _structured_outputs(request: GuideFields) -> list[Asked]:
    """Reads vLLM's current parameter. Null and a false `json_object` have no effect."""
    given = {name: value for name, value in (request.structured_outputs or {}).items() if value is not None}
    whitespace = _whitespace(
        "structured_outputs.whitespace_pattern", given.pop("whitespace_pattern", request.guided_whitespace_pattern)
    )
    if given.get("disable_any_whitespace") is True:
        if whitespace is not None:
            raise _wrong("structured_outputs.disable_any_whitespace", "conflicts with whitespace_pattern; give one")
        whitespace = NO_WHITESPACE
    found = []
    for name, value in given.items():
        field = f"structured_outputs.{name}"
        if name in NAMES:
            if name != "json_object" or value is not False:
                found.append(Asked(field, MAKERS[name](field, value, whitespace)))
        elif name not in WITHOUT_EFFECT:
            raise _wrong(reprlib.repr(field)[1:-1], f"not known; known are {', '.join(NAMES)}")
        elif not any(value is neutral for neutral in WITHOUT_EFFECT[name]):
            raise _wrong(field, f"{reprlib.repr(value)} is not supported; leave it out")
    if request.structured_outputs is not None and not found:
        raise _wrong("structured_outputs", f"needs one of {', '.join(NAMES)}")
    return found


def _response_format(request: GuideFields) -> list[Asked]:
    """Reads OpenAI's field. A schema given with `json_object` is enforced, too."""
    given = request.response_format
    if given is None or given.get("type") == "text":
        return []
    kind, field = given.get("type"), "response_format"
    whitespace = _whitespace("guided_whitespace_pattern", request.guided_whitespace_pattern)
    if kind == "json_object":
        schema = given.get("schema")
        if schema is None:
            return [Asked(field, _json_object(field, True, whitespace))]
        return [Asked(field, _json(f"{field}.schema", schema, whitespace))]
    if kind == "json_schema":
        inner = given.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict):
            raise _wrong(f"{field}.json_schema", 'needs a schema, as in {"name": "…", "schema": {…}}')
        return [Asked(field, _json(f"{field}.json_schema.schema", schema, whitespace))]
    if kind == "structural_tag":
        return [Asked(field, _structural_tag(field, given, whitespace))]
    raise _wrong(f"{field}.type", f"{reprlib.repr(kind)}; expected text, json_object, json_schema or structural_tag")


def compact(asked: Asked) -> Asked:
    """Returns a guide without whitespace between the parts of JSON, unless the request gives a pattern for it."""
    if asked.guide.kind not in ("json", "json_object"):
        return asked
    schema = msgspec.json.decode(asked.guide.text or '{"type":"object"}')
    text = _encoded({OPTIONS: {"whitespace_pattern": NO_WHITESPACE}, **schema})
    return Asked(asked.field, Guide("json", text))


# ---- a guide's text


def _json(field: str, value: Any, whitespace: str | None) -> Guide:
    schema = _decoded(field, value)
    if not isinstance(schema, dict):
        raise _wrong(field, "a schema must be a JSON object")
    if OPTIONS in schema:
        raise _wrong(field, f"{OPTIONS} is not supported")
    if is_deeper(schema, MAX_SCHEMA_DEPTH):
        raise _wrong(field, f"nested more than {MAX_SCHEMA_DEPTH} deep")
    options = {} if whitespace is None else {OPTIONS: {"whitespace_pattern": whitespace}}
    return Guide("json", _encoded({**without_remarks(schema), **options}))


def _json_object(field: str, value: Any, whitespace: str | None) -> Guide:
    if value is not True:
        raise _wrong(field, f"{reprlib.repr(value)}; must be true")
    return Guide("json_object") if whitespace is None else _json(field, {"type": "object"}, whitespace)


def _regex(field: str, value: Any, whitespace: str | None) -> Guide:
    return Guide("regex", _text(field, value))


def _grammar(field: str, value: Any, whitespace: str | None) -> Guide:
    return Guide("grammar", _text(field, value))


def _choice(field: str, value: Any, whitespace: str | None) -> Guide:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise _wrong(field, "must be a list of strings, and not empty")
    return Guide("choice", _encoded(list(dict.fromkeys(value))))


def _structural_tag(field: str, value: Any, whitespace: str | None) -> Guide:
    """Reads a tree of formats, or vLLM's earlier form: structures of begin, schema and end, and their triggers."""
    given = _decoded(field, value)
    if isinstance(given, dict) and isinstance(given.get("format"), dict):
        return guide_of_format(field, given["format"])
    if not isinstance(given, dict) or "format" in given:
        raise _wrong(field, 'expected {"format": {…}}, or {"structures": [{"begin", "schema", "end"}, …], "triggers"}')
    triggers = given.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise _wrong(f"{field}.triggers", "must be a list of strings, none of them empty")
    structures = given.get("structures")
    if not isinstance(structures, list) or not structures:
        raise _wrong(f"{field}.structures", "must be a list, and not empty")
    made = [_structure(f"{field}.structures[{at}]", each, triggers) for at, each in enumerate(structures)]
    return Guide("structural_tag", _encoded({"structures": made, "triggers": triggers}))


def _structure(field: str, value: Any, triggers: list[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("begin"), str) or not isinstance(value.get("end"), str):
        raise _wrong(field, "needs begin and end, two strings")
    if not any(value["begin"].startswith(trigger) for trigger in triggers):
        raise _wrong(f"{field}.begin", f"{reprlib.repr(value['begin'])} begins with none of the triggers")
    schema = msgspec.json.decode(_json(f"{field}.schema", value.get("schema", {}), None).text)
    return {"begin": value["begin"], "schema": schema, "end": value["end"]}


MAKERS: dict[str, Callable[[str, Any, str | None], Guide]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}


def structured_outputs_of(guide: Guide) -> dict[str, Any]:
    """Returns the value of `structured_outputs` that asks for this guide. Raises RequestError if none does."""
    if guide.kind not in MAKERS:
        raise RequestError(
            "tools: sampling_params cannot express a guide for calls or text after reasoning; leave out tool_choice "
            "and the constraint, or send the request to /v1/chat/completions",
            param="tools",
        )
    if guide.kind == "json_object":
        return {"json_object": True}
    if guide.kind in ("regex", "grammar"):
        return {guide.kind: guide.text}
    value = msgspec.json.decode(guide.text)
    options = value.pop(OPTIONS, {}) if isinstance(value, dict) else {}
    return {guide.kind: value, **options}


def _decoded(field: str, value: Any) -> Any:
    """Returns a JSON value that may be given directly or as a string."""
    if not isinstance(value, str):
        return value
    if len(value) > 2 * MAX_GUIDE_NUM_CHARS:
        raise _wrong(field, f"{len(value)} characters, at most {MAX_GUIDE_NUM_CHARS} are allowed")
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _wrong(field, f"not JSON: {str(error)[:120]}") from None


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(field, "must be a string, and not empty")
    return value


def _whitespace(field: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > MAX_WHITESPACE_NUM_CHARS:
        raise _wrong(field, f"must be a regex of at most {MAX_WHITESPACE_NUM_CHARS} characters")
    return value


def is_deeper(value: Any, most: int) -> bool:
    """Whether arrays and objects are nested more than `most` deep."""
    level = [value]
    for _ in range(most):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return any(isinstance(each, dict | list) for each in level)


def _wrong(field: str, why: str) -> RequestError:
    return RequestError(f"{field}: {why}", param=field.partition(".")[0])
