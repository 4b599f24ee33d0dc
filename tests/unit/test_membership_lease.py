"""With several schedulers, membership has at most one owner under random orders of events; the record in a folder."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from pd_cluster.cluster.leases import membership_lease
from pd_cluster.cluster.leases.lease_folder import NUM_KEPT, LeaseFolder
from pd_cluster.cluster.leases.membership_lease import DesiredInstance, LeaseRecord, Ownership
from pd_cluster.errors import ConfigError, LeaseUnavailable
from tests.support.scheduler_world import DURATION_S, Store, Way, World

SEEDS = range(200)  # 100 seeds detected all but one of the seeded faults of commit 6ae04940
SLOW_SEEDS = range(10_000, 20_000)


def explore(seeds: Sequence[int], removals: float = 0.0) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        world = World(seed, removals=removals)
        try:
            world.run()
            world.settle()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen["owners"] += world.num_owners
        seen["refused"] += world.num_refused
        seen["wishes"] += world.num_wishes
        seen["stops"] += world.num_stops
        seen["removed"] += world.num_removed
    return seen


def test_no_two_own_membership_in_random_orders() -> None:
    seen = explore(SEEDS)
    assert seen["owners"] > 2 * len(SEEDS)
    assert seen["refused"] > 5, f"late orders were hardly seen: {seen}"
    assert seen["wishes"] > len(SEEDS)


def test_no_two_own_membership_where_the_record_is_removed_by_hand() -> None:
    seen = explore(SEEDS[:100], removals=1.0)
    assert seen["owners"] > 100
    assert seen["removed"] > 200


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("removals", [0.0, 0.5, 4.0])
def test_no_two_own_membership_in_10000_random_orders(removals: float) -> None:
    explore(SLOW_SEEDS, removals)


@pytest.mark.parametrize("num_removals", [1, 3])
def test_of_a_record_that_was_removed_no_two_are_owners(num_removals: int) -> None:
    """The owner rewrites the removed record, then dies; the last removal stays. The other scheduler sees none of it."""
    clock, store = Clock(), Store(random.Random(0), lambda: clock.now_s)
    store.is_sure = True
    one, other = (
        Ownership(name, DURATION_S, clock, least_term=lambda: int(clock.now_s))
        for name in ("scheduler-0@1", "scheduler-1@2")
    )
    ways = {each: Way(store) for each in (one, other)}
    look(one, ways[one], [MEMBER])
    clock.now_s += DURATION_S
    look(one, ways[one], [MEMBER])
    store.record = LeaseRecord()
    look(other, ways[other])  # sees no record, and begins to wait
    for _ in range(num_removals):
        clock.now_s += DURATION_S / 5
        look(one, ways[one], [MEMBER])
        store.record = LeaseRecord()
    last_s = clock.now_s
    while other.term_now is None:
        look(other, ways[other])
        assert None in (one.term_now, other.term_now)
        clock.now_s += DURATION_S / 10
    assert DURATION_S <= clock.now_s - last_s <= 1.3 * DURATION_S


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


MEMBER = DesiredInstance(name="decode-0", role="decode", host="127.0.0.1", port=8089, device_ids=["0"])


def look(own: Ownership, store: membership_lease.LeaseStore, members: Sequence[DesiredInstance] = ()) -> None:
    wanted = own.after_read(store.read(), members)
    if wanted is not None:
        own.after_write(wanted, store.write(wanted))


def owned(folder: Path) -> tuple[Clock, LeaseFolder, Ownership, Ownership]:
    """Returns a record owned by the first of two schedulers."""
    clock, store = Clock(), LeaseFolder(folder / "lease")
    one, other = (Ownership(name, DURATION_S, clock) for name in ("scheduler-0@1", "scheduler-1@2"))
    look(one, store, [MEMBER])
    assert one.term_now is None, "a scheduler with a list may be about to write it"
    clock.now_s += DURATION_S
    look(one, store, [MEMBER])
    look(other, store)
    return clock, store, one, other


def test_another_takes_over_within_the_lease_and_keeps_the_list(tmp_path: Path) -> None:
    clock, store, one, other = owned(tmp_path)
    assert (one.term_now, other.term_now) == (1, None)
    clock.now_s += 0.5
    look(one, store, [MEMBER])  # renews the lease
    look(other, store)
    clock.now_s += DURATION_S - 0.1  # the owner has died or is paused
    look(other, store, other.record.members)
    assert (one.term_now, other.term_now) == (1, None), "the lease has not expired yet"
    clock.now_s += 0.1
    look(other, store, other.record.members)
    assert (one.term_now, other.term_now) == (None, 2)
    look(one, store)
    assert one.term_now is None
    assert one.record.members == [MEMBER]
    assert one.highest_term == 2


def test_one_that_ends_lets_go_at_once(tmp_path: Path) -> None:
    _, store, one, other = owned(tmp_path)
    assert store.write(one.released() or LeaseRecord())
    assert one.term_now is None
    look(other, store, other.record.members)
    assert other.term_now == 2


def test_of_several_processes_one_writes_a_version(tmp_path: Path) -> None:
    folder = tmp_path / "lease"
    code = (
        "import sys; from pathlib import Path; from pd_cluster.cluster.leases.membership_lease import LeaseRecord\n"
        "from pd_cluster.cluster.leases.lease_folder import LeaseFolder\n"
        "print(LeaseFolder(Path(sys.argv[1])).write(LeaseRecord(version=1, term=1, holder=sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, str(folder)]
    writers = [subprocess.Popen([*command, f"w{at}"], stdout=subprocess.PIPE, text=True) for at in range(3)]
    assert sorted(writer.communicate(timeout=30)[0] for writer in writers) == ["False\n", "False\n", "True\n"]
    assert LeaseFolder(folder).read().version == 1


def test_the_folder_keeps_few_versions_and_no_other_files(tmp_path: Path) -> None:
    store = LeaseFolder(tmp_path / "lease")
    assert store.read() == LeaseRecord()
    for version in range(1, 12):
        assert store.write(LeaseRecord(version=version, term=1, holder="a@1", members=[MEMBER]))
        assert not store.write(LeaseRecord(version=version, term=2, holder="b@2"))
    assert not store.write(LeaseRecord(version=2, term=9, holder="b@2")), "a late write must be refused"
    assert store.read() == LeaseRecord(version=11, term=1, holder="a@1", members=[MEMBER])
    names = sorted(os.listdir(store.path))
    assert names == [f"{version:020d}" for version in range(11 - NUM_KEPT + 1, 12)]
    assert all((store.path / name).stat().st_mode & 0o777 == 0o600 for name in names)
    assert store.path.stat().st_mode & 0o777 == 0o700


def test_a_version_is_followed_only_by_who_has_read_it(tmp_path: Path) -> None:
    one, other = LeaseFolder(tmp_path / "lease"), LeaseFolder(tmp_path / "lease")
    assert one.write(LeaseRecord(version=1, term=1, holder="a@1", stamp="a@1/1"))
    assert other.read().version == 1
    (one.path / f"{1:020d}").unlink()  # removed by hand; its owner writes it again
    assert one.read() == LeaseRecord()
    assert one.write(LeaseRecord(version=1, term=1, holder="a@1", stamp="a@1/2"))
    assert not other.write(LeaseRecord(version=2, term=2, holder="b@2", stamp="b@2/1"))
    assert os.listdir(one.path) == [f"{1:020d}"]
    assert other.read().stamp == "a@1/2"
    assert other.write(LeaseRecord(version=2, term=2, holder="b@2", stamp="b@2/2"))


@pytest.mark.parametrize("later", [(), (1,), (2, 3), (1, 2)])
def test_a_write_that_is_refused_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: Sequence[int]
) -> None:
    """Covers a folder that is emptied just before the new version gets its name, while others write."""
    store, link, unlink = LeaseFolder(tmp_path / "lease"), os.link, Path.unlink
    assert store.write(LeaseRecord(version=1, term=1, holder="a@1", stamp="a@1/1"))
    others = {version: msgspec.json.encode(LeaseRecord(version=version, holder="b@2")) for version in later}

    def late(new: Path, file: Path) -> None:
        unlink(store.path / f"{1:020d}")
        for version, content in others.items():
            if version != 2:
                (store.path / f"{version:020d}").write_bytes(content)
        link(new, file)
        if 2 in others:  # our version is removed, and its number taken
            unlink(file)
            file.write_bytes(others[2])

    monkeypatch.setattr(os, "link", late)
    assert not store.write(LeaseRecord(version=2, term=9, holder="a@1", stamp="a@1/2"))
    found = {int(name): (store.path / name).read_bytes() for name in os.listdir(store.path)}
    assert found == others
    if others:
        assert store.read().holder == "b@2"


def test_a_number_is_one_schedulers(tmp_path: Path) -> None:
    one, other = LeaseFolder(tmp_path / "lease"), LeaseFolder(tmp_path / "lease")
    one.take(0)
    with pytest.raises(ConfigError, match=r"scheduler.index.* 0: another scheduler"):
        other.take(0)
    other.take(1)
    assert (one.path / "scheduler-0").stat().st_mode & 0o777 == 0o600
    assert not os.get_inheritable(one._lock)
    os.close(one._lock)  # as when its process ends
    LeaseFolder(tmp_path / "lease").take(0)
    (one.path / "scheduler-2").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"scheduler.index.* 2"):
        other.take(2)


def test_what_others_are_writing_stays(tmp_path: Path) -> None:
    folder = LeaseFolder(tmp_path / "lease").path
    left, current = folder / "new-1", folder / "new-2"
    for file in (left, current):
        file.write_bytes(b"{")
    os.utime(left, (time.time() - 61, time.time() - 61))
    LeaseFolder(folder)
    assert os.listdir(folder) == ["new-2"]


def test_a_version_is_on_the_disk_before_it_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, done, link, fsync = LeaseFolder(tmp_path / "lease"), list[str](), os.link, os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(f"fsync {os.fstat(fd).st_size > 0}"), fsync(fd)))
    monkeypatch.setattr(os, "link", lambda *names: (done.append("link"), link(*names)))
    assert store.write(LeaseRecord(version=1, term=1, holder="a@1"))
    assert done == ["fsync True", "link"]


def test_a_faulty_record_or_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    store = LeaseFolder(tmp_path / "lease")

    def version(number: int) -> Path:
        return store.path / f"{number:020d}"

    for content, told in ((b"{", "00003"), (msgspec.json.encode(LeaseRecord(version=4)), "version 4")):
        version(3).write_bytes(content)
        with pytest.raises(LeaseUnavailable, match=told):
            store.read()
    version(4).symlink_to("/dev/zero")
    os.mkfifo(version(5))
    for number in (5, 4):
        with pytest.raises(LeaseUnavailable, match=f"0000{number}"):
            store.read()
        version(number).unlink()
    store.path.chmod(0o755)
    (tmp_path / "link").symlink_to(store.path)
    for path, told in (("lease", "0700"), ("link", "must be a folder"), ("none/lease", "No such file")):
        with pytest.raises(ConfigError, match=told):
            LeaseFolder(tmp_path / path)
