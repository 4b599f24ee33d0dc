"""Faults in rank tables: the file, the field, the value found and the value expected.

Knows nothing of the tables themselves.

RankTableError      a table, or a set of tables, that cannot be used
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Final


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING: Final = _Missing()
"""The `value` of a fault whose field is missing (JSON's null is None)."""

_SHORT: Final = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxother = 2, 4, 4, 80, 80


@dataclass(frozen=True)
class Fault:
    """One fault. `str()` gives one line, whatever bytes the file contains."""

    file: str
    field: str
    value: object
    expected: str
    way_out: str = ""

    def __str__(self) -> str:
        line = f"{self.file}: {self.field}: found {_SHORT.repr(self.value)}, expected {self.expected}"
        if self.way_out:
            line += f"; {self.way_out}"
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)

    def error(self) -> RankTableError:
        return RankTableError(self.file, self.field, self.value, self.expected, self.way_out)


class RankTableError(Exception):
    """A `Fault` that prevents the use of the table."""

    def __init__(self, file: str, field: str, value: object, expected: str, way_out: str = "") -> None:
        super().__init__(file, field, value, expected, way_out)
        self.fault = Fault(file, field, value, expected, way_out)

    @property
    def file(self) -> str:
        return self.fault.file

    @property
    def field(self) -> str:
        return self.fault.field

    @property
    def value(self) -> object:
        return self.fault.value

    @property
    def expected(self) -> str:
        return self.fault.expected

    def __str__(self) -> str:
        return str(self.fault)
