"""Reads and writes the file of --api-key-file: salted hashes of API keys, each with its tenant, models and limits.

The file is JSON. The whole file has one random salt, so that looking up a key takes one hash. Every error is one line
that names the file, the entry, the field, its value and the remedy, and never shows a hash. Knows nothing of processes
or HTTP.
"""

from __future__ import annotations

import difflib
import hmac
import json
import os
import re
import reprlib
import secrets
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pd_cluster.cluster.tenancy.tenant_counts import OTHERS
from pd_cluster.cluster.tenancy.token_buckets import MOST_A_MINUTE
from pd_cluster.errors import ConfigError
from pd_cluster.extras.key_file.shared_rate_limits import MAX_KEYS
from pd_cluster.process_messages import ApiKey
from pd_cluster.settings.expiry_dates import EXPECTED, text_of, time_of
from pd_cluster.settings.model_names import fault_of_name
from ranktable_tools.table_files import write_private

SCHEME = "hmac-sha256"
KEY_PREFIX = "pdc-"
KEY_NBYTES = 32
SALT_NBYTES = 32
# half the longest line to an API process (cluster/processes/api_processes.py): one line carries the whole file
MAX_NBYTES = 8 << 20
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
NAME_EXPECTED = "1 to 64 letters, digits and . _ -"
HASH = re.compile(r"[0-9a-f]{64}")
MAKE = "`pd-cluster keys new --file FILE --tenant NAME` makes one"


@dataclass(frozen=True, slots=True)
class KeyFile:
    """`salt` is in hexadecimal, as in the file."""

    salt: str
    keys: tuple[ApiKey, ...] = ()

    @classmethod
    def empty(cls) -> KeyFile:
        return cls(secrets.token_hex(SALT_NBYTES))


def digest_of(salt: str, key: bytes) -> str:
    """Returns the hash by which a file identifies a key."""
    return hmac.digest(bytes.fromhex(salt), key, "sha256").hex()


def read_key_file(file: Path) -> KeyFile:
    """Reads the file. Raises ConfigError, also for a file that others can read or that another user owns."""
    return _parse(str(file), _read(file))


def write_key_file(file: Path, known: KeyFile) -> None:
    """Replaces the file atomically, mode 0600: readers see the old file or the new one. Raises ConfigError."""
    entries = [_entry_of(key) for key in known.keys]
    text = json.dumps({"scheme": SCHEME, "salt": known.salt, "keys": entries}, indent=2) + "\n"
    try:
        write_private(file, text)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror or error}") from None


# ---- entries


class _Field(NamedTuple):
    """One field of an entry. `name`: the field's name in ApiKey."""

    name: str
    expected: str
    read: Callable[[Any], Any]  # returns None for invalid values
    is_required: bool = False


def _name(value: Any) -> str | None:
    return value if isinstance(value, str) and NAME.fullmatch(value) else None


def _tenant(value: Any) -> str | None:
    return _name(value) if value != OTHERS else None


def _digest(value: Any) -> str | None:
    return value if isinstance(value, str) and HASH.fullmatch(value) else None


def _models(value: Any) -> tuple[str, ...] | None:
    is_list = isinstance(value, list) and value and all(isinstance(each, str) and each for each in value)
    return tuple(value) if is_list and len({*value}) == len(value) and not any(map(fault_of_name, value)) else None


def _limit(value: Any) -> int | None:
    return value if type(value) is int and 1 <= value <= MOST_A_MINUTE else None


def _expiry(value: Any) -> float | None:
    return time_of(value) if isinstance(value, str) else None


LIMIT_EXPECTED = f"a whole number in 1 to {MOST_A_MINUTE}; leave it out for no limit"
FIELDS: Mapping[str, _Field] = {
    "id": _Field("id", NAME_EXPECTED, _name, True),
    "hash": _Field("digest", f"64 hexadecimal digits; {MAKE}", _digest, True),
    "tenant": _Field(
        "tenant", f"{NAME_EXPECTED}, and not {OTHERS!r}, which metrics use for all other tenants", _tenant, True
    ),
    "models": _Field("models", "a list of served names, each once; leave it out for all", _models),
    "requests_per_minute": _Field("requests_per_minute", LIMIT_EXPECTED, _limit),
    "tokens_per_minute": _Field("tokens_per_minute", LIMIT_EXPECTED, _limit),
    "expires": _Field("expires_s", EXPECTED, _expiry),
}
TOP_FIELDS = ("scheme", "salt", "keys")


def checked(name: str, value: Any, place: str) -> Any:
    """Returns a field's value in the form that ApiKey has. Raises ConfigError that begins with `place`."""
    field = FIELDS[name]
    found = field.read(value)
    if found is None:
        shown = "not a hash" if name == "hash" else reprlib.repr(value)
        raise ConfigError(f"{place}{shown}: expected {field.expected}")
    return found


def _entry_of(key: ApiKey) -> dict[str, Any]:
    """Returns an entry in the form that the file has, without unset fields."""
    values = {name: getattr(key, field.name) for name, field in FIELDS.items()}
    if key.expires_s is not None:
        values["expires"] = text_of(key.expires_s)
    return {name: value for name, value in values.items() if value}


# ---- reading


def _read(file: Path) -> bytes:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a FIFO would block
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; {MAKE}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {getattr(error, 'strerror', error)}") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise ConfigError(f"{file}: is a folder, a pipe or a device, not a file; {MAKE}")
    with os.fdopen(descriptor, "rb") as stream:
        if status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"{file}: owned by user {status.st_uid}, who could give others access; this process is user "
                f"{os.geteuid()}: chown {os.geteuid()} {file}"
            )
        if (mode := stat.S_IMODE(status.st_mode)) & 0o077:
            raise ConfigError(f"{file}: mode {mode:04o}, so others can use it; expected 0600: chmod 600 {file}")
        try:
            data = stream.read(MAX_NBYTES + 1)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_NBYTES:
        raise ConfigError(f"{file}: more than {MAX_NBYTES >> 20} MiB; a file has at most {MAX_KEYS} keys")
    return data


class _RepeatedField(ValueError):
    pass


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _RepeatedField(name)
        found[name] = value
    return found


def _parse(file: str, data: bytes) -> KeyFile:
    try:
        top = json.loads(data.decode("utf-8"), object_pairs_hook=_once)
    except _RepeatedField as error:
        raise ConfigError(f"{file}: {reprlib.repr(str(error))}: twice in one object; remove one of them") from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{file}: line {error.lineno} column {error.colno}: is not JSON ({error.msg}); fix it, or {MAKE}"
        ) from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{file}: is not JSON in UTF-8; fix it, or {MAKE}") from None
    if not isinstance(top, dict):
        raise ConfigError(f"{file}: expected an object with {', '.join(TOP_FIELDS)}; {MAKE}")
    _refuse_unknown(f"{file}: ", top, TOP_FIELDS)
    for name in TOP_FIELDS:
        if name not in top:
            raise ConfigError(f"{file}: {name}: missing; {MAKE}")
    if top["scheme"] != SCHEME:
        raise ConfigError(f"{file}: scheme: {reprlib.repr(top['scheme'])}: expected {SCHEME!r}; {MAKE}")
    salt, entries = top["salt"], top["keys"]
    if not (isinstance(salt, str) and HASH.fullmatch(salt)):
        raise ConfigError(f"{file}: salt: expected 64 hexadecimal digits; {MAKE}")
    if not isinstance(entries, list) or len(entries) > MAX_KEYS:
        shown = f"{len(entries)} entries" if isinstance(entries, list) else "not a list"
        raise ConfigError(f"{file}: keys: {shown}; expected a list of at most {MAX_KEYS}; {MAKE}")
    keys = [_key_of(f"{file}: keys[{at}]", entry) for at, entry in enumerate(entries)]
    _refuse_twice(file, keys)
    return KeyFile(salt, tuple(keys))


def _key_of(place: str, entry: Any) -> ApiKey:
    if not isinstance(entry, dict):
        raise ConfigError(f"{place}: expected an object with {', '.join(FIELDS)}; {MAKE}")
    if isinstance(own := entry.get("id"), str):
        place = f"{place} (id {reprlib.repr(own)})"
    _refuse_unknown(f"{place}: ", entry, tuple(FIELDS))
    for name, field in FIELDS.items():
        if field.is_required and name not in entry:
            raise ConfigError(f"{place}: {name}: missing; expected {field.expected}")
    values = {FIELDS[name].name: checked(name, value, f"{place}: {name}: ") for name, value in entry.items()}
    return msgspec.convert(values, ApiKey)


def _refuse_unknown(place: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            way_out = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{place}{reprlib.repr(name)}: unknown field; {way_out}")


def _refuse_twice(file: str, keys: Sequence[ApiKey]) -> None:
    ids: dict[str, int] = {}
    digests: dict[str, int] = {}
    for at, key in enumerate(keys):
        place = f"{file}: keys[{at}] (id {key.id!r})"
        if (other := ids.setdefault(key.id, at)) != at:
            raise ConfigError(f"{place}: id: keys[{other}] has the same id; change one of them")
        if (other := digests.setdefault(key.digest, at)) != at:
            raise ConfigError(
                f"{place}: hash: keys[{other}] (id {keys[other].id!r}) has the same hash; remove one of them"
            )
