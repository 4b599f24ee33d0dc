"""Instances without a version's files get them from others, which the scheduler names; over real channels."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pd_cluster import wire
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.members.weight_sources import OWN_NAME, WeightSources
from pd_cluster.engine.lifecycle import weight_copies
from pd_cluster.engine.lifecycle.weight_copies import LOCK, PREFIX, WeightCopies
from pd_cluster.engine.stages import weight_transfers
from pd_cluster.engine.stages.weight_transfers import TransferEnds, WeightTransfers
from pd_cluster.errors import ModelError
from pd_cluster.net import folder_transfer
from pd_cluster.net.payload_channel import PayloadSender
from pd_cluster.net.zmq_sockets import KeyPair
from pd_cluster.process_messages import InstanceInfo

HOST, WAIT_S = "127.0.0.1", 20.0
FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 9}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_transfers, "BUSY_S", 0.02)


@pytest.fixture
def brief_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which somebody stays silent."""
    for module in (folder_transfer, weight_transfers):
        monkeypatch.setattr(module, "SILENCE_S", 1.0)


class Member:
    """An instance's stage, its key, and what the scheduler knows of it."""

    def __init__(self, world: World, name: str) -> None:
        self.keys = KeyPair.of(b"")
        self.base = world.folder(f"{name}-base")
        ends = TransferEnds(lambda conn, body: world.to_scheduler(self, body), lambda: PayloadSender(self.keys), HOST)
        self.stage = WeightTransfers(self.base, ends, WeightCopies(world.root))
        self.stage.opened("scheduler", is_scheduler=True)
        info = InstanceInfo(
            name=name, role="decode", state="ready", server_ip=HOST, device_ids=[], epoch=1, pid=1,
            public_key=self.keys.public,
        )  # fmt: skip
        self.instance = Instance(name, "decode", HOST, 1, [], info=info, conn=name)

    def holds(self, version: wire.WeightVersion) -> None:
        self.instance.load = wire.Load(weights=wire.WeightStatus(held=version))


class World:
    """A scheduler and its instances, whose messages arrive at once."""

    def __init__(self, root: Path) -> None:
        self.root, self.keys = root, KeyPair.of(b"")
        self.public_key = self.keys.public
        self.members: dict[str, Member] = {}
        self.instances: list[Instance] = []
        self.named: list[str] = []  # the sources, in order
        self.answers = True  # whether the scheduler's answers arrive
        self.sources = WeightSources(self, self.instances)

    def add(self, *names: str) -> list[Member]:
        for name in names:
            self.members[name] = Member(self, name)
            self.instances.append(self.members[name].instance)
        return [self.members[name] for name in names]

    def folder(self, name: str, **files: bytes) -> Path:
        folder = self.root / name
        folder.mkdir()
        for file, data in {**FILES, **files}.items():
            (folder / file).write_bytes(data)
        return folder

    def payload_sender(self) -> PayloadSender:
        return PayloadSender(self.keys)

    def send(self, conn: str, body: wire.Body) -> None:
        if isinstance(body, wire.TakeWeights):
            self.named.append(body.source)
            if not self.answers:
                return
        self.members[conn].stage.at_once("scheduler", body)

    def to_scheduler(self, member: Member, body: wire.Body) -> None:
        name = member.instance.name
        if isinstance(body, wire.SeekWeights):
            self.sources.sought(name, member.instance, body)
        else:
            assert isinstance(body, wire.WeightAddress)
            self.sources.addressed(name, member.instance, body)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    for member in made.members.values():
        member.stage.close()
    assert not [*tmp_path.glob(f"{PREFIX}*")]


def accept(folder: Path) -> None:
    for name, data in FILES.items():
        if (folder / name).read_bytes() != data:
            raise ModelError(f"{name}: other bytes")


def version_at(folder: Path, epoch: int = 3) -> wire.WeightVersion:
    return wire.WeightVersion(epoch, "new", "digest", str(folder))


def test_a_copy_comes_from_an_instance_that_holds_the_version(world: World) -> None:
    receiver, source = world.add("receiver", "source")
    version = version_at(world.folder("version"))
    source.holds(version)
    world.sources.offer(version)
    receiver.stage.fetch(version, accept)
    copy = receiver.stage.copies.of("digest")
    assert copy is not None
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == FILES
    assert world.named == [source.instance.key]
    receiver.stage.fetch(version, accept)
    assert len(world.named) == 1, "its copy must be used again"
    receiver.stage.copies.keep_only("another")
    assert receiver.stage.copies.of("digest") is None
    assert not copy.exists()


def test_sources_without_the_files_are_passed_over(world: World) -> None:
    """The first has lost its folder, the second has other bytes; the third got a copy itself, the last is this one."""
    receiver, second, third = world.add("receiver", "second", "third")
    (first,) = world.add("first")
    good = world.folder("version")
    version = version_at(good)
    for member in (first, second, third):
        member.holds(version)
    world.sources.offer(version)
    other = world.folder("other", **{"config.json": b"[]"})
    second.stage.copies.keep("digest", other)
    first.stage.copies.keep("digest", world.root / "none")
    copy = third.stage.copies.begin()
    for name, data in FILES.items():
        (copy / name).write_bytes(data)
    third.stage.copies.keep("digest", copy)
    receiver.stage.fetch(version, accept)
    assert set(world.named) <= {each.instance.key for each in (first, second, third)}
    assert world.named[-1] == third.instance.key
    found = receiver.stage.copies.of("digest")
    assert found is not None
    assert len([*found.parent.iterdir()]) == 2, "the lock and one folder: what did not fit is gone"


def test_the_scheduler_sends_what_lies_below_its_folder(world: World) -> None:
    (receiver,) = world.add("receiver")
    version = version_at(world.folder("version"))
    world.sources.offer(wire.WeightVersion(), version)
    with pytest.raises(ModelError, match="none has them"):
        receiver.stage.fetch(version, accept)
    world.sources.send_from(world.root)
    receiver.stage.fetch(version, accept)
    assert world.named == ["", OWN_NAME]


def test_a_version_that_nobody_offers_is_not_sent(world: World) -> None:
    receiver, source = world.add("receiver", "source")
    version = version_at(world.folder("version"))
    source.holds(version)
    with pytest.raises(ModelError, match="not an offered version"):
        receiver.stage.fetch(version, accept)
    world.sources.offer(version)
    address = wire.WeightAddress(3, source.instance.key, 1, bytes(32))
    world.sources.addressed("receiver", receiver.instance, address)  # was not named
    assert source.stage.sending is None


def test_a_source_sends_to_one_instance_at_a_time(world: World) -> None:
    first, second, source = world.add("first", "second", "source")
    version = version_at(world.folder("version"))
    source.holds(version)
    world.sources.offer(version)
    world.sources.sought("first", first.instance, wire.SeekWeights(3))
    fetching = threading.Thread(target=second.stage.fetch, args=(version, accept), daemon=True)
    fetching.start()
    deadline_s = time.monotonic() + WAIT_S
    while world.named.count("") < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert second.stage.copies.of("digest") is None
    world.sources.sought("first", first.instance, wire.SeekWeights(3, is_over=True))
    fetching.join(WAIT_S)
    assert not world.sources.named
    assert second.stage.copies.of("digest") is not None


def test_a_search_ends_if_all_sources_stay_busy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_transfers, "MOST_BUSY_S", 0.1)
    first, second, source = world.add("first", "second", "source")
    version = version_at(world.folder("version"))
    source.holds(version)
    world.sources.offer(version)
    world.sources.sought("first", first.instance, wire.SeekWeights(3))
    with pytest.raises(ModelError, match="sending to other instances"):
        second.stage.fetch(version, accept)
    assert world.named.count("") > 1


def test_a_source_may_notice_late_that_a_receiver_is_done(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_transfer, "POLL_S", 0.5)
    first, second, source = world.add("first", "second", "source")
    version = version_at(world.folder("version"))
    source.holds(version)
    world.sources.offer(version)
    for member in (first, second):
        member.stage.fetch(version, accept)
    assert world.named == [source.instance.key] * 2


@pytest.mark.usefixtures("brief_silence")
def test_a_source_is_free_once_its_receiver_gives_up(world: World) -> None:
    receiver, source = world.add("receiver", "source")
    version = version_at(world.folder("version"))
    source.holds(version)
    world.sources.offer(version)
    world.answers = False
    with pytest.raises(ModelError, match="names no source"):
        receiver.stage.fetch(version, accept)
    assert world.named == [source.instance.key]
    assert not world.sources.named


def test_the_reason_of_the_last_failure_is_reported(world: World) -> None:
    receiver, source = world.add("receiver", "source")
    version = version_at(world.folder("version", **{"config.json": b"[]"}))
    source.holds(version)
    world.sources.offer(version)
    with pytest.raises(ModelError, match=r"no source is left \(last: source@1: config.json: other bytes\)"):
        receiver.stage.fetch(version, accept)


@pytest.mark.usefixtures("brief_silence")
def test_no_answer_ends_the_search(world: World) -> None:
    (receiver,) = world.add("receiver")
    receiver.stage.closed("scheduler", "gone", was_scheduler=True)
    with pytest.raises(ModelError, match="names no source"):
        receiver.stage.fetch(version_at(world.root), accept)


KILLED = """
import sys
from pathlib import Path
from pd_cluster.engine.lifecycle import weight_copies
from pd_cluster.engine.lifecycle.weight_copies import WeightCopies
copies = WeightCopies(Path(sys.argv[1]))
print(copies.begin(), flush=True)
sys.stdin.read()
"""


def test_a_folder_is_never_seen_without_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process looks for abandoned folders just before this one locks its own."""
    lock = fcntl.flock

    def looked_at(file: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        weight_copies.remove_abandoned(tmp_path)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", looked_at)
    copies = WeightCopies(tmp_path)
    assert copies.begin().is_dir()
    copies.close()
    assert not os.listdir(tmp_path)


def test_a_removed_folder_is_made_again(tmp_path: Path) -> None:
    copies = WeightCopies(tmp_path)
    nums_open = []
    for _ in range(3):
        copies.keep("digest", copies.begin())
        nums_open.append(len(os.listdir("/proc/self/fd")))
        (folder,) = tmp_path.iterdir()
        shutil.rmtree(folder)
    assert copies.begin().is_dir()
    assert copies.of("digest") is None
    assert len({*nums_open}) == 1
    copies.close()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip()).parent
        copies = WeightCopies(tmp_path)
        copies.begin()
        assert left.is_dir(), "a live process's copy must stay"
        process.kill()
        process.wait()
    others = WeightCopies(tmp_path)
    others.begin()
    assert not left.exists()
    assert len([*tmp_path.glob(f"{PREFIX}*/{LOCK}")]) == 2
    copies.close()
    others.close()
    assert not os.listdir(tmp_path)
