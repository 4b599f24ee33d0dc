"""The tables of tiers below host memory, with ranks that answer in any order, fail and forget; no real stores."""

from __future__ import annotations

import queue
import random
import threading
from collections import Counter

import pytest

from pd_cluster import wire
from pd_cluster.devices.device_streams import REACHED, Marker
from pd_cluster.engine.legs.legs import request_of
from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.stages.tier_stage import EngineTiers
from pd_cluster.errors import ConfigError
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.host_tier import HostTier, LoadCost
from pd_cluster.kv.lower_tier import LowerTier
from pd_cluster.kv.open_stores import check_tiers, read_secrets
from pd_cluster.kv.prefix_index import PrefixScope
from pd_cluster.kv.tier_commands import UNKNOWN, AnyTierCommand, Clear, Discard, Fetch, Look, LowerKind, TierDone, Write
from pd_cluster.kv.tier_thread import TierBusy, TierThread
from pd_cluster.numerics import Numerics
from pd_cluster.settings.process_settings import HandoverSettings
from pd_cluster.types import RequestSpec, Sampling


class Ranks:
    """Ranks with a queue of orders each. `slots`: the content of every slot after moves and reads."""

    def __init__(self, seed: int, kind: LowerKind, num_ranks: int, num_slots: int, capacity: int) -> None:
        self.rng, self.now_s = random.Random(seed), 0.0
        self.host = HostTier(num_slots, 0, LoadCost(1))
        self.tier = LowerTier(kind, self.host, capacity, num_ranks, 1, lambda: self.now_s)
        self.host.lower = [self.tier]
        self.queues: list[list[AnyTierCommand]] = [[] for _ in range(num_ranks)]
        self.files: list[set[bytes]] = [set() for _ in range(num_ranks)]
        self.slots: list[dict[int, bytes]] = [{} for _ in range(num_ranks)]
        self.seen: Counter[str] = Counter()
        for rank in range(num_ranks):
            self.tier.opened(rank, [])

    def store(self, content: bytes) -> None:
        """Stores an evicted block in host memory, as a step does."""
        moves: list[tuple[str, int, int]] = []
        self.host.begin(lambda *move: moves.append(move))
        self.host.store(0, content)
        for _, _, slot in moves:
            for slots in self.slots:
                slots[slot] = content
        self.flush()

    def flush(self) -> None:
        for order in self.tier.take_commands():
            for each in self.queues:
                each.append(order)

    def work(self, rank: int) -> None:
        """Lets a rank execute the first order of its queue."""
        order = self.queues[rank].pop(0)
        files, slots, num = self.files[rank], self.slots[rank], 0
        fails = self.rng.random() < 0.1
        match order:
            case Write(content=content, slot=slot):
                assert slots[slot] == content, "a slot was given away while it was read"
                if not fails:
                    files.add(content)
                    num = 1
            case Fetch(contents=contents, slots=into):
                for content, slot in zip(contents, into, strict=True):
                    if content not in files or fails:
                        break
                    slots[slot] = content
                    num += 1
            case Look(contents=contents):
                num = next((at for at, each in enumerate(contents) if each not in files), len(contents))
            case Discard(contents=contents):
                files.difference_update(contents)
                return
            case Clear():
                files.clear()
                return
        if fails and self.rng.random() < 0.5 and not isinstance(order, Write):
            num = UNKNOWN
        self.seen[f"{type(order).__name__} {'fails' if fails else 'works'}"] += 1
        found, _ = self.tier.done(TierDone(self.tier.kind, order.job, rank, num))
        if found:
            self.tier.fetch(found)
        self.flush()

    def check(self) -> None:
        self.host.check()
        for content in self.host.contents:
            if content in self.host:
                for rank, slots in enumerate(self.slots):
                    assert slots[self.host.slot_of(content)] == content, f"rank {rank} has another block there"


@pytest.mark.parametrize("kind", ["disk", "shared"])
def test_ranks_in_any_order_never_show_a_wrong_block(kind: LowerKind) -> None:
    seen: Counter[str] = Counter()
    for seed in range(30):
        rng = random.Random(seed)
        world = Ranks(seed, kind, rng.choice([1, 2, 3]), rng.choice([2, 5, 12]), rng.choice([3, 8]) * (kind == "disk"))
        contents = [bytes([each]) * 32 for each in range(20)]
        for _ in range(200):
            world.now_s += rng.random()
            act = rng.random()
            if act < 0.25:
                world.store(rng.choice(contents))
            elif act < 0.4:
                start = rng.randrange(20)
                some = contents[start : start + rng.randint(1, 20)]
                if kind == "disk":
                    here = [each for each in some if each in world.tier and each not in world.host]
                    world.tier.fetch(here)
                else:
                    world.tier.look([each for each in some if each not in world.host])
                world.flush()
            elif act < 0.42:
                world.host.forget()
                if rng.random() < 0.5:
                    world.tier.clear()
                world.flush()
            elif act < 0.5:
                world.host.begin(None)
                world.host.pin(world.host.find(contents[rng.randrange(20) :]))
                world.tier.tick()
            elif busy := [rank for rank, queue in enumerate(world.queues) if queue]:
                world.work(rng.choice(busy))
            world.check()
        while busy := [rank for rank, queue in enumerate(world.queues) if queue]:
            world.work(rng.choice(busy))
        assert world.tier.num_jobs == 0, "a job never ends"
        world.check()
        world.now_s += 100.0
        world.tier.tick()
        assert not world.host.kept
        assert not world.host.filling
        if kind == "disk":
            assert len(world.tier) <= 8
        seen += world.seen
    assert min(seen[f"{kind_of} {how}"] for kind_of in ("Write", "Fetch") for how in ("works", "fails")) > 5, seen


def test_a_content_counts_where_every_rank_has_it() -> None:
    """At the start, only contents that all ranks' folders have count; the others are discarded everywhere."""
    host = HostTier(4, 0, LoadCost(1))
    tier = LowerTier("disk", host, 10, 3, 1, lambda: 0.0)
    a, b, c, d = (bytes([each]) * 32 for each in range(4))
    tier.opened(1, [d, a, b, c])
    tier.opened(0, [a, c, b])
    assert not tier.is_open
    tier.opened(2, [b, a])
    assert tier.is_open
    assert list(tier.places) == [a, b]
    gone = [each for order in tier.take_commands() if isinstance(order, Discard) for each in order.contents]
    assert sorted(gone) == [c, d]


def test_writing_is_bounded_and_drops_the_oldest() -> None:
    world = Ranks(1, "disk", 1, 4, 100)
    for each in range(30):
        world.store(bytes([each]) * 32)
    assert sum(isinstance(order, Write) for order in world.queues[0]) == 2, "expected at most half of the slots"
    assert world.tier.counts.num_dropped > 0


def test_settings_that_cannot_work_are_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for settings, host_gib, told in (
        (HandoverSettings(kv_disk_cache="/tmp/x"), 0.0, "--kv-disk-cache: blocks pass through host memory"),
        (HandoverSettings(kv_shared_cache="s3://bucket"), 1.0, "--kv-shared-cache: expected redis://"),
        (HandoverSettings(kv_disk_cache_size_gib=3.0), 1.0, "--kv-disk-cache-size: it has no effect without"),
        (HandoverSettings(kv_cache_key_file="/tmp/x"), 1.0, "--kv-cache-key-file: it has no effect without"),
    ):
        with pytest.raises(ConfigError, match=told):
            check_tiers(settings, host_gib)
    file = tmp_path / "key"
    file.write_text("short\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="expected secrets of 32 characters or more"):
        read_secrets(str(file))
    file.write_text(f"{'n' * 32}\n{'o' * 40}\n")
    assert read_secrets(str(file)) == [b"n" * 32, b"o" * 40]
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="other users may read it"):
        read_secrets(str(file))


def full_host(num_slots: int, contents: list[bytes]) -> HostTier:
    """Returns host memory with these contents; the first is least recently used."""
    host = HostTier(num_slots, 0, LoadCost(1))
    host.begin(lambda kind, source, target: None)
    for content in contents:
        host.store(0, content)
    host.begin(None)
    return host


@pytest.mark.parametrize("kind", ["disk", "shared"])
def test_the_end_of_a_prompt_does_not_displace_its_beginning(kind: LowerKind) -> None:
    scheduler = StepScheduler([LayerGroup(BlockPool(16))], StepSizes(4, 4, 16), PrefixScope("model", Numerics()))
    submit = wire.Submit("r", 0, "", "hybrid", "", RequestSpec(list(range(25)), Sampling()), 0.0)
    others = [bytes([each]) * 32 for each in range(4)]
    hashes = scheduler.prompt_hashes(request_of(submit, "c", 0.0))
    assert len(hashes) == 6
    host = scheduler.blocks.tier = full_host(8, [*hashes[:4], *others])
    lower = LowerTier(kind, host, 100 if kind == "disk" else 0, 1, 4, lambda: 0.0)
    lower.opened(0, hashes[4:])
    host.lower = [lower]
    tiers = EngineTiers(scheduler, {kind: lower}, None, lambda: 0.0)
    assert not tiers.admits("c", submit)
    if kind == "shared":
        host.touch(others)
        tiers.handle(TierDone(kind, 0, 0, 2))
    assert lower.num_jobs == 1
    assert [each in host for each in hashes] == [True] * 4 + [False] * 2
    assert [each in host for each in others].count(True) == 2


def test_the_cost_of_a_load_is_without_its_wait_for_others() -> None:
    now_s = [10.0]
    tier = LowerTier("disk", HostTier(100, 0, LoadCost(1)), 100, 1, 1, lambda: now_s[0])
    contents = [bytes([each]) * 32 for each in range(32)]
    tier.opened(0, contents)
    assert len(tier.fetch(contents)) == 2
    for job in range(2):
        now_s[0] += 1.6
        tier.done(TierDone("disk", job, 0, 16))
    assert tier.cost.loading_token_s == pytest.approx(0.1)


def test_only_what_a_rank_has_tried_and_lost_is_forgotten() -> None:
    """A fetch that was not tried, and a fetch or write from before a reset, must not forget the current content."""
    content = b"c" * 32
    for report, is_old, is_kept in [(UNKNOWN, False, True), (0, True, True), (0, False, False)]:
        tier = LowerTier("disk", HostTier(4, 0, LoadCost(1)), 100, 1, 1, lambda: 0.0)
        tier.opened(0, [content])
        tier.fetch([content])
        if is_old:
            tier.host_forgot()
        tier.done(TierDone("disk", 0, 0, report))
        assert (content in tier) == is_kept
        assert any(isinstance(order, Discard) for order in tier.take_commands()) != is_kept
    world = Ranks(1, "disk", 1, 4, 100)
    world.store(content)
    world.host.forget()
    world.store(content)
    world.tier.done(TierDone("disk", 0, 0, 1))
    world.tier.done(TierDone("disk", 1, 0, 1))
    assert content in world.tier
    assert not world.tier.take_commands(), "the newer content must stay"


def test_a_slot_that_is_read_is_not_in_the_way_of_those_that_can_be_taken() -> None:
    contents = [bytes([each]) * 32 for each in range(4)]
    host = full_host(4, contents)
    for content in contents[:2]:
        host.begin_read(content)
    host.reserve(1)
    assert [each in host for each in contents] == [True, True, False, True]


class SlowStore:
    """A store that answers once the test allows it."""

    num_bad = 0

    def __init__(self) -> None:
        self.began, self.may, self.discarded = threading.Event(), threading.Event(), threading.Event()

    def put(self, content: bytes, block: memoryview) -> bool:
        self.began.set()
        return self.may.wait(60.0)

    def num_leading(self, contents: list[bytes], into: object = None) -> int:
        return len(contents)

    get_leading = num_leading

    def discard(self, contents: list[bytes]) -> None:
        self.discarded.set()

    def clear(self) -> None: ...


class Broken(Marker):
    def wait(self, timeout_s: float | None = None) -> bool:
        raise RuntimeError("the device is gone")


def test_settling_ends_and_what_is_to_be_discarded_stays_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    store, reports = SlowStore(), queue.SimpleQueue[TierDone]()
    thread = TierThread("disk", 0, store, lambda slot: memoryview(b""), reports.put)
    thread.submit([Write(0, b"a", 0), Discard([b"b"]), Write(1, b"c", 1)], REACHED)
    assert store.began.wait(60.0)
    monkeypatch.setattr("pd_cluster.kv.tier_thread.SETTLE_S", 0.01)
    with pytest.raises(TierBusy, match="the disk tier of KV blocks has not answered"):
        thread.settle()
    assert not store.discarded.is_set()
    assert (report := reports.get(timeout=60.0)).job == 1
    assert report.num == UNKNOWN
    monkeypatch.undo()
    store.may.set()
    thread.settle()
    assert store.discarded.wait(60.0)
    assert reports.get(timeout=60.0) == TierDone("disk", 0, 0, 1)
    thread.close(60.0)


def test_the_thread_outlives_a_device_and_a_listener_that_fail() -> None:
    heard: queue.SimpleQueue[TierDone] = queue.SimpleQueue()

    def hear(report: TierDone) -> None:
        heard.put(report)
        if report.job == 1:
            raise OSError("nobody listens")

    thread = TierThread("disk", 0, SlowStore(), lambda slot: memoryview(b""), hear)
    thread.submit([Fetch(0, [b"a"], [0])], Broken(None))
    thread.submit([Look(1, [b"a"]), Look(2, [b"a"])], REACHED)
    nums = [UNKNOWN, 1, 1]
    assert [heard.get(timeout=60.0) for _ in nums] == [TierDone("disk", at, 0, num) for at, num in enumerate(nums)]
    thread.settle()
    thread.close(60.0)


def test_an_address_that_is_none_is_refused_without_repeating_it() -> None:
    shared_store, seal = (
        pytest.importorskip("pd_cluster.kv.shared_store"),
        pytest.importorskip("pd_cluster.kv.block_seal"),
    )
    with pytest.raises(ConfigError, match="escape special characters in the password") as error:
        shared_store.SharedStore("redis://user:se/cret@host:6379/0", seal.Seal([b"s" * 32], b"", 8))
    assert "cret" not in str(error.value)
