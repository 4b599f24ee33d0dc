"""Adapters at run time, by the tables of docs/protocol.md: what workers are told, and when a name stands for which."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pd_cluster import wire
from pd_cluster.checkpoints.lora_folder import LoraFolder
from pd_cluster.cluster.members.adapters import GRACE_S, RETRY_S, AdapterBook
from pd_cluster.cluster.members.instance import Instance
from pd_cluster.cluster.routing.adapter_use import AdapterCounts
from pd_cluster.engine.adapters import AdapterHost, WorkerAdapters, reader_of
from pd_cluster.engine.handover.events import AdapterLoaded
from pd_cluster.engine.ranks import rank_messages as to
from pd_cluster.engine.ranks.rank_adapters import LeadAdapters
from pd_cluster.errors import ModelError, ModelNotFound, RequestError
from pd_cluster.settings.adapters import AdapterSettings
from pd_cluster.types import Order, Sampling
from pd_cluster.types.variants import short_name
from tests.support.elastic_world import ElasticWorld

TIMEOUT_S = 60.0


def write_adapter(folder: Path, seed: int) -> Path:
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.lora_A.weight": torch.full((2, 8), float(seed)), f"{name}.lora_B.weight": torch.ones(8, 2)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def digest_of(folder: Path) -> str:
    return LoraFolder.read(folder, 16).digest


class BookWorld(ElasticWorld):
    """Two workers that load what they are told when the test says so."""

    def __init__(self, root: Path) -> None:
        super().__init__(1, 1)
        self.folders = {name: write_adapter(root / name, seed) for seed, name in enumerate(("one", "two"), 1)}
        self.digests = {name: digest_of(folder) for name, folder in self.folders.items()}
        self.used: set[str] = set()
        self.published: list[dict[str, str]] = []
        for instance in self.membership.instances:
            self.membership.on_opened(instance.conn)

        async def publish() -> None:
            self.published.append(dict(self.book.names))

        self.book = AdapterBook(
            self.membership,
            AdapterSettings(enable_lora=True, max_cpu_loras=2),
            str(root),
            {},
            ("model",),
            lambda: self.used,
            publish,
            30.0,
            lambda: self.now_s,
        )

    def wanted(self) -> dict[str, set[str]]:
        """What each worker was told last."""
        return {
            conn.removeprefix("to-"): {each.digest for each in body.adapters}
            for conn, body in self.mailbox.of(wire.WantedAdapters)
        }

    def report(self, instance: Instance, problems: dict[str, str] | None = None) -> None:
        have = [digest for digest in self.wanted().get(instance.name, set()) if digest not in (problems or {})]
        self.membership.on_adapter_states(instance.conn, wire.AdapterStates(have, problems or {}))

    def report_all(self) -> None:
        for instance in self.membership.instances:
            self.report(instance)

    async def load(self, name: str, folder: str, replaces: bool = False) -> None:
        """Loads one that both workers can have."""
        loading = asyncio.ensure_future(self.book.load(name, folder, replaces))
        await self.until(lambda: loading.done() or self.digests[folder] in self.wanted().get("decode-0", set()))
        self.report_all()
        await asyncio.wait_for(loading, TIMEOUT_S)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                await asyncio.sleep(0)


async def test_a_name_is_published_when_the_last_worker_has_it(tmp_path: Path) -> None:
    world = BookWorld(tmp_path)
    loading = asyncio.ensure_future(world.book.load("a", "one"))
    await world.until(lambda: world.digests["one"] in world.wanted().get("decode-0", set()))
    world.report(world["prefill-0"])
    for _ in range(5):
        await asyncio.sleep(0)
    assert not loading.done()
    assert world.book.names == {}
    world.report(world["decode-0"])
    await asyncio.wait_for(loading, TIMEOUT_S)
    assert world.published == [{"a": world.digests["one"]}]


async def test_a_worker_s_reason_fails_the_load_and_takes_it_back(tmp_path: Path) -> None:
    world = BookWorld(tmp_path)
    loading = asyncio.ensure_future(world.book.load("a", "one"))
    await world.until(lambda: world.digests["one"] in world.wanted().get("decode-0", set()))
    world.report(world["prefill-0"])
    world.report(world["decode-0"], {world.digests["one"]: "no room"})
    with pytest.raises(RequestError, match="decode-0: no room"):
        await asyncio.wait_for(loading, TIMEOUT_S)
    assert world.wanted() == {"prefill-0": set(), "decode-0": set()}
    assert world.published == []


async def test_a_worker_that_is_lost_does_not_hold_up_the_others(tmp_path: Path) -> None:
    world = BookWorld(tmp_path)
    loading = asyncio.ensure_future(world.book.load("a", "one"))
    await world.until(lambda: world.digests["one"] in world.wanted().get("decode-0", set()))
    world.report(world["prefill-0"])
    decode = world["decode-0"]
    world.membership.on_closed(decode.conn, "it is dead")
    await asyncio.wait_for(loading, TIMEOUT_S)
    world.make_ready(decode)
    world.membership.on_opened(decode.conn)
    assert decode.shown_state == "connecting"
    assert decode.reason == "it loads adapters"
    world.report(decode, {world.digests["one"]: "the disk is full"})
    assert "the disk is full" in decode.reason
    world.mailbox.sent.clear()
    world.now_s = RETRY_S + 1
    world.book.tick()
    assert world.wanted()["decode-0"] == {world.digests["one"]}
    world.report(decode)
    assert decode.is_ready


async def test_an_unloaded_adapter_goes_when_nobody_has_it(tmp_path: Path) -> None:
    world = BookWorld(tmp_path)
    await world.load("a", "one")
    world.used = {world.digests["one"]}
    await world.book.unload("a")
    assert world.published[-1] == {}
    world.now_s = 10.0
    world.book.tick()
    assert world.wanted()["decode-0"] == {world.digests["one"]}
    world.used = set()
    world.book.tick()
    assert world.wanted()["decode-0"] == {world.digests["one"]}, "one may be about to be routed"
    world.now_s += GRACE_S
    world.book.tick()
    assert world.wanted()["decode-0"] == set()
    with pytest.raises(ModelNotFound, match="there is no adapter 'a'; there are none"):
        await world.book.unload("a")


async def test_an_unloaded_adapter_goes_at_its_deadline(tmp_path: Path) -> None:
    world = BookWorld(tmp_path)
    await world.load("a", "one")
    world.used = {world.digests["one"]}
    await world.book.unload("a")
    world.now_s = 29.0
    world.book.tick()
    assert world.wanted()["decode-0"] == {world.digests["one"]}
    world.now_s = 30.0
    world.book.tick()
    assert world.wanted()["decode-0"] == set()


async def test_loaded_again_before_it_has_gone(tmp_path: Path) -> None:
    world = BookWorld(tmp_path)
    await world.load("a", "one")
    await world.book.unload("a")
    await world.load("b", "one")
    world.now_s = 100.0
    world.book.tick()
    assert world.wanted()["decode-0"] == {world.digests["one"]}


async def test_two_names_of_one_content_and_one_that_moves(tmp_path: Path) -> None:
    world = BookWorld(tmp_path)
    await world.load("a", "one")
    await world.load("b", "one")
    await world.load("a", "two", replaces=True)
    world.now_s = 100.0
    world.book.tick()
    assert world.wanted()["decode-0"] == set(world.digests.values())
    await world.load("b", "two", replaces=True)
    world.book.tick()
    world.now_s += GRACE_S
    world.book.tick()
    assert world.wanted()["decode-0"] == {world.digests["two"]}


# ---- a worker


class FakeKeeper:
    """Loads as the test says: `hold` keeps it waiting, `problem` makes it fail."""

    def __init__(self) -> None:
        self.variants: dict[str, int] = {}
        self.hold = threading.Event()
        self.hold.set()
        self.problem = ""

    def load_adapter(self, folder: LoraFolder) -> None:
        assert self.hold.wait(TIMEOUT_S)
        if self.problem:
            raise ModelError(self.problem)
        self.variants[folder.digest] = len(self.variants) + 1

    def drop_adapter(self, digest: str) -> None:
        del self.variants[digest]


class WorkerWorld:
    def __init__(self, keeper: FakeKeeper | None, most: int | None = None) -> None:
        self.keeper = keeper
        self.sent: list[wire.AdapterStates] = []
        self.events: list[AdapterLoaded] = []
        self.has_event = threading.Semaphore(0)
        self.used: set[str] = set()
        self.begun: list[wire.Submit] = []
        self.left: list[str] = []  # why each of them cannot begin here
        self.failed: list[str] = []
        self.now_s = 0.0
        host = AdapterHost(
            send=self._send,
            put=self._put,
            used=lambda: self.used,
            begin=self._begin,
            fail=lambda conn, submit, why: self.failed.append(why),
        )
        reader = reader_of(AdapterSettings())
        self.adapters = WorkerAdapters(keeper, reader, host, {}, most, lambda: self.now_s)

    def _begin(self, conn: str, submit: wire.Submit, why: str) -> None:
        self.begun.append(submit)
        self.left.append(why)
        self.used.add(submit.order.variant)

    def _send(self, conn: str, body: wire.Body) -> None:
        assert conn == "s"
        assert isinstance(body, wire.AdapterStates)
        self.sent.append(body)

    def _put(self, event: AdapterLoaded) -> None:
        self.events.append(event)
        self.has_event.release()

    def take(self) -> None:
        assert self.has_event.acquire(timeout=TIMEOUT_S)
        self.adapters.loaded(self.events.pop(0))

    def want(self, *folders: Path, digest: str = "") -> None:
        places = [wire.AdapterPlace(digest or digest_of(folder), str(folder)) for folder in folders]
        self.adapters.read("s", wire.WantedAdapters(places))


def test_a_worker_reports_what_it_has_and_drops_what_nobody_wants(tmp_path: Path) -> None:
    keeper, folder = FakeKeeper(), write_adapter(tmp_path / "one", 1)
    world, digest = WorkerWorld(keeper), digest_of(folder)
    keeper.hold.clear()
    world.want(folder)
    assert world.sent == [wire.AdapterStates([])]
    keeper.hold.set()
    world.take()
    assert world.sent[-1] == wire.AdapterStates([digest])
    world.used = {digest}
    world.want()
    world.adapters.tick()
    assert keeper.variants, "a request has it"
    world.used = set()
    world.adapters.tick()
    assert not keeper.variants


def test_a_worker_says_why_not_and_tries_again_when_it_is_told_again(tmp_path: Path) -> None:
    keeper, folder = FakeKeeper(), write_adapter(tmp_path / "one", 1)
    world, digest = WorkerWorld(keeper), digest_of(folder)
    keeper.problem = "no room"
    world.want(folder)
    world.take()
    assert world.sent[-1] == wire.AdapterStates([], {digest: "no room"})
    keeper.problem = ""
    world.want(folder)
    world.take()
    assert world.sent[-1] == wire.AdapterStates([digest])
    world.want(folder, digest="0" * 64)
    world.take()
    assert "another content" in world.sent[-1].problems["0" * 64]
    world.want(tmp_path / "one", tmp_path / "one")
    assert not world.events


def test_a_worker_loads_one_at_a_time_and_each_once(tmp_path: Path) -> None:
    keeper, folder = FakeKeeper(), write_adapter(tmp_path / "one", 1)
    world = WorkerWorld(keeper)
    keeper.hold.clear()
    world.want(folder)
    world.want(folder)
    keeper.hold.set()
    world.take()
    assert not world.has_event.acquire(blocking=False)
    assert len(keeper.variants) == 1


def test_one_that_is_wanted_again_before_it_is_dropped(tmp_path: Path) -> None:
    keeper, folder = FakeKeeper(), write_adapter(tmp_path / "one", 1)
    world, digest = WorkerWorld(keeper), digest_of(folder)
    world.want(folder)
    world.take()
    world.want()
    assert keeper.variants
    world.want(folder)
    assert world.sent[-1] == wire.AdapterStates([digest])
    world.adapters.tick()
    assert keeper.variants


def test_a_worker_without_places_for_adapters_says_so(tmp_path: Path) -> None:
    world, folder = WorkerWorld(None), write_adapter(tmp_path / "one", 1)
    world.want(folder)
    assert "--enable-lora" in world.sent[-1].problems[digest_of(folder)]
    world.want()
    assert world.sent[-1] == wire.AdapterStates([])


def leg(folder: Path, name: str, deadline_s: float = 0.0, client: str = "") -> wire.Submit:
    order = Order([1], Sampling(max_tokens=1), variant=digest_of(folder))
    return wire.Submit(name, 0, name, "hybrid", "", order, deadline_s, owner=wire.owner_of(client))


def many(tmp_path: Path, number: int) -> list[Path]:
    return [write_adapter(tmp_path / str(at), at) for at in range(number)]


def world_of(folders: list[Path], most: int) -> WorkerWorld:
    """All of them have been loaded once, in this order; the last ones are in memory."""
    world = WorkerWorld(FakeKeeper(), most)
    world.want(*folders)
    for _ in folders:
        world.take()
    assert world.sent[-1] == wire.AdapterStates([digest_of(folder) for folder in folders])
    return world


def present(world: WorkerWorld, folders: list[Path]) -> list[int]:
    assert world.keeper is not None
    return [at for at, folder in enumerate(folders) if digest_of(folder) in world.keeper.variants]


def test_the_least_recently_asked_gives_way_and_a_leg_waits_for_its_adapter(tmp_path: Path) -> None:
    folders = many(tmp_path, 4)
    world = world_of(folders, 2)
    assert present(world, folders) == [2, 3]
    assert world.adapters.admits("s", leg(folders[2], "a"))
    assert not world.adapters.admits("s", leg(folders[0], "b"))
    assert not world.adapters.admits("s", leg(folders[0], "c"))
    world.take()
    assert present(world, folders) == [0, 2]
    assert world.adapters.in_memory == tuple(sorted(short_name(digest_of(folders[at])) for at in (0, 2)))
    assert [each.request_id for each in world.begun] == ["b", "c"]
    assert world.adapters.admits("s", leg(folders[0], "d"))


def test_owners_of_held_legs_take_turns(tmp_path: Path) -> None:
    """A client that asks for many adapters delays another's one by no more than what is being read already."""
    folders = many(tmp_path, 8)
    world = world_of(folders, 1)
    assert world.keeper is not None
    world.keeper.hold.clear()
    for at in range(6):
        assert not world.adapters.admits("s", leg(folders[at], f"a{at}", client="a"))
    assert not world.adapters.admits("s", leg(folders[6], "b", client="b"))
    world.keeper.hold.set()
    for _ in range(7):
        world.take()
        world.used = set()  # each request ends at once
        world.adapters.tick()
    assert [each.request_id for each in world.begun] == ["a0", "b", "a1", "a2", "a3", "a4", "a5"]


def test_nobody_waits_for_ever_where_all_are_used(tmp_path: Path) -> None:
    """The one that was asked for least recently is closed to new requests until those that have it have ended."""
    folders = many(tmp_path, 4)
    world = world_of(folders, 2)
    world.used = {digest_of(folders[2]), digest_of(folders[3])}
    for at in (2, 3):
        assert world.adapters.admits("s", leg(folders[at], "a"))
    assert not world.adapters.admits("s", leg(folders[0], "b"))
    assert world.adapters.admits("s", leg(folders[3], "c"))
    assert not world.adapters.admits("s", leg(folders[2], "d")), "it comes behind what waits already"
    world.adapters.tick()
    assert present(world, folders) == [2, 3]
    world.used = {digest_of(folders[3])}
    world.adapters.tick()
    world.take()
    assert present(world, folders) == [0, 3]
    assert [each.request_id for each in world.begun] == ["b"]
    world.used = {digest_of(folders[0])}
    world.adapters.tick()
    world.take()
    assert present(world, folders) == [0, 2]
    assert [each.request_id for each in world.begun] == ["b", "d"]


def test_a_closed_one_opens_again_if_nobody_needs_its_room(tmp_path: Path) -> None:
    folders = many(tmp_path, 3)
    world = world_of(folders, 2)
    world.used = {digest_of(folders[1]), digest_of(folders[2])}
    assert not world.adapters.admits("s", leg(folders[0], "a"))
    assert not world.adapters.admits("s", leg(folders[1], "b"))
    world.adapters.abort("s", wire.Abort("a", 0))
    world.adapters.tick()
    assert [each.request_id for each in world.begun] == ["b"]
    assert present(world, folders) == [1, 2]


def test_held_legs_end_with_their_deadline_their_scheduler_or_their_worker(tmp_path: Path) -> None:
    folders = many(tmp_path, 2)
    world = world_of(folders, 1)
    world.used = {digest_of(folders[1])}
    assert not world.adapters.admits("s", leg(folders[0], "late", deadline_s=5.0))
    assert not world.adapters.admits("t", leg(folders[0], "orphan"))
    assert not world.adapters.admits("s", leg(folders[0], "last", deadline_s=60.0))
    world.now_s = 6.0
    world.adapters.tick()
    assert world.failed == ["the request's deadline has passed"]
    world.adapters.closed("t")
    world.adapters.release_all()
    assert [(each.request_id, each.deadline_s) for each in world.begun] == [("last", 54.0)]


def test_one_that_cannot_be_read_again_ends_its_legs(tmp_path: Path) -> None:
    """The worker says that it does not have the adapter: another instance may. Once the folder is back, they begin."""
    folders = many(tmp_path, 2)
    world = world_of(folders, 1)
    digest, asked = digest_of(folders[0]), leg(folders[0], "a")
    (folders[0] / "adapter_config.json").rename(tmp_path / "moved")
    assert not world.adapters.admits("s", asked)
    world.take()
    assert [each.request_id for each in world.begun] == ["a"]
    assert "could not be read again" in world.left[0]
    assert str(tmp_path) not in world.left[0]
    assert present(world, folders[1:]) == []
    assert "adapter_config.json: missing" in world.sent[-1].problems[digest]
    (tmp_path / "moved").rename(folders[0] / "adapter_config.json")
    world.used.clear()
    assert not world.adapters.admits("s", leg(folders[0], "b"))
    world.take()
    assert world.left[1:] == [""]
    assert world.sent[-1].problems == {}


# ---- several ranks


class FakeHeld(FakeKeeper):
    def next_slot(self, digest: str) -> int:
        return 7

    def load_adapter(self, folder: LoraFolder, slot: int | None = None) -> None:
        assert slot is not None
        super().load_adapter(folder)
        self.variants[folder.digest] = slot


@pytest.mark.parametrize("problem", ["", "it is not there"])
def test_all_ranks_have_it_before_requests_may(tmp_path: Path, problem: str) -> None:
    folder = LoraFolder.read(write_adapter(tmp_path / "one", 1), 16)
    held, told = FakeHeld(), list[to.RankMessage]()
    lead = LeadAdapters(held, 2, told.append, TIMEOUT_S)  # type: ignore[arg-type]
    outcome: list[Exception | None] = []

    def load() -> None:
        try:
            lead.load_adapter(folder)
            outcome.append(None)
        except ModelError as error:
            outcome.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    lead.hear(to.LoadedAdapter(1, "another", ""))
    while not told:
        thread.join(0.01)
    lead.hear(to.LoadedAdapter(1, folder.digest, ""))
    assert not held.variants
    lead.hear(to.LoadedAdapter(2, folder.digest, problem))
    thread.join(TIMEOUT_S)
    if problem:
        assert str(outcome[0]) == "rank 2: it is not there"
        assert told[-1] == to.DropAdapter(folder.digest)
        assert not held.variants
    else:
        assert outcome == [None]
        assert list(held.variants) == [folder.digest]


def test_a_rank_that_does_not_answer_fails_the_load(tmp_path: Path) -> None:
    folder = LoraFolder.read(write_adapter(tmp_path / "one", 1), 16)
    told = list[to.RankMessage]()
    lead = LeadAdapters(FakeHeld(), 1, told.append, 0.0)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="not all ranks have loaded it in 0 s"):
        lead.load_adapter(folder)
    assert told[-1] == to.DropAdapter(folder.digest)


# ---- counts


def test_requests_are_counted_by_their_adapters() -> None:
    counts = AdapterCounts()
    for variant in ("a", "a", "b", ""):
        counts.arrives(variant)
    counts.begins("a")
    assert (counts.use().running, counts.use().waiting) == (["a"], ["a", "b"])
    counts.ends("a", has_begun=True)
    counts.ends("a", has_begun=False)
    counts.ends("b", has_begun=False)
    counts.ends("", has_begun=False)
    assert (counts.use().running, counts.use().waiting) == ([], [])
