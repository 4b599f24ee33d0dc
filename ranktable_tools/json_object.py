"""Reads one JSON object of a file, field by field. Errors name the file and the field's path.

Knows nothing of rank tables.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ranktable_tools.errors import MISSING, RankTableError


@dataclass(frozen=True)
class JsonObject:
    """`field` is this object's own path in the file: `server_group_list[1].server_list[0]`, "" at the top."""

    file: str
    field: str
    members: dict[str, object]
    known: tuple[str, ...] = ()

    @staticmethod
    def of(file: str, field: str, value: object, expected: str, known: Sequence[str] = ()) -> JsonObject:
        """`known`: the keys that have a meaning; other keys are kept. Raises RankTableError."""
        if not isinstance(value, dict):
            raise RankTableError(file, field or "(top level)", value, expected)
        return JsonObject(file, field, value, tuple(known))

    def path(self, key: str) -> str:
        return f"{self.field}.{key}" if self.field else key

    def refuse(self, key: str, value: object, expected: str, way_out: str = "") -> RankTableError:
        return RankTableError(self.file, self.path(key), value, expected, way_out)

    @property
    def foreign(self) -> dict[str, object]:
        """The fields that other programs wrote into this object."""
        return {key: value for key, value in self.members.items() if key not in self.known}

    def text(self, key: str, accept: Callable[[str], bool], expected: str, way_out: str = "") -> str:
        value = self.members.get(key, MISSING)
        if not isinstance(value, str) or not accept(value):
            near = difflib.get_close_matches(key, self.foreign, n=1, cutoff=0.6) if value is MISSING else []
            raise self.refuse(
                key, value, expected, way_out or (f"is {near[0]!r} meant to be this field?" if near else "")
            )
        return value

    def one_of(self, key: str, allowed: Iterable[str], way_out: str = "") -> str:
        choices = tuple(allowed)
        return self.text(key, choices.__contains__, " or ".join(map(repr, choices)), way_out)

    def objects(self, key: str, expected: str, known: Sequence[str] = ()) -> Iterator[JsonObject]:
        """Yields the members of the array `key`, each of which must be an object."""
        value = self.members.get(key, MISSING)
        if not isinstance(value, list):
            raise self.refuse(key, value, f"an array of {expected}")
        for index, item in enumerate(value):
            yield JsonObject.of(self.file, f"{self.path(key)}[{index}]", item, f"an object: {expected}", known)
