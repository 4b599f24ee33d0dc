"""Adapters at run time, by the tables of docs/protocol/membership.md: which ones workers must load, and which adapter
a name means.
"""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pd_cluster import wire
from pd_cluster.checkpoints.lora_folder import LoraFolder
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.members.adapter_registry import GRACE_S, RETRY_S, AdapterBook, AdapterRules
from pd_cluster.cluster.records.adapter_counts import AdapterCounts
from pd_cluster.engine.handover.engine_events import AdapterLoaded
from pd_cluster.engine.ranks import rank_messages as to
from pd_cluster.engine.ranks.rank_adapters import LeadAdapters
from pd_cluster.engine.stages.adapter_loader import AdapterSource, AdapterThread, reader_of
from pd_cluster.engine.stages.adapter_stage import WorkerAdapters
from pd_cluster.errors import ModelError, ModelNotFound, RequestError
from pd_cluster.settings.lora_settings import AdapterSettings
from pd_cluster.types import RequestSpec, Sampling
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
    """Two workers, whose reports on requested adapters the test sends."""

    def __init__(self, root: Path) -> None:
        super().__init__(1, 1)
        self.folders = {name: write_adapter(root / name, seed) for seed, name in enumerate(("one", "two"), 1)}
        self.digests = {name: digest_of(folder) for name, folder in self.folders.items()}
        self.used: set[str] = set()
        self.published: list[dict[str, str]] = []
        for instance in self.membership.instances:
            self.membership.on_opened(instance.conn)

        rules = AdapterRules(AdapterSettings(enable_lora=True, max_cpu_loras=2), str(root), ("model",), 30.0)
        self.book = AdapterBook(self.membership, self, {}, rules, lambda: self.now_s)

    def adapters_in_use(self) -> set[str]:
        return self.used

    async def publish_adapters(self, names: dict[str, str]) -> None:
        self.published.append(dict(names))

    def wanted(self) -> dict[str, set[str]]:
        """Returns the adapters in the last WantedAdapters to each worker."""
        return {
            conn.removeprefix("to-"): {each.digest for each in body.adapters}
            for conn, body in self.mailbox.of(wire.WantedAdapters)
        }

    def report(self, instance: Instance, problems: dict[str, str] | None = None) -> None:
        have = [digest for digest in self.wanted().get(instance.name, set()) if digest not in (problems or {})]
        self.membership.on_adapter_states(instance.conn, wire.AdapterStates(have, problems or {}))

    async def begin(self, name: str, folder: str, replaces: bool = False) -> asyncio.Task[None]:
        """Starts a load; returns once both workers have the request to load the adapter."""
        loading = asyncio.ensure_future(self.book.load(name, folder, replaces))
        async with asyncio.timeout(TIMEOUT_S):
            while not loading.done() and self.digests[folder] not in self.wanted().get("decode-0", set()):
                await asyncio.sleep(0)
        return loading

    async def load(self, name: str, folder: str, replaces: bool = False) -> None:
        """Loads an adapter that both workers report as loaded."""
        loading = await self.begin(name, folder, replaces)
        for instance in self.membership.instances:
            self.report(instance)
        await asyncio.wait_for(loading, TIMEOUT_S)

    def wanted_at(self, now_s: float) -> set[str]:
        """Returns the adapters that the decode instance must have at that time."""
        self.now_s = now_s
        self.book.tick()
        return self.wanted()["decode-0"]


async def test_a_name_is_published_when_the_last_worker_has_it(tmp_path: Path) -> None:
    book = BookWorld(tmp_path)
    loading = await book.begin("a", "one")
    book.report(book["prefill-0"])
    for _ in range(5):
        await asyncio.sleep(0)
    assert not loading.done()
    assert book.book.names == {}
    book.report(book["decode-0"])
    await asyncio.wait_for(loading, TIMEOUT_S)
    assert book.published == [{"a": book.digests["one"]}]


async def test_a_worker_s_reason_fails_the_load_and_takes_it_back(tmp_path: Path) -> None:
    book = BookWorld(tmp_path)
    loading = await book.begin("a", "one")
    book.report(book["prefill-0"])
    book.report(book["decode-0"], {book.digests["one"]: "no room"})
    with pytest.raises(RequestError, match="decode-0: no room"):
        await asyncio.wait_for(loading, TIMEOUT_S)
    assert book.wanted() == {"prefill-0": set(), "decode-0": set()}
    assert book.published == []


async def test_a_worker_that_is_lost_does_not_hold_up_the_others(tmp_path: Path) -> None:
    book = BookWorld(tmp_path)
    loading = await book.begin("a", "one")
    book.report(book["prefill-0"])
    decode = book["decode-0"]
    book.membership.on_closed(decode.conn, "it is dead")
    await asyncio.wait_for(loading, TIMEOUT_S)
    book.make_ready(decode)
    book.membership.on_opened(decode.conn)
    assert (decode.shown_state, decode.reason) == ("connecting", "it loads adapters")
    book.report(decode, {book.digests["one"]: "the disk is full"})
    assert "the disk is full" in decode.reason
    book.mailbox.sent.clear()
    assert book.wanted_at(RETRY_S + 1) == {book.digests["one"]}
    book.report(decode)
    assert decode.is_ready


async def test_an_unloaded_adapter_goes_when_nobody_has_it_or_at_its_deadline(tmp_path: Path) -> None:
    book = BookWorld(tmp_path)
    one = {book.digests["one"]}
    for ends in (True, False):
        book.now_s = 0.0
        await book.load("a", "one")
        book.used = one
        await book.book.unload("a")
        assert book.published[-1] == {}
        assert book.wanted_at(10.0) == one
        if ends:
            book.used = set()
            assert book.wanted_at(10.0) == one, "a request may be about to be routed"
            assert book.wanted_at(10.0 + GRACE_S) == set()
        else:
            assert (book.wanted_at(29.0), book.wanted_at(30.0)) == (one, set())
    with pytest.raises(ModelNotFound, match="there is no adapter 'a'; loaded are none"):
        await book.book.unload("a")


async def test_a_content_stays_while_a_name_stands_for_it(tmp_path: Path) -> None:
    """An adapter stays loaded while any name refers to it, also when one of two names moves to another adapter."""
    book = BookWorld(tmp_path)
    await book.load("a", "one")
    await book.book.unload("a")
    await book.load("b", "one")
    assert book.wanted_at(100.0) == {book.digests["one"]}
    await book.load("a", "one")
    await book.load("a", "two", replaces=True)
    assert book.wanted_at(200.0) == set(book.digests.values())
    await book.load("b", "two", replaces=True)
    book.book.tick()
    assert book.wanted_at(200.0 + GRACE_S) == {book.digests["two"]}


# ---- a worker


class FakeKeeper:
    """A fake loader: `hold` delays loading, `problem` makes it fail."""

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
        self.left: list[str] = []  # why each leg cannot begin here
        self.failed: list[str] = []
        self.now_s = 0.0
        source = None
        if keeper is not None:
            source = AdapterSource(keeper, AdapterThread(keeper, reader_of(AdapterSettings()), self._put), {}, most)
        self.adapters = WorkerAdapters(source, self._send, lambda: self.used, lambda: self.now_s)

    def pass_on(self) -> None:
        """Begins released legs, as a worker does after each event."""
        for leg in self.adapters.released():
            if leg.error:
                self.failed.append(leg.error)
                continue
            self.begun.append(leg.submit)
            self.left.append(leg.why)
            self.used.add(leg.submit.order.variant)

    def _send(self, conn: str, body: wire.Body) -> None:
        assert conn == "s"
        assert isinstance(body, wire.AdapterStates)
        self.sent.append(body)

    def _put(self, event: AdapterLoaded) -> None:
        self.events.append(event)
        self.has_event.release()

    def tick(self) -> None:
        self.adapters.tick()
        self.pass_on()

    def take(self) -> None:
        assert self.has_event.acquire(timeout=TIMEOUT_S)
        self.adapters.handle(self.events.pop(0))
        self.pass_on()

    def want(self, *folders: Path, digest: str = "") -> None:
        places = [wire.AdapterLocation(digest or digest_of(folder), str(folder)) for folder in folders]
        self.adapters.read("s", wire.WantedAdapters(places), is_scheduler=True)
        self.pass_on()


def test_a_worker_reports_what_it_has_and_drops_what_nobody_wants(tmp_path: Path) -> None:
    """A worker loads an adapter once, however often it is asked to, and keeps it if it is wanted again in time."""
    keeper, folder = FakeKeeper(), write_adapter(tmp_path / "one", 1)
    world, digest = WorkerWorld(keeper), digest_of(folder)
    keeper.hold.clear()
    world.want(folder)
    world.want(folder)
    assert world.sent[-1] == wire.AdapterStates([])
    keeper.hold.set()
    world.take()
    assert world.sent[-1] == wire.AdapterStates([digest])
    assert not world.has_event.acquire(blocking=False)
    world.want()
    assert keeper.variants
    world.want(folder)
    assert world.sent[-1] == wire.AdapterStates([digest])
    world.tick()
    assert keeper.variants
    world.used = {digest}
    world.want()
    world.tick()
    assert keeper.variants, "a request uses it"
    world.used = set()
    world.tick()
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
    assert "differs from the scheduler" in world.sent[-1].problems["0" * 64]
    world.want(tmp_path / "one", tmp_path / "one")
    assert not world.events


def test_a_worker_without_places_for_adapters_says_so(tmp_path: Path) -> None:
    world, folder = WorkerWorld(None), write_adapter(tmp_path / "one", 1)
    world.want(folder)
    assert "--enable-lora" in world.sent[-1].problems[digest_of(folder)]
    world.want()
    assert world.sent[-1] == wire.AdapterStates([])


class FullWorld(WorkerWorld):
    """All adapters have been loaded once, in order; the last `most` of them are in memory."""

    def __init__(self, tmp_path: Path, number: int, most: int) -> None:
        self.held = FakeKeeper()
        super().__init__(self.held, most)
        self.folders = [write_adapter(tmp_path / str(at), at) for at in range(number)]
        self.digests = [digest_of(folder) for folder in self.folders]
        self.want(*self.folders)
        for _ in self.folders:
            self.take()
        assert self.sent[-1] == wire.AdapterStates(self.digests)

    def admits(self, at: int, name: str, scheduler: str = "s", deadline_s: float = 0.0, client: str = "") -> bool:
        order = RequestSpec([1], Sampling(max_tokens=1), variant=self.digests[at])
        owner = wire.owner_of(client)
        submit = wire.Submit(name, 0, name, "hybrid", "", order, deadline_s, owner=owner)
        admitted = self.adapters.admits(scheduler, submit)
        self.pass_on()
        return admitted

    @property
    def present(self) -> list[int]:
        return [at for at, digest in enumerate(self.digests) if digest in self.held.variants]

    @property
    def begun_names(self) -> list[str]:
        return [submit.request_id for submit in self.begun]


def test_the_least_recently_asked_gives_way_and_a_leg_waits_for_its_adapter(tmp_path: Path) -> None:
    world = FullWorld(tmp_path, 4, most=2)
    assert world.present == [2, 3]
    assert world.admits(2, "a")
    assert not world.admits(0, "b")
    assert not world.admits(0, "c")
    world.take()
    assert world.present == [0, 2]
    assert world.adapters.counted(wire.Load(), {}).adapters == tuple(
        sorted(short_name(world.digests[at]) for at in (0, 2))
    )
    assert world.begun_names == ["b", "c"]
    assert world.admits(0, "d")


def test_owners_of_held_legs_take_turns(tmp_path: Path) -> None:
    """A client that requests many adapters delays another client's adapter only by the one being read already."""
    world = FullWorld(tmp_path, 6, most=1)
    world.held.hold.clear()
    for at in range(4):
        assert not world.admits(at, f"a{at}", client="a")
    assert not world.admits(4, "b", client="b")
    world.held.hold.set()
    for _ in range(5):
        world.take()
        world.used = set()  # each request ends at once
        world.tick()
    assert world.begun_names == ["a0", "b", "a1", "a2", "a3"]


def test_nobody_waits_for_ever_where_all_are_used(tmp_path: Path) -> None:
    """The adapter requested least recently accepts no new requests until its running ones have ended."""
    world = FullWorld(tmp_path, 4, most=2)
    world.used = {world.digests[2], world.digests[3]}
    assert world.admits(2, "a")
    assert world.admits(3, "a")
    assert not world.admits(0, "b")
    assert world.admits(3, "c")
    assert not world.admits(2, "d"), "it must wait behind earlier requests"
    world.tick()
    assert world.present == [2, 3]
    for used, present, begun in ((3, [0, 3], ["b"]), (0, [0, 2], ["b", "d"])):
        world.used = {world.digests[used]}
        world.tick()
        world.take()
        assert (world.present, world.begun_names) == (present, begun)


def test_a_closed_one_opens_again_if_nobody_needs_its_room(tmp_path: Path) -> None:
    world = FullWorld(tmp_path, 3, most=2)
    world.used = {world.digests[1], world.digests[2]}
    assert not world.admits(0, "a")
    assert not world.admits(1, "b")
    world.adapters.abort("s", wire.Abort("a", 0))
    world.tick()
    assert (world.begun_names, world.present) == (["b"], [1, 2])


def test_held_legs_end_with_their_deadline_their_scheduler_or_their_worker(tmp_path: Path) -> None:
    world = FullWorld(tmp_path, 2, most=1)
    world.used = {world.digests[1]}
    assert not world.admits(0, "late", deadline_s=5.0)
    assert not world.admits(0, "orphan", scheduler="t")
    assert not world.admits(0, "last", deadline_s=60.0)
    world.now_s = 6.0
    world.tick()
    assert len(world.failed) == 1
    world.adapters.closed("t", "gone", was_scheduler=True)
    world.adapters.release_all()
    world.pass_on()
    assert [(each.request_id, each.deadline_s) for each in world.begun] == [("last", 54.0)]


def test_one_that_cannot_be_read_again_ends_its_legs(tmp_path: Path) -> None:
    """The worker reports the adapter as missing, so that others can serve it. Once the folder is back, legs begin."""
    world = FullWorld(tmp_path, 2, most=1)
    settings = world.folders[0] / "adapter_config.json"
    settings.rename(tmp_path / "moved")
    assert not world.admits(0, "a")
    world.take()
    assert world.begun_names == ["a"]
    assert "could not be read again" in world.left[0]
    assert str(tmp_path) not in world.left[0]
    assert world.present == []
    assert world.sent[-1].problems.keys() == {world.digests[0]}
    (tmp_path / "moved").rename(settings)
    world.used.clear()
    assert not world.admits(0, "b")
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
    with pytest.raises(ModelError, match="a rank did not load it within 0 s"):
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
