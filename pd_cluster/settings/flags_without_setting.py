"""The format of the list of other servers' flags that have no setting here, grouped by reason.

A flag is written as on vLLM's command line:

    --master-port          a flag with a value
    --ignore-patterns+     a flag with one or more values
    --[no-]numa-bind       a switch; its values are True and False
    --nnodes=1             values, separated by |, that are accepted because this server does the same anyway; a
                           value with a trailing ! is accepted with a warning, because it has no effect
    --dp-*                 every flag with this prefix

`accepted` flags have no effect, whatever their value. `refused` flags are refused, except with an accepted value, and
except a switch that is off. Reasons name settings by `called`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

NOTHING = ("", "{}", "[]", "none", "null")  # values, in lower case, that any flag may have without effect


class Takes(Enum):
    """The number of values after a flag."""

    SWITCH = 0
    ONE = 1
    SEVERAL = 2


@dataclass(frozen=True, slots=True)
class FlagWithoutSetting:
    """A flag without a setting. `values`: the accepted values; None: any. `unmet`: accepted values that need a
    warning.
    """

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
    """Flags that share one reason."""

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
    """Returns name -> flag for all families."""
    return {each.name: each for family in families for each in family.flags()}
