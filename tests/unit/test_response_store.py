"""Kept responses: owners, quotas, times to live, file modes, and ids that are none."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.errors import ConfigError, RequestNotFound
from pd_cluster.service.response_store import Kept, ResponseStore
from pd_cluster.settings.kept_responses import KeptResponses

MIB = 1 << 20


def made(folder: Path, **settings: Any) -> ResponseStore:
    return ResponseStore(KeptResponses(folder=str(folder / "kept"), **settings))


def kept(number: int, nbytes: int = 10) -> Kept:
    return Kept(
        {"id": f"resp_{number:048x}", "model": "tiny", "output": [{"type": "message", "n": number}]},
        [{"x": "x" * nbytes}],
    )


def id_of(number: int) -> str:
    return f"resp_{number:048x}"


def files(folder: Path) -> list[Path]:
    return [path for path in (folder / "kept").rglob("*") if path.is_file() and path.name != ".lock"]


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
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["", "..", ".lock", "../../etc/passwd", "resp_" + "g" * 48, id_of(1) + "\n", id_of(1) + "/.."]
)
def test_what_is_no_id_is_no_path(tmp_path: Path, name: str) -> None:
    store = made(tmp_path)
    store.keep("", kept(1))
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
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_file()} == {0o600}


def test_a_folder_that_others_can_open_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept").chmod(0o755)
    with pytest.raises(ConfigError, match=r"--response-store .*kept: others can open it"):
        made(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        ResponseStore(KeptResponses(folder=str(tmp_path / "file")))


def test_an_owners_oldest_make_room(tmp_path: Path) -> None:
    store = made(tmp_path, tenant_mib=1)
    store.keep("other", kept(9, MIB // 2))
    for number in range(5):
        assert store.keep("a", kept(number, MIB // 3))
        (path,) = (path for path in files(tmp_path) if path.name == id_of(number))
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 100 + number))
    left = {path.name for path in files(tmp_path)}
    assert left == {id_of(9), id_of(3), id_of(4)}
    assert not store.keep("a", kept(7, 2 * MIB))
    assert {path.name for path in files(tmp_path)} == left


def test_a_response_is_gone_after_its_time(tmp_path: Path) -> None:
    store = made(tmp_path, ttl_s=100.0)
    for owner in ("a", "b"):
        store.keep(owner, kept(1))
    for path in files(tmp_path):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 101))
    with pytest.raises(RequestNotFound):
        store.find("a", id_of(1))
    made(tmp_path, ttl_s=100.0)  # sweeps as it starts, whoever owned them
    assert files(tmp_path) == []


def test_a_torn_file_is_no_response(tmp_path: Path) -> None:
    store = made(tmp_path)
    store.keep("a", kept(1))
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(RequestNotFound):
        store.find("a", id_of(1))


def test_a_full_disk_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = made(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pd_cluster.service.response_store.write_private", full)
    assert not store.keep("a", kept(1))
    assert files(tmp_path) == []


def test_many_processes_keep_at_once(tmp_path: Path) -> None:
    """Each with a store of its own over the same folder, as API processes have: the quota holds, nothing is torn."""
    stores = [made(tmp_path, tenant_mib=1) for _ in range(4)]

    def work(at: int) -> None:
        for number in range(10):
            stores[at].keep("a", kept(100 * at + number, MIB // 5))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    left = files(tmp_path)
    assert 1 <= len(left) <= 4
    assert sum(path.stat().st_size for path in left) <= MIB
    for path in left:
        assert stores[0].find("a", path.name).response["id"] == path.name
