"""Converts numbers that are written differently, such as "16" or 16.0 for 16, as pydantic's lax mode and vLLM do. Other
values, such as true, stay unchanged, so that the strict models refuse them.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

PATTERN = r"^\s*[+-]?[0-9]{1,32}(\.[0-9]{0,32})?([eE][+-]?[0-9]{1,3})?\s*$"  # a number in a string
_NUMBER = re.compile(PATTERN)
MOST_CHANGED = 1024  # longer lists are not converted


def with_numbers(data: dict[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    """Returns the data with converted numbers, in fields that take numbers."""
    fields, changed = number_fields(kind), {}
    for name, value in data.items():
        wanted = fields.get(name)
        if wanted is not None and type(value) is not wanted:  # a number of the right type stays as it is
            number = _number(value, wanted)
            if number is not value:
                changed[name] = number
    return data | changed if changed else data


@functools.cache
def number_fields(kind: type[BaseModel]) -> Mapping[str, type[int] | type[float]]:
    """Returns the fields whose values are numbers, or lists or objects of them."""
    found = {name: _wanted(field.annotation) for name, field in kind.model_fields.items()}
    return {name: wanted for name, wanted in found.items() if wanted is not None}


def _wanted(annotation: Any) -> type[int] | type[float] | None:
    leaves = _leaves(annotation) - {type(None)}
    return int if leaves == {int} else float if leaves in ({float}, {int, float}) else None


def _leaves(annotation: Any) -> set[Any]:
    """Returns the types of values and items; an object's keys are always texts."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _leaves(args[0])
    if origin is Union or origin is types.UnionType or origin is list:
        return set().union(*map(_leaves, args))
    return _leaves(args[1]) if origin is dict else {annotation}


def _number(value: Any, wanted: type[int] | type[float]) -> Any:
    """Returns the number in the wanted type, or the unchanged value."""
    if isinstance(value, list) and len(value) <= MOST_CHANGED:
        items = [_number(each, wanted) for each in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if isinstance(value, dict) and len(value) <= MOST_CHANGED:
        named = {name: _number(each, wanted) for name, each in value.items()}
        return named if any(named[name] is not value[name] for name in value) else value
    number = float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
    if not isinstance(number, float):
        return value
    if wanted is float:
        return number
    exact = int(value) if isinstance(value, str) and value.strip().lstrip("+-").isdigit() else None
    return exact if exact is not None else int(number) if number.is_integer() else value
