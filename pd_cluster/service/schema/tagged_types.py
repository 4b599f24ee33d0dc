"""Reads objects that have a field `type`: items, parts of contents, blocks.

Unsupported types, and fields that request unsupported features, are refused: the error names them and says what to send
instead.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from pd_cluster.errors import RequestError

Harmless = Any  # the type of a field without effect


def _unless_number(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise PydanticCustomError("literal_error", "Input should be False")
    return value


Off = Annotated[Literal[False], BeforeValidator(_unless_number)]  # a plain Literal would also accept 0 and 0.0


class TypedFields(BaseModel):
    """The fields of one type, or of a few. Unknown fields have no effect."""

    model_config = ConfigDict(strict=True, extra="allow")


def unless_empty(way_out: str) -> Callable[[Any], Any]:
    """Returns a validator that accepts only null and empty values. `way_out`: the reason, and what to do instead."""

    def check(value: Any) -> Any:
        if any(value.values()) if isinstance(value, Mapping) else value:
            raise PydanticCustomError("unserved", "{way_out}", {"way_out": way_out})
        return value

    return check


@dataclass(frozen=True, eq=False)  # hashed by identity, because pydantic hashes annotations
class TaggedTypes:
    """`noun`: the word for one such object. `refused`: a known but unsupported type -> what to do instead.

    As a field's metadata, it declares which objects the field may have; they are read later, one by one.
    """

    noun: str
    served: Mapping[str, type[TypedFields]]
    refused: Mapping[str, str] = field(default_factory=dict)
    way_out: str = "leave it out"  # for unknown types

    def check(self, kind: Any, place: str) -> type[TypedFields]:
        """Returns the class of the type's fields. Raises RequestError."""
        model = self.served.get(kind) if isinstance(kind, str) else None
        if model is None:
            way_out = self.refused.get(kind, self.way_out) if isinstance(kind, str) else self.way_out
            raise self.refusal(kind, place, way_out)
        return model

    def refusal(self, kind: Any, place: str, way_out: str) -> RequestError:
        shown = repr(kind) if isinstance(kind, str) and kind in self.refused else reprlib.repr(kind)
        what = f"{self.noun} of type {shown} is not supported here"
        return RequestError(f"{place}: {what}; {way_out}", param=field_of(place))

    def read(self, value: Any, place: str) -> TypedFields:
        """Returns the object at this path of the request. Raises RequestError."""
        return read_as(self.check(value.get("type") if isinstance(value, dict) else None, place), value, place)


def read_as(model: type[TypedFields], value: Any, place: str) -> TypedFields:
    """Returns the object as this model. Raises RequestError."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        given = first["input"]
        shown = f"{reprlib.repr(given)}: " if given is None or isinstance(given, bool | int | float | str) else ""
        raise RequestError(f"{place}{where}: {shown}{first['msg']}", param=field_of(place)) from None


def field_of(place: str) -> str:
    """Returns the top-level field of a path."""
    return place.partition("[")[0]
