"""Stored responses: owners, quotas, lifetimes, file modes, and invalid ids."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.errors import ConfigError, RequestNotFound
from pd_cluster.service.answers.response_store import FILE, KeptResponse, ResponseStore
from pd_cluster.settings.response_settings import KeptResponses
from tests.support.full_disks import full_disk
from tests.support.kept import ids_in

MIB = 1 << 20


def made(folder: Path, clock: Callable[[], float] = time.time, **settings: Any) -> ResponseStore:
    return ResponseStore(KeptResponses(folder=str(folder / "kept"), **settings), clock)


def kept(number: int, nbytes: int = 10) -> KeptResponse:
    response = {"id": id_of(number), "model": "tiny", "output": [{"type": "message", "n": number}]}
    return KeptResponse(response, [{"x": "x" * nbytes}])


def id_of(number: int) -> str:
    return f"resp_{number:048x}"


def ids(folder: Path) -> list[str]:
    return ids_in(folder / "kept")


def test_another_owners_id_is_unknown(tmp_path: Path) -> None:
    store = made(tmp_path)
    assert store.keep("name:a", kept(1))
    assert store.find("name:a", id_of(1)).conversation == [{"x": "x" * 10}, {"type": "message", "n": 1}]
    for owner in ("name:b", "", "name:a/", "../name:a"):
        with pytest.raises(RequestNotFound):
            store.find(owner, id_of(1))
        with pytest.raises(RequestNotFound):
            store.remove(owner, id_of(1))
    store.remove("name:a", id_of(1))
    with pytest.raises(RequestNotFound):
        store.find("name:a", id_of(1))
    assert ids(tmp_path) == []


def test_what_is_no_id_is_no_path(tmp_path: Path) -> None:
    store = made(tmp_path)
    store.keep("", kept(1))
    for name in ("", "..", ".lock", "../../etc/passwd", "resp_" + "g" * 48, id_of(1) + "\n", id_of(1) + "/.."):
        with pytest.raises(RequestNotFound) as caught:
            store.find("", name)
        assert "\n" not in str(caught.value)


def test_files_are_the_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made(tmp_path).keep("a", kept(1))
    finally:
        os.umask(before)
    found = [tmp_path / "kept", *(tmp_path / "kept").rglob("*")]
    assert {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in found} == {(True, 0o700), (False, 0o600)}
    (tmp_path / "kept").chmod(0o755)
    with pytest.raises(ConfigError, match=r"--response-store .*kept: must be a folder of this user with mode 0700"):
        made(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        ResponseStore(KeptResponses(folder=str(tmp_path / "file")))


def test_an_owners_oldest_make_room(tmp_path: Path) -> None:
    store = made(tmp_path, tenant_mib=1)
    store.keep("other", kept(9, MIB // 2))
    for number in range(5):
        assert store.keep("a", kept(number, MIB // 3))
    left = [id_of(3), id_of(4), id_of(9)]
    assert ids(tmp_path) == left
    assert not store.keep("a", kept(7, 2 * MIB))
    assert ids(tmp_path) == left
    store.remove("a", id_of(3))
    assert store.keep("a", kept(7, MIB // 3))  # a removed response takes no space
    assert ids(tmp_path) == [id_of(4), id_of(7), id_of(9)]


def test_a_response_is_gone_after_its_time(tmp_path: Path) -> None:
    now_s = [1000.0]
    store = made(tmp_path, lambda: now_s[0], ttl_s=100.0)
    for owner in ("a", "b"):
        store.keep(owner, kept(1))
    now_s[0] += 101
    with pytest.raises(RequestNotFound):
        store.find("a", id_of(1))
    store.keep("c", kept(2))
    assert ids(tmp_path) == [id_of(2)]
    now_s[0] += 101
    made(tmp_path, lambda: now_s[0], ttl_s=100.0)  # a new store removes expired responses of all owners at its start
    assert ids(tmp_path) == []


def test_a_broken_file_is_refused_and_hurts_no_answer(tmp_path: Path) -> None:
    store = made(tmp_path)
    store.keep("a", kept(1))
    store.close()
    (tmp_path / "kept" / FILE).write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match=rf"{FILE} cannot be used: .*; remove it"):
        made(tmp_path)
    assert not store.keep("a", kept(2))
    with pytest.raises(RequestNotFound):
        store.find("a", id_of(1))


def test_a_link_in_a_files_or_the_folders_place_is_not_followed(tmp_path: Path) -> None:
    for name in (FILE, f"{FILE}-wal", f"{FILE}-shm"):
        (folder := tmp_path / name / "kept").mkdir(mode=0o700, parents=True)
        (folder / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match=f"{name} is not a file"):
            made(tmp_path / name)
        assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "kept").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="kept: must be a folder"):
        made(tmp_path)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_full_disk_keeps_nothing_and_a_removed_text_is_gone(tmp_path: Path) -> None:
    store = made(tmp_path)
    with full_disk():
        assert not store.keep("a", kept(1, MIB))
    assert ids(tmp_path) == []
    assert store.keep("a", kept(1))
    store = made(tmp_path)
    store.keep("a", KeptResponse({"id": id_of(1), "output": []}, [{"said": "a secret of a tenant"}]))
    store.remove("a", id_of(1))
    store.close()  # the last connection checkpoints the log
    assert b"a secret" not in b"".join(path.read_bytes() for path in (tmp_path / "kept").iterdir())


@pytest.mark.slow
def test_a_million_responses_cost_a_call_nothing(tmp_path: Path) -> None:
    """With one tenant's million responses, another's calls take as much CPU time as in an empty store."""

    def cost_s(store: ResponseStore) -> float:
        started_s = time.thread_time()
        for number in range(200):
            assert store.keep("b", kept(number))
            store.find("b", id_of(number))
        for number in range(200):
            store.remove("b", id_of(number))
        return (time.thread_time() - started_s) / 600

    empty, full = made(tmp_path / "empty"), made(tmp_path / "full")
    row = (hashlib.sha256(b"a").digest(), time.time(), 30, b"{}")
    with contextlib.closing(sqlite3.connect(full.file)) as connection, connection:
        rows = ((row[0], id_of(number), *row[1:]) for number in range(1_000_000))
        connection.executemany("INSERT INTO responses VALUES (?, ?, ?, ?, ?)", rows)
    before_s, after_s = cost_s(empty), cost_s(full)
    print(f"{before_s * 1e3:.2f} ms a call when empty, {after_s * 1e3:.2f} ms beside 1,000,000 responses")
    assert after_s < 4 * before_s


def test_many_processes_keep_at_once(tmp_path: Path) -> None:
    """Like API processes, each has its own store over the same folder; the quota holds and nothing is corrupted."""
    stores = [made(tmp_path, tenant_mib=1) for _ in range(4)]

    def work(at: int) -> None:
        for number in range(10):
            stores[at].keep("a", kept(100 * at + number, MIB // 5))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    left = ids(tmp_path)
    assert len(left) == 4  # as many as the quota allows; failed writes were uncounted
    for name in left:
        assert stores[0].find("a", name).response["id"] == name
