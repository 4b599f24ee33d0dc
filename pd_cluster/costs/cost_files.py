"""Reads and writes costs as JSON files; linear_costs.py defines the fields."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pd_cluster.costs.linear_costs import Costs, StepWork
from pd_cluster.errors import ConfigError, first_line
from pd_cluster.output_files import write_output

MOST_NBYTES = 1 << 20
Kind = TypeVar("Kind", bound=msgspec.Struct)


def read_costs(path: str | Path, flag: str = "--costs") -> Costs:
    """Reads a file of costs. Raises a ConfigError that names the flag, the file, the field and its value."""
    where = f"{flag} {path}"
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_NBYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from None
    if len(data) > MOST_NBYTES:
        raise ConfigError(f"{where}: larger than {MOST_NBYTES} bytes; expected a file of pd-cluster profile")
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not JSON: {first_line(error)}") from None
    costs = _read(Costs, found, where, "")
    for work in (StepWork(num_rows=1 + costs.step.num_flat_rows, num_context_tokens=1), StepWork(num_prompt_tokens=1)):
        if not costs.step.seconds(work):
            raise ConfigError(f"{where}: step: a step of {_words(work)} takes no time at all; expected more than 0 s")
    return costs


def write_costs(path: str | Path, costs: Costs, flag: str = "--out") -> None:
    """Writes a file of costs. Raises ConfigError if it cannot be written."""
    write_output(str(path), flag, msgspec.json.format(msgspec.json.encode(_shown(costs)), indent=2) + b"\n")


def _shown(struct: msgspec.Struct) -> dict[str, Any]:
    values = ((name, getattr(struct, name)) for name in struct.__struct_fields__)
    return {name: _shown(value) if isinstance(value, msgspec.Struct) else value for name, value in values}


def _read(kind: type[Kind], found: object, where: str, prefix: str) -> Kind:
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: {prefix.rstrip('.') or 'the file'} is {_short(found)}; expected a JSON object")
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for name in found:
        if name not in fields:
            raise ConfigError(f"{where}: {prefix}{name}: no such field; expected {', '.join(fields)}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in found:
            values[name] = _value(field.type, found[name], where, prefix + name)
        elif field.required:
            raise ConfigError(f"{where}: {prefix}{name} is missing")
    return kind(**values)


def _value(kind: Any, found: object, where: str, name: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _read(kind, found, where, f"{name}.")
    try:
        value = msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {name} is {_short(found)}: {first_line(error)}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: {name} is {_short(found)}: expected a finite number")
    return value


def _short(value: object) -> str:
    return repr(value)[:60]


def _words(work: StepWork) -> str:
    return f"{work.num_prompt_tokens} prompt token" if work.num_prompt_tokens else f"{work.num_rows} decoding rows"
