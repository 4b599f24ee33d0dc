"""Translates vLLM's spellings of values: counts such as 32k, sizes in bytes, and objects whose members have separate
flags.

    --max-model-len 32k                       32,000; 32K is 32,768; auto and -1 are the default
    --kv-cache-memory-bytes 4G                --kv-cache-memory 4
    --limit-mm-per-prompt.image 2             --limit-mm-per-prompt '{"image": 2}'

vLLM 0.32 reads them in vllm/utils/argparse_utils.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pd_cluster.errors import ConfigError, called, flag_of
from pd_cluster.settings.serve_options import settings

GIB = 1 << 30
COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgtKMGT])")
POWERS = "kmgt"
COUNTS = ("max_model_len", "max_num_batched_tokens")
BY_DEFAULT = ("auto", "-1")  # values of max_model_len that mean the longest context that the model allows
BYTES = {"kv_cache_memory_bytes": "kv_cache_memory"}  # name of a size in bytes -> the setting in GiB
IN_OTHER_UNITS = tuple(map(flag_of, BYTES))
OBJECTS = frozenset(flag_of(name) for each in settings().values() if each.takes_mappings for name in each.names)


def count_in(name: str, written: str) -> int:
    """Reads 8192, 25.6k (a thousand) or 8K (1,024). Raises ConfigError that names the setting."""
    text = written.strip()
    found = COUNT.fullmatch(text)
    try:
        if found is None:
            return int(text)
        number, unit = found.groups()
        power = POWERS.index(unit.lower()) + 1
        return round(float(number) * 10 ** (3 * power)) if unit.islower() else int(number) << (10 * power)
    except ValueError:
        raise ConfigError(f"{called(name)} {written!r}: expected a whole number, such as 8192, 8k or 8K") from None


def in_own_terms(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `LLM`'s arguments with these spellings translated. Raises ConfigError."""
    found = {name: value for name, value in given.items() if name not in BYTES}
    for name, setting in BYTES.items():
        if (value := given.get(name)) is not None:
            found[setting] = count_in(name, str(value)) / GIB
    for name in COUNTS:
        value = found.get(name)
        if name == "max_model_len" and str(value) in BY_DEFAULT:
            del found[name]
        elif isinstance(value, str):
            found[name] = count_in(name, value)
    return found


def in_own_flags(flags: Sequence[str]) -> list[str]:
    """Returns normalized flags with these spellings translated. Raises ConfigError."""
    found: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = list(flags)
    while rest:
        argument = rest.pop(0)
        flag, equals, value = argument.partition("=")
        whole, _, path = flag.partition(".")
        is_member = bool(path) and whole in OBJECTS
        if not is_member and whole not in (*IN_OTHER_UNITS, *map(flag_of, COUNTS)):
            found.append(argument)
        elif not equals and (not rest or rest[0].startswith("--")):
            raise ConfigError(f"{flag}: needs a value")
        else:
            value = value if equals else rest.pop(0)
            if is_member:
                _put(objects.setdefault(whole, {}), flag, path, value)
            elif flag == flag_of("max_model_len") and value in BY_DEFAULT:
                found = [each for each in found if not each.startswith(f"{flag}=")]
            else:
                found.append(_own_flag(flag, value))
    return [*found, *(f"{flag}={json.dumps(value)}" for flag, value in objects.items())]


def _own_flag(flag: str, value: str) -> str:
    name = flag[2:].replace("-", "_")
    if name in BYTES:
        return f"{flag_of(BYTES[name])}={count_in(name, value) / GIB!r}"
    return f"{flag}={count_in(name, value) if COUNT.fullmatch(value) else value}"


def _put(found: dict[str, Any], flag: str, path: str, written: str) -> None:
    """Stores a value at `key.inner`; at `key+` the comma-separated values are added to a list."""
    *outer, last = path.split(".")
    for key in outer:
        found = found.setdefault(key, {})
        if not isinstance(found, dict):
            raise ConfigError(f"{flag}: {key} already has a value; give only one of them")
    if last.endswith("+"):
        if not isinstance(before := found.get(last[:-1], []), list):
            raise ConfigError(f"{flag}: {last[:-1]} already has a value; give only one of them")
        found[last[:-1]] = [*before, *map(_value, written.split(","))]
    else:
        found[last] = _value(written)


def _value(written: str) -> Any:
    try:
        return json.loads(written)
    except ValueError:
        return written
