"""Reads the file that `bench compare` takes, and makes all checks that need no process.

    model = "model-125m"                # folder, from the file's own; default: the model that the project ships
    cores = "0-1"                       # of each server; the client gets the others, if there are any
    rounds = 4                          # also: num_warmup_requests, deadline_s, client_processes
    speeds = [0.5, 1.0]                 # multiples of the load's own arrival rate; or `concurrency`: requests at once

    [goals]                             # seconds, or multiples of the first server's idle medians
    ttft_idle = 3.0
    tpot_idle = 2.0

    [workload]                          # `pd_cluster.bench.workloads.Workload`; several [[workload]] run together
    name = "log-normal"
    rate_per_s = 2.0

    [[server]]
    name = "hybrid"
    layout = "1H"                       # hybrid instances, or "1P1D"; or `vllm` = its Python, or `url`
    settings = { max_num_batched_tokens = 256 }

An error is one line with the file, the field, its value and a remedy.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pd_cluster import host
from pd_cluster.bench.compare.comparison_spec import LAYOUT, ComparedServer, ComparisonSpec, GoalsInTimes, LoadPart
from pd_cluster.bench.trace_files import TraceScale
from pd_cluster.bench.workloads import Workload
from pd_cluster.errors import ConfigError
from pd_cluster.settings.engine_config import SHIPPED_MODEL
from pd_cluster.settings.serve_options import ServeOptions, settings
from pd_cluster.settings.setting import Panel

PANELS = (Panel.ENGINE, Panel.KV, Panel.SCHEDULER)
FIXED_SETTINGS = (  # settings that the comparison or the layout determines
    *("tensor_parallel_size", "data_parallel_size", "uds", "scheduler_lease", "scheduler_index", "lease_duration"),
    *("admin_port", "admin_host", "join_port", "admin_allowed_hosts", "admin_token_file", "scheduler_key_file"),
)
VLLM_FLAGS_TO_GIVE = ("--host", "--port", "--model", "--uds")
T = TypeVar("T", bound=msgspec.Struct)


def read_spec(path: str) -> ComparisonSpec:
    """Reads a TOML or JSON file. Raises ConfigError, in one line."""
    place = Path(path)
    try:
        text = place.read_text("utf-8")
        raw = json.loads(text) if place.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # errors of both formats and of UTF-8
        kind = "JSON" if place.suffix == ".json" else "TOML"
        raise ConfigError(f"{path}: is not {kind}: {str(error).splitlines()[0]}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected an object with workload and server")
    try:
        return _spec(raw, place.absolute().parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.text}") from None


def _spec(raw: dict[str, Any], folder: Path) -> ComparisonSpec:
    for name in ("workload", "server"):
        if name not in raw:
            raise ConfigError(f"{name}: missing; give [{'[server]' if name == 'server' else name}]")
    given = dict(raw)
    parts, servers, goals = given.pop("workload"), given.pop("server"), given.pop("goals", {})
    if isinstance(parts, dict):
        parts = [parts]
    if not isinstance(parts, list) or not parts:
        raise ConfigError(f"workload: {parts!r}: expected a table, or several as [[workload]]")
    if not isinstance(servers, list) or len(servers) < 2:
        number = len(servers) if isinstance(servers, list) else 1
        raise ConfigError(f"server: {number} given; a comparison needs two or more [[server]]")
    workload = [_part(part, _at("workload", at, len(parts)), folder) for at, part in enumerate(parts)]
    contenders = [_contender(each, f"server[{at}]", folder) for at, each in enumerate(servers)]
    own = {"workload": [], "server": [], "goals": _struct(GoalsInTimes, goals, "goals")}
    spec = _struct(ComparisonSpec, given, "", taken=own)
    spec = msgspec.structs.replace(spec, workload=workload, server=contenders, **_model_of(spec.model, folder))
    _check(spec)
    return spec


def _at(name: str, at: int, number: int) -> str:
    return name if number == 1 else f"{name}[{at}]"


def _model_of(model: str, folder: Path) -> dict[str, str]:
    """Resolves a path relative to the file's folder; any other name may be a hub model. Raises ConfigError."""
    place = folder / Path(model).expanduser()
    if model and place.is_dir():
        return {"model": str(place)}
    if model.startswith(("/", ".", "~")):
        raise ConfigError(f"model: {model!r}: no such folder; a path counts from the file's own folder")
    return {"model": model}


def _part(raw: Any, where: str, folder: Path) -> LoadPart:
    if not isinstance(raw, dict) or "trace" not in raw:
        workload = _struct(Workload, raw, where, also=("trace",))
        workload.check()
        return LoadPart(workload=workload)
    rest = {name: value for name, value in raw.items() if name != "trace"}
    if not isinstance(raw["trace"], str):
        raise ConfigError(f"{where}.trace: {raw['trace']!r}: expected the path of a file")
    part = LoadPart(trace=str(folder / raw["trace"]), scale=_struct(TraceScale, rest, where, also=("trace",)))
    part.arrivals(0)
    return part


def _contender(raw: Any, where: str, folder: Path) -> ComparedServer:
    found = _struct(ComparedServer, raw, where)
    if not found.name.isprintable() or "/" in found.name:
        raise ConfigError(f"{where}.name: {found.name!r}: it names a file of logs, too; leave out / and line breaks")
    kinds = [kind for kind in ("layout", "vllm", "url") if getattr(found, kind)]
    if len(kinds) != 1:
        given = " and ".join(kinds) or "none"
        raise ConfigError(f"{where} ({found.name}): layout, vllm or url: {given} given; give one of them")
    for name, kind in (("settings", "layout"), ("flags", "vllm"), ("env", "vllm")):
        if getattr(found, name) and kinds != [kind]:
            raise ConfigError(f"{where}.{name}: {getattr(found, name)!r}: needs {kind}; leave it out")
    if found.layout:
        _check_layout(found, where)
    elif found.vllm:
        found = msgspec.structs.replace(found, vllm=_python_of(found.vllm, folder, where))
        taken = [flag for flag in found.flags if flag.partition("=")[0] in VLLM_FLAGS_TO_GIVE]
        if taken:
            raise ConfigError(f"{where}.flags: {taken[0]!r}: the comparison sets this flag; leave it out")
    elif not re.fullmatch(r"https?://[^\s/?#]+(/v1)?/?", found.url):
        raise ConfigError(f"{where}.url: {found.url!r}: expected http://HOST:PORT")
    return found


def _check_layout(found: ComparedServer, where: str) -> None:
    if not LAYOUT.fullmatch(found.layout):
        raise ConfigError(
            f"{where}.layout: {found.layout!r}: expected prefill and decode instances such as 1P1D, or hybrid ones "
            "such as 2H"
        )
    known = {name for name, each in settings().items() if each.setting.panel in PANELS} - {*FIXED_SETTINGS}
    for name in found.settings:
        if name in settings() and name not in known:
            raise ConfigError(
                f"{where}.settings.{name}: {found.settings[name]!r}: a comparison cannot vary it; start that "
                "server yourself and give its url"
            )
        if name not in known:
            raise ConfigError(f"{where}.settings.{name}: no such setting{_nearest(name, known)}")
    try:
        ServeOptions.typed({"model": str(SHIPPED_MODEL), **found.settings}).check()
    except ConfigError as error:
        raise ConfigError(f"{where}.settings: {error}") from None


def _python_of(python: str, folder: Path, where: str) -> str:
    path = folder / Path(python).expanduser()
    if not path.is_file():
        raise ConfigError(f"{where}.vllm: {python!r}: no such file; give a Python that has vLLM for CPUs")
    return str(path)


def _check(spec: ComparisonSpec) -> None:
    names = [each.name for each in spec.server]
    if twice := next((name for at, name in enumerate(names) if name in names[:at]), ""):
        raise ConfigError(f"server.name: {twice!r}: given twice; give each server a different name")
    if spec.speeds and spec.concurrency:
        raise ConfigError(f"concurrency: {spec.concurrency!r}: conflicts with speeds; give one of them")
    for field in ("speeds", "concurrency"):
        levels = getattr(spec, field)
        if again := [level for at, level in enumerate(levels) if level in levels[:at]]:
            raise ConfigError(f"{field}: {again[0]:g}: given twice; leave one out")
    for name in ("ttft", "tpot"):
        if getattr(spec.goals, f"{name}_s") is not None and getattr(spec.goals, f"{name}_idle") is not None:
            value = getattr(spec.goals, f"{name}_idle")
            raise ConfigError(f"goals.{name}_idle: {value:g}: conflicts with {name}_s; give one of them")
    if absent := spec.core_set - host.cores():
        raise ConfigError(
            f"cores: {spec.cores!r}: this process may not use core {min(absent)}; it may use "
            f"{','.join(map(str, sorted(host.cores())))}"
        )


# ---- values of unknown shape


def _struct(kind: type[T], raw: Any, where: str, also: Sequence[str] = (), taken: dict[str, Any] | None = None) -> T:
    """Converts a table. `also`: further names to suggest for misspellings. Raises ConfigError."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: {raw!r}: expected a table")
    dot = f"{where}." if where else ""
    known = [*kind.__struct_fields__, *also]
    for name in raw:
        if name not in kind.__struct_fields__:
            raise ConfigError(f"{dot}{name}: no such field{_nearest(name, known)}")
    try:
        return msgspec.convert({**raw, **(taken or {})}, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        if missing := re.search(r"required field `(\w+)`", text):
            raise ConfigError(f"{dot}{missing[1]}: missing") from None
        field = path.removesuffix("`")
        value = _value_at(raw, field)
        raise ConfigError(f"{dot}{field}: {value!r}: {text[:1].lower()}{text[1:].replace('`', '')}") from None


def _value_at(raw: Any, field: str) -> Any:
    for step in _steps(field):
        try:
            raw = raw[step]
        except (LookupError, TypeError):
            return raw
    return raw


def _steps(field: str) -> Iterator[str | int]:
    for name, number in re.findall(r"([A-Za-z_]\w*)|\[(\d+)\]", field):
        yield name or int(number)


def _nearest(name: str, known: Sequence[str] | set[str]) -> str:
    longer = [each for each in sorted(known) if each.startswith(name)]
    near = (longer and [min(longer, key=len)]) or difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; expected some of {', '.join(sorted(known))}" if len(known) <= 16 else ""
