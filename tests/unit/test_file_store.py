"""Stored files: only their owners find them, within quota and lifetime, and never incomplete."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from pd_cluster.errors import ConfigError, Refused, RequestNotFound, StorageFull
from pd_cluster.service.files.batch_states import BatchObject
from pd_cluster.service.files.batch_store import BatchStore
from pd_cluster.service.files.file_store import CONTENT, DATABASE, FileObject, FileStore, QuotaExceeded
from pd_cluster.service.files.kept_rows import Paging
from pd_cluster.settings.file_settings import KeptFiles
from tests.support.clock import Clock
from tests.support.full_disks import full_disk

MIB = 1 << 20
ALL = Paging(10_000)


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000_000.0)


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Callable[..., FileStore]:
    def made(tenant_mib: int = 64, ttl_s: float = 1000.0) -> FileStore:
        return FileStore(KeptFiles(str(tmp_path / "kept"), tenant_mib=tenant_mib, ttl_s=ttl_s), clock)

    return made


def put(store: FileStore, owner: str, data: bytes, name: str = "a.jsonl", ttl_s: float | None = None) -> FileObject:
    upload = store.begin(owner)
    store.write(upload, data)
    return store.complete(upload, name, ttl_s)


def content_of(store: FileStore, owner: str, file_id: str) -> bytes:
    _, fd = store.open(owner, file_id)
    with os.fdopen(fd, "rb") as file:
        return file.read()


def contents(store: FileStore) -> list[str]:
    return sorted(os.listdir(Path(store.config.folder) / CONTENT))


def test_a_file_is_its_owners_alone(make: Callable[..., FileStore]) -> None:
    store = make()
    kept = put(store, "one", b"x" * 10, name="../../etc/passwd")
    assert (kept.bytes, kept.filename, kept.purpose) == (10, "../../etc/passwd", "batch")
    assert content_of(store, "one", kept.id) == b"x" * 10
    assert store.find("one", kept.id) == kept
    assert store.files_of("one", "", ALL) == [kept]
    assert store.files_of("two", "", ALL) == []
    for owner, file_id in (("two", kept.id), ("one", "file-" + "0" * 32), ("one", "../files.sqlite3"), ("one", "")):
        for ask in (store.find, store.open, store.delete):
            with pytest.raises(RequestNotFound):
                ask(owner, file_id)
    store.delete("one", kept.id)
    assert store.files_of("one", "", ALL) == contents(store) == []


def test_only_this_user_can_read(make: Callable[..., FileStore], tmp_path: Path) -> None:
    store = make()
    put(store, "one", b"secret")
    for folder, _, names in os.walk(tmp_path / "kept"):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        for name in names:
            assert stat.S_IMODE((Path(folder) / name).stat().st_mode) == 0o600
    (tmp_path / "kept" / CONTENT).chmod(0o750)
    with pytest.raises(ConfigError, match=r"--files-dir .*content: must be a folder of this user with mode 0700"):
        make()


def test_a_link_in_a_files_place_is_not_followed(make: Callable[..., FileStore], tmp_path: Path) -> None:
    store = make()
    kept = put(store, "one", b"mine")
    place = tmp_path / "kept" / CONTENT / kept.id
    place.unlink()
    place.symlink_to(tmp_path / "kept" / DATABASE)
    with pytest.raises(OSError, match="symbolic links"):
        store.open("one", kept.id)


def test_lists_go_on_behind_the_last_one_seen(make: Callable[..., FileStore], clock: Clock) -> None:
    store, made = make(), []
    for at in range(5):
        clock.now_s += at % 2  # some files have the same time
        made.append(put(store, "one", b"x" * at).id)
    by_age = [each.id for each in store.files_of("one", "", Paging(10, is_ascending=True))]
    assert sorted(by_age) == sorted(made)
    for is_ascending in (True, False):
        seen: list[str] = []
        while more := store.files_of("one", "", Paging(2, seen[-1] if seen else "", is_ascending)):
            seen += [each.id for each in more[:2]]
        assert seen == (by_age if is_ascending else by_age[::-1])
    assert store.files_of("one", "batch_output", ALL) == []
    with pytest.raises(RequestNotFound):
        store.files_of("two", "", Paging(2, made[0]))


def test_a_quota_holds_for_files_and_for_uploads_under_way(make: Callable[..., FileStore]) -> None:
    store = make(tenant_mib=3)
    first = put(store, "one", b"x" * 2 * MIB)
    with pytest.raises(QuotaExceeded, match="2 MiB of the 3 MiB"):
        store.begin("one", 2 * MIB)
    open_one = store.begin("one", MIB)  # the rest of the quota
    another = store.begin("one")
    with pytest.raises(QuotaExceeded):
        store.write(another, b"y")
    store.discard(another)
    put(store, "two", b"x" * 2 * MIB)  # another owner's quota
    with pytest.raises(QuotaExceeded):
        store.write(open_one, b"z" * (MIB + 1))
    store.discard(open_one)
    store.delete("one", first.id)
    assert put(store, "one", b"x" * 3 * MIB).bytes == 3 * MIB
    assert len(contents(store)) == 2


def test_files_and_uploads_expire(make: Callable[..., FileStore], clock: Clock) -> None:
    store = make(ttl_s=1000.0)
    kept, short = put(store, "one", b"long"), put(store, "one", b"short", ttl_s=10.0)
    assert (kept.expires_at - kept.created_at, short.expires_at - short.created_at) == (1000, 10)
    store.begin("one")  # its client never continues
    clock.now_s += 11
    assert store.files_of("one", "", ALL) == [kept]
    with pytest.raises(RequestNotFound):
        store.find("one", short.id)
    clock.now_s += 4000
    put(store, "two", b"new")
    assert len(contents(store)) == 1


def test_a_full_disk_leaves_nothing_behind(make: Callable[..., FileStore]) -> None:
    store = make()
    upload = store.begin("one")
    with full_disk(1000), pytest.raises(StorageFull, match="--files-dir"):
        store.write(upload, b"x" * 2000)
    store.discard(upload)
    assert contents(store) == []
    assert put(store, "one", b"x" * 2000).bytes == 2000


def test_a_file_that_a_batch_reads_stays(make: Callable[..., FileStore], clock: Clock) -> None:
    store = make(ttl_s=10.0)
    batches = BatchStore(store)
    kept = put(store, "one", b"{}")
    batch = BatchObject(id="", endpoint="/v1/completions", input_file_id=kept.id, created_at=0, expires_at=0)
    made = batches.create(batch, "one", None, None)
    with pytest.raises(Refused, match=made.id):
        store.delete("one", kept.id)
    clock.now_s += 100
    put(store, "two", b"new")
    assert content_of(store, "one", kept.id) == b"{}"
    batches.cancel("one", made.id)
    batches.end(made.id, made.request_counts, (None, None))
    with pytest.raises(RequestNotFound):
        store.find("one", kept.id)
