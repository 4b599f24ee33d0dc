"""An operator's changes to a server's default sampling. Knows nothing of files."""

from __future__ import annotations

import difflib
import json
import math
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.setting import Form
from pd_cluster.types import INT32_MAX

EXAMPLE = """'{"temperature": 0.7}'"""

Number = int | float
Override = dict[str, Number | None]


class _Range(NamedTuple):
    expected: str
    accepts: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# Names as in requests (service/schema/completion_protocol.py); vLLM takes only these from a generation config.
KNOWN: dict[str, _Range] = {
    "temperature": _Range("a number from 0 up", lambda value: _is_number(value) and value >= 0),
    "top_p": _Range("a number above 0, at most 1", lambda value: _is_number(value) and 0 < value <= 1),
    "top_k": _Range("an integer from -1 up", lambda value: _is_integer(value) and -1 <= value <= INT32_MAX),
    "min_p": _Range("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1),
    "repetition_penalty": _Range("a number above 0, at most 2", lambda value: _is_number(value) and 0 < value <= 2),
    "max_new_tokens": _Range("an integer from 1 up", lambda value: _is_integer(value) and 1 <= value <= INT32_MAX),
}


def parse_override(text: str, name: str = "override_generation_config") -> Override:
    """Parses the setting; "" changes nothing. Raises ConfigError that names the setting and the key."""
    if not text:
        return {}
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{called(name)} {reprlib.repr(text)}: expected a JSON object, such as {EXAMPLE}")
    for key, value in found.items():
        if key not in KNOWN:
            raise ConfigError(f"{called(name)}: {reprlib.repr(key)} is not a sampling default{_way_out(key)}")
        if value is not None and not KNOWN[key].accepts(value):
            expected = f"{KNOWN[key].expected}, or null"
            raise ConfigError(f"{called(name)}: {key} {reprlib.repr(value)}: expected {expected}")
    return found


def _way_out(key: str) -> str:
    if key == "eos_token_id":
        return (
            "; answers end at the tokens of the model folder's generation_config.json, or at a request's stop_token_ids"
        )
    near = difflib.get_close_matches(key, KNOWN, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(KNOWN)}"


OVERRIDE = Form(
    str,
    lambda name, written: parse_override(written, name),
    lambda value: json.dumps(value) if value else "",
    takes_mappings=True,
)
