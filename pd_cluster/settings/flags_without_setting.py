"""How flags of other servers are listed that no setting here has: by the reason that they have in common.

A flag is written as vLLM's command line takes it:

    --master-port          with a value
    --ignore-patterns+     with one or more values
    --[no-]numa-bind       a switch; its values are True and False
    --nnodes=1             a value that asks for nothing that is not so; several are separated by |, and one with a
                           trailing ! asks for what is not here, which a warning says
    --dp-*                 every flag that begins so

`accepted` flags have no effect, whatever their value. `refused` ones are refused, except with such a value, and except
a switch that is off. Settings are named as `called` does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

NOTHING = ("", "{}", "[]", "none", "null")  # values in lower case that ask for nothing, of any flag with a value


class Takes(Enum):
    """The number of values after a flag."""

    SWITCH = 0
    ONE = 1
    SEVERAL = 2


@dataclass(frozen=True, slots=True)
class FlagWithoutSetting:
    """A flag without a setting. `values`: those that are accepted; None: any. `unmet`: those that need a warning."""

    name: str
    why: str
    takes: Takes
    values: tuple[str, ...] | None
    unmet: tuple[str, ...] = ()

    @property
    def is_prefix(self) -> bool:
        return self.name.endswith("*")

    @property
    def is_secret(self) -> bool:
        return self.name == "--hf-token"

    def accepts(self, value: str) -> bool:
        """Whether a value, written as on a command line, is accepted without effect."""
        if self.values is None or value in self.values:
            return True
        return self.takes is not Takes.SWITCH and value.lower() in NOTHING


@dataclass(frozen=True, slots=True)
class Family:
    """Flags with one reason."""

    why: str
    accepted: str = ""
    refused: str = ""

    def flags(self) -> Iterator[FlagWithoutSetting]:
        for written in self.accepted.split():
            yield self._read(written, None)
        for written in self.refused.split():
            yield self._read(written, ())

    def _read(self, written: str, values: tuple[str, ...] | None) -> FlagWithoutSetting:
        name, equals, listed = written.partition("=")
        takes = Takes.SWITCH if "[no-]" in name else Takes.SEVERAL if name.endswith("+") else Takes.ONE
        if equals:
            values = tuple(listed.replace("!", "").split("|"))
        elif values is not None and takes is Takes.SWITCH:
            values = ("False",)
        unmet = tuple(each[:-1] for each in listed.split("|") if each.endswith("!"))
        return FlagWithoutSetting(name.replace("[no-]", "").rstrip("+"), self.why, takes, values, unmet)


def table(families: Iterable[Family]) -> Mapping[str, FlagWithoutSetting]:
    """Returns the families' flags by their names."""
    return {each.name: each for family in families for each in family.flags()}
