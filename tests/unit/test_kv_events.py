"""KV events in vLLM's format, after random traffic and for one prompt, event by event."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest

from pd_cluster.engine.scheduling.block_holdings import Holdings
from pd_cluster.engine.scheduling.group_holdings import GroupHoldings, LayerGroup
from pd_cluster.engine.stages.kv_event_publisher import KVEvents
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.host_tier import HostTier, LoadCost
from pd_cluster.kv.kv_event_log import EventBatch, KVEventLog
from pd_cluster.kv.lower_tier import LowerTier
from pd_cluster.kv.prefix_index import PrefixScope, chain_hashes
from pd_cluster.numerics import Numerics
from pd_cluster.types import Request, RequestSpec, Sampling, Span
from tests.support.kv_event_readers import (
    BLOCK,
    DECODER,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Mirror,
    ToMirror,
)

ALPHABET = 3


def number_of(content: bytes) -> int:
    return int.from_bytes(content[-8:], "big")


# ---- contents of the cache


class Traffic:
    """Random use of a pool with a small host tier, as by the engine's scheduler."""

    def __init__(self, rng: random.Random, has_tier: bool) -> None:
        self.rng = rng
        self.tier = HostTier(9, 0, LoadCost(BLOCK)) if has_tier else None
        self.pool = BlockPool(24, tier=self.tier)
        tables = GroupHoldings(0, LayerGroup(self.pool), BLOCK, 6 * BLOCK)
        self.holdings = Holdings([tables], BLOCK, PrefixScope("m", Numerics()), 0)
        self.mirror = Mirror()
        self.events = KVEvents(self.pool, BLOCK, ToMirror(self.mirror))  # type: ignore[arg-type]
        self.held: list[Request] = []
        self.number = itertools.count()

    def begin(self) -> None:
        """Admits a prompt, whose beginning is often cached, computes a part of it, and caches that."""
        length = self.rng.randrange(1, 6 * BLOCK)
        prompt = [self.rng.randrange(ALPHABET) // 2 for _ in range(length)]
        order = RequestSpec(prompt, Sampling(), self.rng.choice(("", "", "salt")), self.rng.choice(("", "ab" * 32)))
        request = Request(f"r{next(self.number)}", order)
        needed = self.holdings.num_blocks_for(length)
        (cached,) = self.holdings.find(request, length - 1).tables
        in_tier = self.holdings.in_tier(request, length - 1, len(cached))
        if self.pool.num_available - self.pool.num_unheld(cached) < needed - len(cached):
            return
        if self.tier is not None:
            self.tier.begin(lambda kind, source, target: None)
        request.tables[0] = self.holdings.take_with(cached, in_tier, needed - len(cached))
        request.num_hashed_blocks = len(cached)
        request.num_computed_tokens = self.rng.randrange((len(cached) + len(in_tier)) * BLOCK, length + 1)
        self.holdings.remember(request)
        self.held.append(request)

    def go_on(self) -> None:
        request = self.rng.choice(self.held)
        request.num_computed_tokens = len(request.prompt_token_ids)
        self.holdings.remember(request)

    def end(self) -> None:
        request = self.held.pop(self.rng.randrange(len(self.held)))
        self.holdings.give_back(request)

    def step(self) -> None:
        draw = self.rng.random()
        if draw < 0.45:
            self.begin()
        elif draw < 0.6 and self.held:
            self.go_on()
        elif draw < 0.985 and self.held:
            self.end()
        elif draw >= 0.985:
            self.pool.forget()
        if self.rng.random() < 0.3:
            self.events.blocks_changed(self.pool.changes())

    def check(self) -> None:
        self.events.blocks_changed(self.pool.changes())
        on_device = {number_of(content) for content in self.pool._index._block_of}
        assert self.mirror.hashes("GPU") == on_device
        below = {number_of(content) for content in (self.tier.contents if self.tier is not None else ())}
        assert self.mirror.hashes("CPU") == below - on_device
        self.check_tokens()

    def check_tokens(self) -> None:
        """Asserts that a block's hash is that of its tokens and all before, as far as its chain is stored."""
        known = self.mirror.blocks.get("GPU", {})
        scope = PrefixScope("m", Numerics())
        roots = [
            scope.root(RequestSpec([], Sampling(), salt, name)) for salt in ("", "salt") for name in ("", "ab" * 32)
        ]
        for block in known:
            whole: list[int] = []
            at: int | bytes | None = block
            while at is not None and at in known:
                at, tokens = known[at]
                whole = [*tokens, *whole]
            if at is None:
                assert block in {number_of(chain_hashes(root, whole, BLOCK)[-1]) for root in roots}, (block, whole)


@pytest.mark.parametrize("has_tier", [False, True])
def test_events_add_up_to_the_cache(has_tier: bool) -> None:
    for seed in range(5):
        traffic = Traffic(random.Random(seed), has_tier)
        for _ in range(200):
            traffic.step()
        traffic.check()
        while traffic.held:
            traffic.end()
        traffic.check()
        traffic.pool.forget()
        traffic.check()
        assert not traffic.mirror.blocks


def test_a_prompts_blocks_are_one_event_with_what_makes_them_apart() -> None:
    log = KVEventLog(BLOCK)
    order = RequestSpec([0] * 12, Sampling(), "pepper", "ab" * 32, spans=(Span(5, 9, b"d" * 32),))
    contents = [bytes([at]) * 32 for at in range(4)]
    for at, content in enumerate(contents[:3]):
        log.stored(content, contents[at - 1] if at else None, [at] * BLOCK, order, at * BLOCK)
    log.stored(contents[3], None, [9] * BLOCK, RequestSpec([], Sampling()), 0)
    log.removed(contents[3])
    log.removed(contents[0])
    log.moved({contents[0]: "disk"})
    log.cleared()
    found = DECODER.decode(msgspec.msgpack.encode(EventBatch(1.5, log.take())))
    numbers = [number_of(content) for content in contents]
    name = "ab" * 32
    extra: list[tuple[Any, ...] | None] = [
        (name, "pepper"),
        (name, [(b"d" * 32).hex(), 1]),
        (name, [(b"d" * 32).hex(), -3]),
    ]
    assert found == Batch(
        1.5,
        [
            BlockStored(numbers[:3], None, [0] * 4 + [1] * 4 + [2] * 4, BLOCK, None, "GPU", name, extra),
            BlockStored([numbers[3]], None, [9] * 4, BLOCK, None, "GPU", None),
            BlockRemoved([numbers[3], numbers[0]], "GPU"),
            BlockStored([numbers[0]], None, [], 0, None, "STORAGE", None),
            AllBlocksCleared(),
        ],
        0,
    )
    assert not log.take()


def test_what_the_disk_keeps_while_an_instance_sleeps_is_stored_again() -> None:
    """After sleep, blocks kept on disk are published again, others not; `reset_prefix_cache` empties the disk tier."""
    host = HostTier(4, 100, LoadCost(BLOCK))
    disk = LowerTier("disk", host, 100, 1, BLOCK, lambda: 0.0)
    host.lower.append(disk)
    pool, mirror = BlockPool(8, tier=host), Mirror()
    events = KVEvents(pool, BLOCK, ToMirror(mirror))  # type: ignore[arg-type]
    contents = [bytes([at]) * 32 for at in range(3)]
    numbers = {number_of(content) for content in contents}
    disk.opened(0, contents)
    events.blocks_changed(pool.changes())
    for _ in range(2):
        assert mirror.hashes("STORAGE") == numbers
        pool.forget()
        events.blocks_changed(pool.changes())
        assert set(host.contents) == set(contents)
    assert mirror.hashes("STORAGE") == numbers
    disk.clear()
    pool.forget()
    events.blocks_changed(pool.changes())
    assert not mirror.hashes("STORAGE")
