"""The --api-key-file: `pd-cluster keys` creates, shows and changes it; it is read strictly; refusals."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.commands import cli
from pd_cluster.extras.key_file.key_file import KeyFile, digest_of, read_key_file, write_key_file
from pd_cluster.extras.key_file.key_store import KeyStore
from pd_cluster.extras.key_file.shared_rate_limits import SharedRateLimits, tag_of
from pd_cluster.process_messages import ApiKey
from pd_cluster.settings.expiry_dates import time_of
from pd_cluster.settings.http_settings import HttpConfig
from tests.support.another_user import OTHER_ID, as_another_user
from tests.support.faults import fault

SALT = "5a" * 32
ENTRY = {"id": "first", "hash": digest_of(SALT, b"pdc-1"), "tenant": "team-a"}
WHOLE = {
    **ENTRY,
    "models": ["tiny", "org/tiny"],
    "requests_per_minute": 60,
    "tokens_per_minute": 90_000,
    "expires": "2099-01-31T12:00:00Z",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def write(file: Path, *entries: Any, mode: int = 0o600, **top: Any) -> Path:
    whole = {"scheme": "hmac-sha256", "salt": SALT, "keys": list(entries), **top}
    file.write_text(json.dumps({name: value for name, value in whole.items() if value is not ...}))
    file.chmod(mode)
    return file


# ---- reading


def test_what_a_file_says(file: Path) -> None:
    found = read_key_file(write(file, ENTRY | {"id": "second", "hash": "0" * 64}, WHOLE))
    assert found.salt == SALT
    second, first = found.keys
    assert (second.models, second.is_limited, second.expires_s) == (None, False, None)
    assert (first.id, first.tenant, first.models) == ("first", "team-a", ("tiny", "org/tiny"))
    assert (first.requests_per_minute, first.tokens_per_minute) == (60, 90_000)
    assert first.expires_s == time_of("2099-01-31T13:00:00+01:00")
    write_key_file(file, found)
    assert read_key_file(file) == found


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"tpm": 5}, "keys[1] (id 'second'): 'tpm': unknown field; known are id, hash, tenant"),
        ({"token_per_minute": 5}, "'token_per_minute': unknown field; did you mean tokens_per_minute?"),
        ({"tokens_per_minute": "many"}, "keys[1] (id 'second'): tokens_per_minute: 'many': expected a whole number"),
        ({"tokens_per_minute": 0}, "tokens_per_minute: 0: expected a whole number in 1 to 100000000; leave it out"),
        ({"requests_per_minute": True}, "requests_per_minute: True: expected a whole number"),
        ({"requests_per_minute": 10**9}, "requests_per_minute: 1000000000: expected a whole number"),
        ({"models": "tiny"}, "models: 'tiny': expected a list of served names"),
        ({"models": []}, "models: []: expected a list"),
        ({"models": ["a", "a"]}, "models: ['a', 'a']: expected a list of served names, each once"),
        ({"models": ["\ud800"]}, r"models: ['\ud800']: expected a list of served names"),
        ({"tenant": "a b"}, "tenant: 'a b': expected 1 to 64 letters, digits and . _ -"),
        ({"tenant": "other"}, "tenant: 'other': expected 1 to 64 letters"),
        ({"id": "first"}, "keys[1] (id 'first'): id: keys[0] has the same id; change one of them"),
        ({"hash": ENTRY["hash"]}, "keys[1] (id 'second'): hash: keys[0] (id 'first') has the same hash"),
        ({"hash": "xyz"}, "hash: not a hash: expected 64 hexadecimal digits; `pd-cluster keys new"),
        ({"expires": "soon"}, "expires: 'soon': expected a date or a time with its zone, such as 2027-01-31"),
        ({"expires": "2027-01-31T12:00:00"}, "expires: '2027-01-31T12:00:00': expected"),
        ({"expires": "0001-01-01T00:00:00+01:00"}, "expires: '0001-01-01T00:00:00+01:00': expected"),
    ],
)
def test_a_fault_is_one_line_that_names_it(file: Path, entry: dict[str, Any], said: str) -> None:
    write(file, ENTRY, {"id": "second", "hash": "1" * 64, "tenant": "b", **entry})
    line = fault(lambda: read_key_file(file))
    assert line.startswith(f"{file}: keys[1]")
    assert said in line
    assert "1" * 64 not in line
    assert ENTRY["hash"] not in line


def test_what_an_entry_must_say(file: Path) -> None:
    for name in ("id", "hash", "tenant"):
        write(file, {field: value for field, value in ENTRY.items() if field != name})
        assert f"{name}: missing; expected" in fault(lambda: read_key_file(file))


@pytest.mark.parametrize(
    ("top", "said"),
    [
        ({"scheme": "sha1"}, "scheme: 'sha1': expected 'hmac-sha256'"),
        ({"salt": "5a"}, "salt: expected 64 hexadecimal digits"),
        ({"keys": {}}, "keys: not a list; expected a list"),
        ({"keys": ["pdc-1"]}, "keys[0]: expected an object with id, hash"),
        ({"version": 2}, "'version': unknown field; known are scheme, salt, keys"),
    ],
)
def test_a_fault_of_the_whole_file(file: Path, top: dict[str, Any], said: str) -> None:
    line = fault(lambda: read_key_file(write(file, **top)))
    assert line.startswith(f"{file}: {said}")
    assert "pdc-1" not in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1 column 1: is not JSON (Expecting value); fix it, or `pd-cluster keys new"),
        ("[]", "expected an object with scheme, salt, keys"),
        ('{"salt": "a", "salt": "b"}', "'salt': twice in one object; remove one of them"),
        ("\xff", "is not JSON in UTF-8"),
        ("[" * 100_000, "is not JSON in UTF-8"),
    ],
)
def test_what_is_no_such_file(file: Path, text: str, said: str) -> None:
    file.write_bytes(text.encode("latin-1"))
    file.chmod(0o600)
    assert fault(lambda: read_key_file(file)).startswith(f"{file}: {said}")


@pytest.mark.parametrize("mode", [0o604, 0o620])
def test_a_file_that_others_can_use_is_refused(file: Path, mode: int) -> None:
    line = fault(lambda: read_key_file(write(file, ENTRY, mode=mode)))
    assert line == f"{file}: mode {mode:04o}, so others can use it; expected 0600: chmod 600 {file}"


def test_what_is_not_there_and_what_is_no_file(file: Path) -> None:
    os.mkfifo(pipe := file.parent / "pipe", 0o600)
    for path, told in ((file, "no such file"), (file.parent, "is a folder"), (pipe, "is a folder")):
        assert told in fault(lambda path=path: read_key_file(path))  # type: ignore[misc]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_refused(file: Path) -> None:
    write(file, ENTRY)
    assert as_another_user(lambda: read_key_file(file)).startswith("ConfigError: ")
    os.chown(file, OTHER_ID, -1)
    line = fault(lambda: read_key_file(file))
    assert f"owned by user {OTHER_ID}" in line
    assert f"chown 0 {file}" in line


# ---- the command


def keys(*arguments: str) -> int | str | None:
    """Runs `pd-cluster keys`; returns its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["pd-cluster", "keys", *arguments])
        try:
            cli.main()
        except SystemExit as end:
            return end.code
    return 0


def test_a_key_is_shown_once_and_kept_as_a_hash(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--requests-per-minute=60", "--tokens-per-minute=90000", "--expires=2099-01-31"]
    made = ["new", f"--file={file}", "--tenant=team-a", "--id=first", "--model=tiny", "--model=org/tiny"]
    assert keys(*made, *limits) == 0
    out, err = capsys.readouterr()
    key, text, found = out.strip(), file.read_text(), read_key_file(file)
    assert re.fullmatch(r"pdc-[A-Za-z0-9_-]{43}", key)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert key.removeprefix("pdc-") not in text + err
    (first,) = found.keys
    assert first.digest == digest_of(found.salt, key.encode())
    assert keys("new", f"--file={file}", "--tenant=team-b") == 0
    assert capsys.readouterr().out.strip() != key
    again = read_key_file(file)
    assert (again.salt, again.keys[0]) == (found.salt, first), "existing keys must stay"
    assert keys("list", f"--file={file}") == 0
    listed = capsys.readouterr().out
    for shown in ("first", "team-a", "tiny, org/tiny", "60", "90,000", "2099-01-31T00:00:00Z", "team-b", "no limit"):
        assert shown in listed
    assert not any(secret[:8] in listed for secret in (found.salt, *(each.digest for each in again.keys)))
    assert keys("remove", f"--file={file}", "first") == 0
    assert [each.tenant for each in read_key_file(file).keys] == ["team-b"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--id=first"], "--id 'first': {file} already has this id; give another, or remove that key first"),
        (["--id=a b"], "--id 'a b': expected 1 to 64 letters"),
        (["--tokens-per-minute=0"], "--tokens-per-minute 0: expected a whole number"),
        (["--expires=2020-01-01"], "--expires '2020-01-01': is in the past"),
        (["--model=a", "--model=a"], "--model ['a', 'a']: expected a list of served names, each once"),
    ],
)
def test_a_key_that_cannot_be_made(
    file: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write(file, ENTRY).read_bytes()
    assert keys("new", f"--file={file}", "--tenant=team-a", *arguments) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"pd-cluster: {said.format(file=file)}")
    assert file.read_bytes() == before


def test_a_link_to_a_file_stays_and_its_file_changes(file: Path) -> None:
    write(file, ENTRY)
    (link := file.parent / "link").symlink_to(file)
    assert keys("remove", f"--file={link}", "first") == 0
    assert not read_key_file(file).keys, "a removed key must be invalid under any path of the file"
    assert keys("new", f"--file={link}", "--tenant=a") == 0
    assert len(read_key_file(file).keys) == 1
    assert link.is_symlink()


@pytest.mark.parametrize(
    ("command", "name", "more", "said"),
    [
        ("remove", "keys.json", "second", "has no key 'second'; keys in it: first"),
        ("list", "none", "", "no such file"),
        ("new", "no/keys.json", "--tenant=a", "make its folder first"),
    ],
)
def test_what_cannot_be_removed_or_listed(
    file: Path, command: str, name: str, more: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, ENTRY)
    assert keys(command, f"--file={file.parent / name}", *more.split()) == 1
    assert said in capsys.readouterr().err


# ---- the scheduler's store


def key_of(key: str, **fields: Any) -> ApiKey:
    return ApiKey(digest=digest_of(SALT, key.encode()), **{"id": key, "tenant": "team", **fields})


def store_of(file: Path, *entries: ApiKey, **http: Any) -> KeyStore:
    write_key_file(file, KeyFile(SALT, entries))
    return KeyStore(HttpConfig(key_file=str(file), **http), ["tiny"], SharedRateLimits.create(lambda: 0))


def left(store: KeyStore, key: str) -> tuple[int, int] | None:
    (at,) = [at for at, each in enumerate(store.keys.keys) if each.id == key]
    found = store.memory.take(store.keys.slots[at], tag_of(store.keys.keys[at].digest))
    return None if found is None else (found[1].requests.remaining, found[1].tokens.remaining)


def test_keys_that_stay_keep_what_is_left(file: Path) -> None:
    store = store_of(file, key_of("a", requests_per_minute=10), key_of("b", tokens_per_minute=100))
    a, b = store.keys.slots
    store.memory.take(a, tag_of(store.keys.keys[0].digest), 4)
    store.memory.take(b, tag_of(store.keys.keys[1].digest), 0, 60)
    write_key_file(file, KeyFile(SALT, (key_of("c"), key_of("b", tokens_per_minute=50, requests_per_minute=5))))
    store.reload()
    assert (left(store, "b"), left(store, "c")) == ((5, 40), (0, 0))
    assert store.memory.take(a, tag_of(key_of("a").digest)) is None
    file.write_text("{")
    before = store.keys
    assert fault(store.reload).startswith(f"--api-key-file {file}: line 1")
    assert store.keys is before
    assert left(store, "b") == (5, 40)


def test_a_key_that_is_given_twice_is_refused(file: Path) -> None:
    for http, flag in (({"api_keys": ("x", "a")}, "--api-key"), ({"metrics_key": "a"}, "--metrics-key")):
        line = fault(lambda http=http: store_of(file, key_of("a"), **http))  # type: ignore[misc]
        assert line.endswith(f"id 'a': {flag} also has this key; remove one of the two")


def test_names_of_models_that_are_not_served_are_told(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    store_of(file, key_of("a", models=("tiny", "tinny")))
    assert "id 'a': models: 'tinny' is not served here; known are tiny" in caplog.text
    assert len(caplog.records) == 1
    KeyStore(HttpConfig(key_file=str(file)), ["tiny"], SharedRateLimits.create(lambda: 0), may_grow=True)
    assert len(caplog.records) == 1, "an adapter with that name may be loaded later"


def test_tenants_of_flags_and_of_the_file_have_names(file: Path) -> None:
    store = store_of(file, key_of("a", tenant="x"), api_keys=("k",), tenants=("y",))
    write_key_file(file, KeyFile(SALT, (key_of("b", tenant="z"),)))
    assert store.reload().tenants == ["y", "x", "z"], "a name must stay for the scheduler's lifetime"
