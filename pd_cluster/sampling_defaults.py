"""How a server samples where a request does not say: generation_config.json, and what an operator changes about it.

vLLM's --generation-config names the source: `auto` is the model folder, a path is another folder, and `vllm` takes no
sampling defaults from any file. --override-generation-config is merged over the source. A file's other keys mean
nothing here; a key of the override must be one of `KNOWN`. Knows nothing of requests.
"""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from pd_cluster.checkpoint import Checkpoint
from pd_cluster.errors import ConfigError, ModelError

NEUTRAL = "vllm"  # --generation-config: no file's sampling defaults
FLAG = "--override-generation-config"
EXAMPLE = """'{"temperature": 0.7}'"""
INT32_MAX = 2**31 - 1

Number = int | float


class _Range(NamedTuple):
    expected: str
    accepts: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# As requests have them (api/protocol.py); vLLM takes no others from a generation config.
KNOWN: dict[str, _Range] = {
    "temperature": _Range("a number from 0 up", lambda value: _is_number(value) and value >= 0),
    "top_p": _Range("a number above 0, at most 1", lambda value: _is_number(value) and 0 < value <= 1),
    "top_k": _Range("an integer from -1 up", lambda value: _is_integer(value) and -1 <= value <= INT32_MAX),
    "min_p": _Range("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1),
    "repetition_penalty": _Range("a number above 0, at most 2", lambda value: _is_number(value) and 0 < value <= 2),
    "max_new_tokens": _Range("an integer from 1 up", lambda value: _is_integer(value) and 1 <= value <= INT32_MAX),
}

Override = dict[str, Number | None]


def parse_override(text: str) -> Override:
    """The value of --override-generation-config; "" changes nothing. Raises ConfigError that names flag and key."""
    if not text:
        return {}
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{FLAG} {reprlib.repr(text)}: expected a JSON object, such as {EXAMPLE}")
    for key, value in found.items():
        if key not in KNOWN:
            raise ConfigError(f"{FLAG}: {reprlib.repr(key)} is no sampling default{_way_out(key)}")
        if value is not None and not KNOWN[key].accepts(value):
            raise ConfigError(f"{FLAG}: {key} {reprlib.repr(value)}: expected {KNOWN[key].expected}, or null")
    return found


def sampling_defaults(checkpoint: Checkpoint, source: str, override: Mapping[str, Number | None]) -> dict[str, Number]:
    """Names of `KNOWN` -> values; a null of the override takes the file's value away.

    Raises ModelError for a value of the file that no request could have.
    """
    found = {} if source == NEUTRAL else _of_file(checkpoint)
    return {name: value for name, value in {**found, **override}.items() if value is not None}


def _of_file(checkpoint: Checkpoint) -> Override:
    own = checkpoint.generation_config
    found = {name: own[name] for name in KNOWN if own.get(name) is not None}
    for name, value in found.items():
        if not KNOWN[name].accepts(value):
            raise ModelError(
                f"{checkpoint.generation_file}: {name} {reprlib.repr(value)}: expected {KNOWN[name].expected}; "
                f"change it, or start with --generation-config {NEUTRAL}"
            )
    return found


def _way_out(key: str) -> str:
    if key == "eos_token_id":
        return "; answers end where the model folder's generation_config.json says, or at a request's stop_token_ids"
    near = difflib.get_close_matches(key, KNOWN, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(KNOWN)}"
