"""Converts the text of one parameter to JSON: strings unchanged, other values to a type that their schema allows.

Knows nothing of the markup around a value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pd_cluster.parsers.pythonic import as_json, encodable
from pd_cluster.parsers.schema_types import Types
from pd_cluster.parsers.text_stream import BLANKS, Emit

PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
_ANY_CASE = {"true": "true", "false": "false", "null": "null", "none": "null"}
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WHOLE = re.compile(r"-?[0-9]+\.0+")
_MAX_NUMBER_NUM_CHARS = 400  # more than any float has


class TextValue:
    """Emits a string's text, without one newline at each end if `line` is a newline. Holds back blanks at the end."""

    def __init__(self, line: str, emit: Emit) -> None:
        self._line, self._emit = line, emit
        self._is_first, self._held = True, ""

    def add(self, text: str) -> None:
        if self._line and self._is_first and text:
            self._is_first = False
            text = text.removeprefix(self._line)
        text = self._held + text
        shown = text.rstrip(BLANKS)
        self._held = text[len(shown) :]
        if shown:
            self._emit(shown)

    def close(self) -> None:
        """Emits the blanks that belong to the text before its end marker."""
        if held := self._held.removesuffix(self._line) if self._line else self._held:
            self._emit(held)


def value_of(text: str, types: Types, line: str) -> str:
    """Returns a parameter's JSON text. `types`: the types that its schema allows; empty: unknown."""
    for written in _readings(text.strip(), types):
        if _is_one_of(written, types):
            is_whole = "integer" in types and "number" not in types and _WHOLE.fullmatch(written)
            return written.partition(".")[0] if is_whole else written
    return json.dumps(text.removeprefix(line).removesuffix(line) if line else text, ensure_ascii=False)


def members_of(text: str) -> dict[str, str]:
    """Returns the members of a JSON object or Python dict, with their JSON texts; {} for any other text."""
    written = as_json(text.strip())
    value = json.loads(written, parse_constant=_no_constant) if written is not None else None
    if not isinstance(value, dict):
        return {}
    return {encodable(str(key)): encodable(json.dumps(each, ensure_ascii=False)) for key, each in value.items()}


def _readings(shown: str, types: Types) -> Iterator[str]:
    """Yields possible JSON texts. If the schema excludes strings, also reads models' other spellings: words in any
    case, numbers such as `.5`, Python's lists, and values in quotes.
    """
    yield PYTHON_NAMES.get(shown, shown)
    if not types or "string" in types:
        return
    if (word := _ANY_CASE.get(shown.lower())) is not None:
        yield word
    if len(shown) <= _MAX_NUMBER_NUM_CHARS and _NUMBER.fullmatch(shown):
        number = float(shown) if re.search(r"[.eE]", shown) else int(shown)
        yield json.dumps(number)
    if shown[:1] in ("[", "{", "(") and (literal := as_json(shown)) is not None:
        yield literal
    if len(shown) > 1 and shown[0] == shown[-1] and shown[0] in "\"'":
        yield from _readings(shown[1:-1].strip(), types)


def _is_one_of(written: str, types: Types) -> bool:
    try:
        value = json.loads(written, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return not types or bool(_kinds(value) & types)


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _kinds(value: Any) -> set[str]:
    match value:
        case bool():
            return {"boolean"}
        case None:
            return {"null"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
    return {"object"}
