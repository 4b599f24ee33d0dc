"""Every flag of vLLM's parser, and every argument of its LLM, is handled here: none is unknown.

scripts/vllm_flags.py writes the list from an installed vLLM; flags added by a newer version fail here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pd_cluster.errors import ConfigError
from pd_cluster.offline.llm_arguments import config_of
from pd_cluster.settings.engine_config import SHIPPED_MODEL
from pd_cluster.settings.flag_file import FLAG
from pd_cluster.settings.flags_without_setting import Takes
from pd_cluster.settings.serve_options import settings
from pd_cluster.settings.value_spellings import IN_OTHER_UNITS
from pd_cluster.settings.vllm_flags_without_setting import FAMILIES, foreign
from tests.unit.test_flags import HONOURED, parse

LIST = Path(__file__).parents[1] / "data" / "vllm_flags.txt"
MISSING = object()
# Flags whose vLLM defaults request a missing feature: requests may not choose how images are read.
OTHER_DEFAULTS = ("--trust-request-mm-kwargs",)


class Theirs(NamedTuple):
    """A flag of vLLM: long names, --no- form, short names, and default or MISSING."""

    names: list[str]
    off: str
    short: list[str]
    default: Any

    @property
    def argv(self) -> list[str]:
        """Returns the flag with its default as value."""
        if self.off:
            return [self.names[0] if self.default else self.off]
        if isinstance(self.default, list):
            return [self.names[0], json.dumps(self.default)] if self.names[0].startswith("--allowed-") else []
        if isinstance(self.default, bool):
            return [self.names[0]] if self.default else []
        written = self.default if isinstance(self.default, str) else json.dumps(self.default)
        return [] if written == "" else [f"{self.names[0]}={written}"]


def read() -> tuple[list[Theirs], list[str]]:
    first, *lines = LIST.read_text(encoding="utf-8").splitlines()
    assert first.startswith("# vLLM "), first
    at = lines.index("[LLM]")
    return [_flag(line) for line in lines[:at]], lines[at + 1 :]


def _flag(line: str) -> Theirs:
    names, equals, default = line.partition(" = ")
    words = names.split()
    off = next((each for each in words if f"--{each[5:]}" in words and each.startswith("--no-")), "")
    long = [each for each in words if each.startswith("--") and each != off]
    value = json.loads(default) if equals else MISSING
    return Theirs(long, off, [each for each in words if not each.startswith("--")], value)


FLAGS, ARGUMENTS = read()


def known_names() -> Iterator[str]:
    yield from (FLAG, *HONOURED, *IN_OTHER_UNITS)
    yield from (each.flag for each in settings().values())


@pytest.mark.parametrize("theirs", FLAGS, ids=lambda each: each.names[0])
def test_every_flag_has_an_answer(theirs: Theirs) -> None:
    for name in theirs.names:
        assert name in known_names() or foreign(name) is not None, f"{name} is in none of the lists"
    if theirs.off and (found := foreign(theirs.names[0])) is not None:
        assert found[0].takes is Takes.SWITCH, f"{theirs.names[0]} is a switch in vLLM"
        assert foreign(theirs.off) == (found[0], True)
    for name in theirs.short:
        argv = [name] if theirs.off else [name, "1"]
        assert not _error(lambda argv=argv: parse(*argv)).startswith("un")


def _error(call: Callable[..., object]) -> str:
    """Returns the text of the call's ConfigError; "" if it raises none."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "theirs",
    [each for each in FLAGS if each.default is not MISSING and each.argv and each.names[0] not in OTHER_DEFAULTS],
    ids=lambda each: each.names[0],
)
def test_vllms_own_defaults_may_be_written_out(theirs: Theirs) -> None:
    _, warnings = parse("--port=1", *theirs.argv)
    assert len(warnings) <= 1


@pytest.mark.parametrize("name", [name for name in ARGUMENTS if name != "model" and not name.startswith("_")])
def test_every_argument_of_llm_has_an_answer(name: str) -> None:
    assert "unknown argument" not in _error(lambda: config_of({"model": str(SHIPPED_MODEL), name: "value"}))


def test_what_the_lists_have_of_vllms_switches_is_true() -> None:
    """If a flag with a value was listed as a switch, its value would be an unexpected argument."""
    with_values = {name for each in FLAGS if not each.off and each.default is not False for name in each.names}
    switches = {each.name for family in FAMILIES for each in family.flags() if each.takes is Takes.SWITCH}
    assert switches & with_values == set()
