"""Versions of weights after a scheduler's restart, which forgets checks, numbers and versions that are not loaded."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from pd_cluster import wire
from pd_cluster.checkpoints.replaced_weights import check_replacement
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.members.cluster_control import PauseMode
from pd_cluster.cluster.members.worker_membership import Membership, instances_of
from pd_cluster.cluster.weights.weight_updates import WeightRules, WeightUpdates
from pd_cluster.engine.lifecycle.engine_weights import EngineWeights, WeightSource
from pd_cluster.engine.lifecycle.weight_copies import WeightCopies
from pd_cluster.errors import ModelError
from pd_cluster.model.runner.weight_versions import VersionFiles
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.wire import WeightStatus, WeightVersion
from tests.support.elastic_world import place_of
from tests.support.mail import RecordedMail
from tests.support.router_world import info_of, ready

WAIT_S = 20.0
FIRST, SECOND = (WeightVersion(1, name, f"digest of {name}", f"/versions/{name}") for name in ("first", "second"))


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def make_folder(folder: Path, value: int) -> Path:
    """Writes a model folder with one tensor."""
    folder.mkdir()
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (-len(header) % 8)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes([value] * 8))
    (folder / "config.json").write_text("{}")
    return folder


# ---- an instance


def test_other_weights_with_the_same_epoch_are_loaded() -> None:
    """A restarted scheduler that knows neither of this instance nor of its version may use the epoch again."""
    loaded: list[str] = []
    source = WeightSource(lambda version: None, lambda version: True, lambda version: loaded.append(version.name))
    weights = EngineWeights(source)
    for version, names in ((FIRST, ["first"]), (SECOND, ["first", "second"])):
        weights.wish(version)
        assert weights.is_due
        assert weights.closed
        weights.settle()
        assert loaded == names
        assert weights.status.held == version
        assert not weights.is_due
    weights.wish(replace(SECOND, name="best"))
    assert not weights.is_due
    assert weights.status.held.name == "best"
    weights.wish(WeightVersion(0, "start"))
    assert not weights.is_due
    assert weights.status.held.name == "best"


def test_a_version_that_the_next_scheduler_does_not_know_is_not_awaited() -> None:
    """Its files are nowhere, so the instance would never again take requests."""

    def check(version: WeightVersion) -> None:
        raise ModelError("the files are gone")

    def load(version: WeightVersion) -> None:
        raise AssertionError("it is not loaded")

    weights = EngineWeights(WeightSource(check, lambda version: False, load))
    weights.wish(FIRST)
    weights.settle()
    until(lambda: bool(weights.status.lacks))
    assert weights.closed
    weights.wish(WeightVersion())  # the version that it has
    assert not weights.closed
    assert not weights.status.lacks
    assert weights.epoch == 0


def test_a_search_for_an_abandoned_version_reports_nothing() -> None:
    began, goes_on = threading.Event(), threading.Event()

    def check(version: WeightVersion) -> None:
        began.set()
        assert goes_on.wait(WAIT_S)
        raise ModelError("the files are gone")

    weights = EngineWeights(WeightSource(check, lambda version: False, lambda version: None))
    weights.wish(FIRST)
    weights.settle()
    assert began.wait(WAIT_S)
    weights.wish(WeightVersion())
    goes_on.set()
    assert weights._search is not None
    weights._search.join(WAIT_S)
    assert not weights.status.lacks


def test_checks_that_nobody_awaits_any_more_are_not_made() -> None:
    """A trainer whose update has failed begins others, while the first check still reads files."""
    began, goes_on, made = threading.Event(), threading.Event(), list[int]()

    def check(version: WeightVersion) -> None:
        made.append(version.epoch)
        began.set()
        assert goes_on.wait(WAIT_S)

    weights = EngineWeights(WeightSource(check, lambda version: False, lambda version: None))
    weights.check(FIRST)
    assert began.wait(WAIT_S)
    last = replace(SECOND, epoch=5)
    for version in (*(replace(SECOND, epoch=epoch) for epoch in range(2, 5)), last):
        weights.check(version)
    goes_on.set()
    until(lambda: weights.status.checked == last)
    assert made == [1, 5]


class Copying:
    """A source of copies that has the folders of versions by digest."""

    def __init__(self, root: Path, folders: dict[str, Path]) -> None:
        self.copies, self._folders = WeightCopies(root), folders

    def fetch(self, version: WeightVersion, check: Callable[[Path], None]) -> None:
        folder = self.copies.begin()
        for file in self._folders[version.digest].iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        check(folder)
        self.copies.keep(version.digest, folder)


def test_loading_a_version_keeps_the_copy_of_one_that_was_checked_later(tmp_path: Path) -> None:
    """A late instance may load a version while the next one is being checked."""
    base = make_folder(tmp_path / "base", 0)
    folders = {}
    for at in (1, 2):
        folder = make_folder(tmp_path / f"step-{at}", at)
        folders[check_replacement(base, folder)] = folder
    first, second = (WeightVersion(at, f"step-{at}", digest, "/not/here") for at, digest in enumerate(folders, start=1))
    source = Copying(tmp_path, folders)
    files = VersionFiles(base, source)
    for version in (first, second):
        files.check(version)
    files.loaded(first)
    assert files.is_found(second)
    files.loaded(second)
    assert source.copies.of(first.digest) is None
    assert source.copies.of(second.digest) is not None
    source.copies.close()


def test_weights_that_would_end_every_instance_do_not_fit(tmp_path: Path) -> None:
    base, diverged = make_folder(tmp_path / "base", 0), make_folder(tmp_path / "step-1", 0xFF)  # these bits are NaN
    files = VersionFiles(base)
    version = WeightVersion(1, "step-1", check_replacement(base, diverged), str(diverged))
    with pytest.raises(ModelError, match="weight: contains NaN or infinity"):
        files.check(version)
    assert not files.is_found(version)


# ---- the scheduler's list of instances


def connected(num_instances: int) -> tuple[Membership, list[Instance], RecordedMail]:
    """Returns a restarted scheduler's membership, and instances to which it has connected."""
    mail = RecordedMail()
    place = place_of(1, num_instances - 1)
    instances = instances_of(place, list(range(1, num_instances + 1)))
    membership = Membership(place, instances, mail, Timeouts(), "model")
    for instance in instances:
        membership.connect(instance, info_of(instance.name, instance.role))
        membership.on_opened(instance.conn)
    return membership, instances, mail


def beat(membership: Membership, instance: Instance, held: WeightVersion, lacks: str = "") -> None:
    membership.on_heartbeat(instance.conn, wire.Load(weights=WeightStatus(held=held, lacks=lacks)))


def orders(mail: RecordedMail, instance: Instance) -> list[WeightVersion]:
    return [body.version for conn, body in mail.sent if conn == instance.conn and isinstance(body, wire.ChangeWeights)]


async def test_an_instance_with_other_weights_of_the_same_epoch_is_not_ready() -> None:
    membership, (first, second), mail = connected(2)
    beat(membership, first, FIRST)
    beat(membership, second, SECOND)
    assert first.is_ready
    assert not second.is_ready
    assert orders(mail, second) == [FIRST]
    beat(membership, second, SECOND)
    assert not second.is_ready
    beat(membership, second, FIRST)
    assert second.is_ready


async def test_an_instance_stops_looking_for_a_version_that_nobody_has() -> None:
    membership, (first, second), mail = connected(2)
    beat(membership, first, WeightVersion())
    beat(membership, second, WeightVersion(), lacks="the files are gone")
    assert [orders(mail, each) for each in (first, second)] == [[], [WeightVersion()]]
    assert second.is_ready


async def test_weights_may_change_while_an_instance_loads_adapters() -> None:
    mail, place = RecordedMail(), place_of(1, 1)
    instances = instances_of(place, [1, 2])
    membership = Membership(place, instances, mail, Timeouts(), "model")
    membership.adapters = wire.WantedAdapters([wire.AdapterLocation("adapter", "/adapter")])
    instance = instances[0]
    membership.connect(instance, info_of(instance.name, instance.role))
    membership.on_opened(instance.conn)
    membership.change_weights(FIRST)
    membership.on_adapter_states(instance.conn, wire.AdapterStates(["adapter"], {}))
    assert not instance.is_ready, "it has the old weights"
    beat(membership, instance, FIRST)
    membership.on_adapter_states(instance.conn, wire.AdapterStates(["adapter"], {}))
    assert instance.is_ready


# ---- updates


class Members:
    """The instances of a scheduler's updates, which report what a test sets."""

    def __init__(self) -> None:
        self.instances = [ready("decode-0")]
        self.weights = WeightVersion()
        self.sent: list[wire.Body] = []
        self._changed = asyncio.Event()

    async def change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def report(self, status: WeightStatus) -> None:
        self.instances[0].load = wire.Load(weights=status)
        self._changed.set()

    def send(self, conn: str, body: wire.Body) -> None:
        self.sent.append(body)

    def change_weights(self, version: WeightVersion) -> None:
        self.weights = version
        self.report(WeightStatus(held=version))

    def offer_weights(self, version: WeightVersion) -> None: ...

    def may_load_weights(self) -> list[Instance]:
        return self.instances

    def lacking_weights(self) -> list[Instance]:
        return [each for each in self.instances if each.load.weights.held != self.weights]

    def set_back_lacking(self) -> None: ...

    async def while_empty(self, mode: PauseMode, job: Callable[[], Awaitable[None]]) -> None:
        await job()


async def checked(members: Members, updates: WeightUpdates, folder: str) -> WeightVersion:
    """Checks a folder; returns the version that the instance was asked to check, and has checked."""
    taking = asyncio.create_task(updates.take(folder, []))
    async with asyncio.timeout(WAIT_S):
        while not members.sent:
            await asyncio.sleep(0.01)
    asked = members.sent.pop()
    assert isinstance(asked, wire.CheckWeights)
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert not taking.done(), "the instance has not checked this version"
    members.report(replace(members.instances[0].load.weights, checked=asked.version, problem=""))
    await asyncio.wait_for(taking, WAIT_S)
    return asked.version


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Returns the folder of versions; the model is beside it."""
    make_folder(tmp_path / "base", 0)
    (tmp_path / "versions").mkdir()
    for at in (1, 2):
        make_folder(tmp_path / "versions" / f"step-{at}", at)
    return tmp_path / "versions"


def updates_of(members: Members, folders: Path) -> WeightUpdates:
    return WeightUpdates(members, members.send, members, WeightRules(folders, folders.parent / "base"))


async def test_a_check_for_an_earlier_scheduler_does_not_count(folders: Path) -> None:
    """Its version had the same number, because the restarted scheduler counts from the versions that are loaded."""
    members = Members()
    updates = updates_of(members, folders)
    await updates.start("wait")
    first = await checked(members, updates, "step-1")
    await updates.abort()
    members = Members()
    members.report(WeightStatus(checked=first))
    again = updates_of(members, folders)
    await again.start("wait")
    second = await checked(members, again, "step-2")
    assert second.epoch == first.epoch
    await again.abort()


async def test_a_version_that_an_instance_reports_meanwhile_keeps_its_number(folders: Path) -> None:
    members = Members()
    updates = updates_of(members, folders)
    await updates.start("wait")
    found = await checked(members, updates, "step-2")
    members.weights = replace(FIRST, epoch=found.epoch)  # the first instance that connects has it
    finished = await updates.finish()
    assert finished.epoch > found.epoch
    assert finished.digest == found.digest
    assert members.weights == finished


async def test_a_change_is_not_over_while_no_instance_is_ready(folders: Path) -> None:
    """Each of them ended as it loaded the weights."""
    members = Members()
    updates = updates_of(members, folders)
    await updates.start("wait")
    found = await checked(members, updates, "step-1")
    members.instances[0].state = "unreachable"
    finishing = asyncio.create_task(updates.finish())
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert not finishing.done()
    members.instances[0].state = "ready"
    members.report(WeightStatus(held=found))
    assert await asyncio.wait_for(finishing, WAIT_S) == found


async def test_a_folder_that_instances_may_still_read_is_not_overwritten(folders: Path) -> None:
    """A restarted scheduler begins an update before any instance has reported its version."""
    members = Members()
    updates = updates_of(members, folders)
    await updates.start("wait")
    await checked(members, updates, "step-1")
    present = Path((await updates.finish()).path)
    before = (present / "model.safetensors").read_bytes()
    members = Members()
    again = updates_of(members, folders)
    await again.start("wait")
    found = await checked(members, again, "step-2")
    assert (present / "model.safetensors").read_bytes() == before
    assert Path(found.path) != present
    await again.abort()
    assert present.is_dir()
