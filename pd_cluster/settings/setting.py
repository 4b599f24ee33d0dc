"""A setting is a field of a config struct whose annotation states its written form, its valid values and its scope.

    max_num_seqs: Annotated[int, ENGINE("Maximum number of sequences in a step.", checks=(at_least(1),))] = 256

The command line, its help, `LLM`'s arguments and the flags of worker processes are generated from these declarations.
Knows nothing of particular settings.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from pd_cluster.errors import ConfigError, called, flag_of

T = TypeVar("T", bound=msgspec.Struct)
VARIABLE = "PD_CLUSTER_SERVE_"  # prefix of a setting's environment variable
CHOICES = "{choices}"  # placeholder in a help text for choices that are known only when the command line is built
UNITS = ("_s", "_gib")  # field suffixes that are not part of the setting's name


class Panel(enum.Enum):
    """A section of `serve --help`, in order; the value is its title."""

    BASIC = None
    ENGINE = "Engine"
    KV = "KV handover"
    SCHEDULER = "Scheduler"
    REQUESTS = "Scheduler: requests"
    HTTP = "Scheduler: HTTP"
    TIMES = "Times"


class Scope(enum.Enum):
    """The processes to which a setting applies."""

    ENGINE = "wherever an engine runs"
    TEXT = "wherever requests are read and answers are written"
    WORKERS = "in worker processes"
    SERVER = "where requests come over HTTP"


@dataclass(frozen=True, slots=True)
class Check:
    """A rule for a value, and the end of the error for a value that breaks it."""

    accepts: Callable[[Any], bool]
    says: str


def at_least(least: int, says: str = "") -> Check:
    return Check(lambda value: value >= least, says or f"must be at least {least}")


def at_most(most: float, unit: str = "") -> Check:
    return Check(lambda value: value <= most, f"must be at most {most:g}{unit}")


def within(least: int, most: int) -> Check:
    return Check(lambda value: least <= value <= most, f"must be in {least} to {most}")


def finite(says: str) -> Check:
    """Returns a check that accepts 0 and positive finite numbers."""
    return Check(lambda value: 0 <= value < math.inf, says)


POSITIVE = Check(lambda value: 0 < value < math.inf, "must be above 0 and finite")


def one_of(known: Sequence[str]) -> Check:
    expected = " or ".join(known) if len(known) <= 2 else f"one of {', '.join(known)}"
    return Check(lambda value: value in known, f"expected {expected}")


class Form(NamedTuple):
    """How a value is written, if it differs from the stored value. `read(name, written)` raises ConfigError.

    `takes_mappings`: Python callers may give a mapping instead of the text. `bare`: the value of a flag without
    `=VALUE`.
    """

    kind: Any
    read: Callable[[str, Any], Any]
    write: Callable[[Any], Any]
    takes_mappings: bool = False
    bare: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """The part of a field's annotation that makes it a setting."""

    help: str
    panel: Panel
    scope: Scope
    _: dataclasses.KW_ONLY
    name: str = ""  # "": the field's name without its unit
    default: Any = msgspec.UNSET  # the default as written, if not the field's; None: the field's applies
    checks: tuple[Check, ...] = ()
    form: Form | None = None
    also: tuple[str, ...] = ()  # further names
    has_off: bool = False  # a switch that also has a --no- form
    is_several: bool = False  # one flag may have several values
    is_secret: bool = False
    variable: str = ""  # an additional environment variable
    metavar: str | None = None
    after: str = ""  # the previous setting on the help screen, if another struct declares it
    detail: str = ""  # the text in `pd-cluster check`


def variable_of(name: str) -> str:
    """Returns the environment variable of a setting, as typer names it."""
    return f"{VARIABLE}{name.upper()}"


@dataclass(frozen=True, slots=True)
class DeclaredSetting:
    """A setting and its field. `kind` and `default` are those of the written value."""

    field: str
    name: str
    kind: Any
    default: Any
    checks: tuple[Check, ...]
    setting: Setting

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def variables(self) -> tuple[str, ...]:
        own = variable_of(self.name)
        return (self.setting.variable, own) if self.setting.variable else (own,)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns its names in Python, the setting's name first."""
        is_engines = self.setting.scope is Scope.ENGINE  # these may also be given by the name in EngineConfig
        return tuple(dict.fromkeys((self.name, *self.setting.also, self.field if is_engines else self.name)))

    @property
    def bare(self) -> str:
        return self.setting.form.bare if self.setting.form is not None else ""

    @property
    def takes_mappings(self) -> bool:
        return self.setting.form is not None and self.setting.form.takes_mappings

    def read(self, written: Any) -> Any:
        """Converts a written value. Raises ConfigError."""
        return written if self.setting.form is None else self.setting.form.read(self.name, written)

    def write(self, value: Any) -> Any:
        return value if self.setting.form is None else self.setting.form.write(value)

    def check(self, value: Any) -> None:
        """Checks a value. Raises ConfigError."""
        for each in self.checks if value is not None else ():
            if not each.accepts(value):
                written = self.write(value)
                shown = f"{written:g}" if isinstance(written, float) else repr(written)
                place = called(self.name) if self.setting.is_secret else f"{called(self.name)} {shown}"
                raise ConfigError(f"{place}: {each.says}")

    def flags(self, written: Any) -> list[tuple[str, ...]]:
        """Returns the flags, with their values, that express this written value on a command line."""
        if isinstance(written, bool):
            return [(self.flag,)] if written else [(f"--no-{self.flag[2:]}",)] if self.setting.has_off else []
        values = written if isinstance(written, list) else [] if written is None else [written]
        return [(self.flag, str(value)) for value in values]


@functools.cache
def declared(group: type[msgspec.Struct]) -> tuple[DeclaredSetting, ...]:
    """Returns the settings among a struct's fields, in order."""
    hints = get_type_hints(group, include_extras=True)
    return tuple(_declarations(group, hints))


def _declarations(group: type[msgspec.Struct], hints: Mapping[str, Any]) -> Iterator[DeclaredSetting]:
    for field in msgspec.structs.fields(group):
        hint = hints[field.name]
        setting = next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Setting)), None)
        if setting is None:
            continue
        hint, form, checks = get_args(hint)[0], setting.form, setting.checks
        if get_origin(hint) is Literal:
            checks, hint = (*checks, one_of(get_args(hint))), str
        default = setting.default
        if default is msgspec.UNSET:
            own = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
            default = own if form is None else form.write(own)
        kind = hint if form is None else form.kind
        name = setting.name or _without_unit(field.name)
        kind = kind | None if default is None else kind
        yield DeclaredSetting(field.name, name, kind, default, checks, setting)


def _without_unit(field: str) -> str:
    unit = next((unit for unit in UNITS if field.endswith(unit)), "")
    return field.removesuffix(unit)


def check(config: msgspec.Struct) -> None:
    """Raises ConfigError for a field that breaks a rule of its setting."""
    for each in declared(type(config)):
        each.check(getattr(config, each.field))


def read(group: type[T], given: Mapping[str, Any], **own: Any) -> T:
    """Returns a struct from written values by name, and from fields that are not settings. Raises ConfigError."""
    fields = {each.field: each.read(given[each.name]) for each in declared(group) if given[each.name] is not None}
    made = group(**{**fields, **own})
    check(made)
    return made


# ---- forms


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        example = """'{"rope_theta": 10000}'"""
        raise ConfigError(f"{called(name)} {text!r}: expected a JSON object, such as {example}") from None


def _no_empty(values: Sequence[Any]) -> list[Any] | None:
    return list(values) or None


TEXTS = Form(list[str], lambda name, written: tuple(written), _no_empty)
NUMBERS = Form(list[int], lambda name, written: tuple(written), _no_empty)
NEGATED = Form(bool, lambda name, written: not written, lambda value: not value)
OBJECT = Form(str, _object, json.dumps, takes_mappings=True)
