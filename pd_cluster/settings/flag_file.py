"""`--config FILE`: reads flags from a YAML file, as vLLM does. The command line takes precedence over the file.

max-model-len: 4096
served-model-name: [chat, small]
enable-prefix-caching: false
override-generation-config: {temperature: 0.7}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pd_cluster.errors import ConfigError
from pd_cluster.settings.flags_without_setting import Takes
from pd_cluster.settings.serve_options import settings
from pd_cluster.settings.value_spellings import IN_OTHER_UNITS, in_own_flags
from pd_cluster.settings.vllm_flags import ALIASES, BARE, SWITCHES, normalize, unknown
from pd_cluster.settings.vllm_flags_without_setting import FOREIGN, OFF, foreign

FLAG = "--config"
ALL_SWITCHES = frozenset(each.flag for each in settings().values() if each.kind is bool)


def expanded(argv: Sequence[str], known: Iterable[str]) -> list[str]:
    """Returns normalized flags, with `--config FILE` replaced by those of the file's flags that are not also on the
    command line.

    `known`: the flags of the command. Raises ConfigError that names the file and the key.
    """
    flags = normalize(argv)
    if not any(each.partition("=")[0] == FLAG for each in flags):
        return in_own_flags(flags)
    path, rest = _path_in(flags)
    given = {_positive(each.partition("=")[0]) for each in rest if each.startswith("--")}
    names = [*known, *IN_OTHER_UNITS, *FOREIGN]
    found = [flag for name, value in _read(path).items() for flag in _flags(path, name, value, given, names)]
    return in_own_flags([*found, *rest])


def _path_in(flags: Sequence[str]) -> tuple[str, list[str]]:
    rest: list[str] = []
    paths: list[str] = []
    following = iter(flags)
    for each in following:
        name, equals, value = each.partition("=")
        if name == FLAG:
            paths.append(value if equals else next(following, ""))
        else:
            rest.append(each)
    if len(paths) != 1 or not paths[0] or paths[0].startswith("--"):
        raise ConfigError(f"{FLAG}: expected one file, such as {FLAG} serve.yaml")
    return paths[0], rest


def _read(path: str) -> dict[str, Any]:
    try:
        found = msgspec.yaml.decode(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{FLAG} {path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{FLAG} {path}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"{FLAG} {path}: expected a mapping from flags to values, such as max-model-len: 4096")
    return found


def _flags(path: str, name: str, value: Any, given: set[str], known: Sequence[str]) -> list[str]:
    """Returns the flags for one line of the file; [] if the command line has the same flag."""
    flag = f"--{name.replace('_', '-')}"
    if (positive := _positive(flag)) != flag and isinstance(value, bool):
        flag, value = positive, not value
    theirs = foreign(flag)
    if flag == FLAG or flag.endswith("*") or (flag not in known and theirs is None):
        raise ConfigError(f"{FLAG} {path}: {unknown(flag, known)}")
    if given & _names_of(flag) or value is None:
        return []
    if isinstance(value, bool) and flag not in BARE:
        has_off = flag in SWITCHES or (theirs is not None and theirs[0].takes is Takes.SWITCH)
        return [flag] if value else [f"{OFF}{flag[2:]}"] if has_off else []
    if isinstance(value, list):
        return [f"{flag}={_written(each)}" for each in value]
    return [f"{flag}={_written(value)}"]


def _written(value: Any) -> str:
    return json.dumps(value) if isinstance(value, Mapping | list | bool) else str(value)


def _names_of(flag: str) -> set[str]:
    """Returns all spellings of one flag."""
    for each in settings().values():
        names = {each.flag, *(f"--{name.replace('_', '-')}" for name in each.setting.also)}
        if flag in names:
            return names
    return {flag}


def _positive(flag: str) -> str:
    """Returns the flag without --no-, or the main spelling of a flag's alias."""
    on = f"--{flag[len(OFF) :]}" if flag.startswith(OFF) else ""
    theirs = foreign(on) if on else None
    is_off = on in ALL_SWITCHES or (theirs is not None and theirs[0].takes is Takes.SWITCH)
    return on if is_off else ALIASES.get(flag, flag)
