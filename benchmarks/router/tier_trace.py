"""`routing --trace FILE`: a recorded day of conversations against caches of several sizes, replayed.

No model runs: routing policy, news of caches, prefix cache, host cache and the tiers' rules are the product's own code,
on a clock of its own; only the stores below are dictionaries. A trace's block of 512 tokens is one block of one token
here, so the shares are those of the full sizes. Format of the trace: one JSON object a line with `timestamp` (ms),
`input_length` (tokens) and `hash_ids` (Mooncake's traces, FAST '25).
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from pd_cluster import wire
from pd_cluster.cluster.members.instance import Instance
from pd_cluster.cluster.members.prefixes import Prompt
from pd_cluster.cluster.routing.policy import RoutingRequest, prefix_aware
from pd_cluster.engine.handover.cache_news import CacheNews
from pd_cluster.errors import ConfigError
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.kv.host_tier import HostTier, LoadCost
from pd_cluster.kv.layout import keys_and_values
from pd_cluster.kv.lower_tier import LowerTier
from pd_cluster.kv.prefix import PrefixScope, chain_hashes
from pd_cluster.kv.tier_orders import Clear, Discard, Fetch, Look, LowerKind, TierDone, Write
from pd_cluster.numerics import Numerics
from pd_cluster.reports import InstanceInfo
from pd_cluster.tables import Report, Result, check_writable, progress
from pd_cluster.types import LinkState, Order, Role, Sampling

TRACE_BLOCK = 512  # tokens of a hash id
MODES = ("round robin", "device", "device + host", "device + host + disk", "device + host + shared")
SCOPE = PrefixScope("trace", Numerics())
LAYOUT = wire.LayoutInfo(
    num_layers=1, num_kv_heads=1, planes=keys_and_values(64), block_size=1, dtype="float32", tp_size=1, tp_rank=0
)


@dataclass(frozen=True, slots=True)
class TierTrace:
    """The command's parameters. Sizes are tokens: of each instance's device and host memory, and of a tier in all."""

    file: str
    instances: int = 4
    device_tokens: int = 1_000_000
    host_tokens: int = 1_000_000
    tier_tokens: int = 15_000_000
    tokens_per_s: float = 10_000.0

    @property
    def command(self) -> str:
        return (
            f"python -m benchmarks routing --trace {self.file} --prefill {self.instances} "
            f"--device-tokens {self.device_tokens} --host-tokens {self.host_tokens} --tier-tokens {self.tier_tokens}"
        )


def read_trace(file: str) -> list[tuple[float, list[int]]]:
    """Returns the arrival (s) and hash ids of each request. Raises ConfigError."""
    try:
        lines = [json.loads(line) for line in Path(file).read_text("utf-8").splitlines() if line]
        return [(line["timestamp"] / 1e3, line["hash_ids"][: line["input_length"] // TRACE_BLOCK]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--trace {file}: {error}") from None


class _Store:
    """A store as a dictionary: `capacity` blocks, least recently used ones go; 0: its owner discards."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._contents: OrderedDict[bytes, None] = OrderedDict()

    def put(self, content: bytes) -> None:
        self._contents[content] = None
        self._contents.move_to_end(content)
        while self._capacity and len(self._contents) > self._capacity:
            self._contents.popitem(last=False)

    def num_leading(self, contents: list[bytes]) -> int:
        found = next((at for at, each in enumerate(contents) if each not in self._contents), len(contents))
        for each in contents[:found]:
            self._contents.move_to_end(each)
        return found

    def discard(self, contents: list[bytes]) -> None:
        for each in contents:
            self._contents.pop(each, None)


class _Post:
    """Takes the news of an instance's cache to the scheduler's picture of it."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    def send(self, conn: str, body: wire.Body) -> None:
        assert isinstance(body, wire.CacheKeys)
        self._instance.known_blocks.hear(body)

    def connect(self, name: str, epoch: int, host: str, port: int, key: bytes) -> str:
        raise AssertionError

    def disconnect(self, conn: str) -> None:
        raise AssertionError

    def beat(self) -> None:
        raise AssertionError

    def beat_soon(self) -> None:
        raise AssertionError


@dataclass(slots=True)
class _Worker:
    """One instance's caches; every job of a tier is done at once."""

    instance: Instance
    pool: BlockPool
    stores: dict[LowerKind, _Store]
    lower: list[LowerTier]
    news: CacheNews = field(init=False)
    free_s: float = 0.0  # when it has computed what it has

    def __post_init__(self) -> None:
        self.news = CacheNews(_Post(self.instance), self.pool)
        self.news.opened("s")

    def serve(self, hashes: list[bytes]) -> int:
        """Computes a prompt of one-token blocks; returns how many were cached somewhere."""
        self._bring(hashes)
        cached = self.pool.find(hashes)
        tier = self.pool.tier
        in_host: list[bytes] = []
        if tier is not None:
            tier.begin(lambda kind, source, target: None)
            in_host = tier.find(hashes[len(cached) :])
            tier.pin(in_host)
        self.pool.share(cached)
        if tier is not None and tier.lower:
            for block, content in zip(cached, hashes, strict=False):
                if content not in tier and tier.is_lacking(content):
                    tier.store(block, content)
        blocks = cached + self.pool.take(len(hashes) - len(cached))
        for block, content in zip(blocks, hashes, strict=True):
            self.pool.remember(block, content)
        self.pool.release(blocks)
        self._settle()
        self.news.tick(self.pool.changes())
        return len(cached) + len(in_host)

    def _bring(self, hashes: list[bytes]) -> None:
        tier = self.pool.tier
        if tier is None:
            return
        tier.touch([each for each in hashes if each not in self.pool])
        lacking = [each for each in hashes if each not in self.pool and each not in tier]
        for lower in self.lower:
            if lower.is_asked and lacking:
                lower.look(lacking)
            elif lacking:
                lower.fetch(lacking[: next((at for at, e in enumerate(lacking) if e not in lower), len(lacking))])
        self._settle()
        for lower in self.lower:
            lower.tick()

    def _settle(self) -> None:
        """Carries out every order, and those that follow from it."""
        while orders := [(each, order) for each in self.lower for order in each.take_orders()]:
            for each, order in orders:
                self._do(each, order)

    def _do(self, lower: LowerTier, order: Write | Fetch | Look | Discard | Clear) -> None:
        store = self.stores[lower.kind]
        num = 0
        match order:
            case Write():
                store.put(order.content)
                num = 1
            case Fetch() | Look():
                num = store.num_leading(order.contents)
            case Discard():
                store.discard(order.contents)
                return
            case Clear():
                return
        found, _ = lower.done(TierDone(lower.kind, order.job, 0, num))
        if found:
            lower.fetch(found)


def _instance(name: str) -> Instance:
    role: Role = "decode" if name.startswith("decode") else "prefill"
    info = InstanceInfo(
        name=name,
        role=role,
        state="ready",
        server_ip="127.0.0.1",
        device_ids=["0"],
        epoch=1,
        pid=1,
        model_identity="trace",
        layout=LAYOUT,
    )
    return Instance(name=name, role=role, host="127.0.0.1", port=1, device_ids=["0"], state="ready", info=info)


def replay(bench: TierTrace, mode: str, requests: list[tuple[float, list[int]]]) -> tuple[float, float]:
    """Returns the share of prompt tokens that were cached, and the mean time (s) to a first token in the model of time:
    an instance computes `tokens_per_s`, one prompt after the other, and loading is free.
    """
    decode = _instance("decode-0")
    num_device, num_host = bench.device_tokens // TRACE_BLOCK, bench.host_tokens // TRACE_BLOCK
    num_tier = bench.tier_tokens // TRACE_BLOCK
    shared = _Store(max(1, num_tier))
    now_s = [0.0]
    workers: list[_Worker] = []
    for at in range(bench.instances):
        instance = _instance(f"prefill-{at}")
        instance.load = wire.Load(links={decode.key: LinkState("up", ("shm",))})
        host = HostTier(num_host, 0, LoadCost(1)) if "host" in mode else None
        lower: list[LowerTier] = []
        if host is not None and ("disk" in mode or "shared" in mode):
            kind: LowerKind = "disk" if "disk" in mode else "shared"
            capacity = max(1, num_tier // bench.instances) if kind == "disk" else 0
            lower = [LowerTier(kind, host, capacity, 1, 1, lambda: now_s[0])]
            lower[0].opened(0, [])
            host.lower = list(lower)
        stores: dict[LowerKind, _Store] = {"disk": _Store(0), "shared": shared}
        workers.append(_Worker(instance, BlockPool(num_device, tier=host), stores, lower))
    turn, running = itertools.cycle(workers), list[tuple[float, int, int]]()
    num_asked = num_cached = 0
    ttft_s = 0.0
    with progress(mode, len(requests)) as advance:
        for arrival_s, ids in requests:
            now_s[0] = arrival_s
            while running and running[0][0] <= arrival_s:
                _, at, tokens = heapq.heappop(running)
                workers[at].instance.outstanding_tokens -= tokens
            order = Order([*ids, -1], Sampling())
            if mode == MODES[0]:
                worker = next(turn)
            else:
                instances = [*(each.instance for each in workers), decode]
                chosen, _ = prefix_aware(instances, RoutingRequest(Prompt(order)))
                worker = next(each for each in workers if each.instance is chosen)
            hashes = chain_hashes(SCOPE.root(order), ids, 1)
            cached = worker.serve(hashes)
            num_asked, num_cached = num_asked + len(ids), num_cached + cached
            uncached = len(ids) - cached + 1
            worker.free_s = max(worker.free_s, arrival_s) + uncached * TRACE_BLOCK / bench.tokens_per_s
            ttft_s += worker.free_s - arrival_s
            worker.instance.outstanding_tokens += uncached
            heapq.heappush(running, (worker.free_s, workers.index(worker), uncached))
            advance()
    return num_cached / max(1, num_asked), ttft_s / max(1, len(requests))


def run(bench: TierTrace, json_path: str = "") -> None:
    """Replays the trace in each mode, prints, writes. Raises ConfigError."""
    check_writable(json_path)
    requests = read_trace(bench.file)
    results: list[Result] = []
    for mode in MODES:
        share, ttft_s = replay(bench, mode, requests)
        results.append(Result(name=f"{mode}: hit share", value=share, unit="of tokens", better="higher"))
        results.append(Result(name=f"{mode}: modelled ttft, mean", value=ttft_s, unit="s", better="lower"))
    report = Report(bench.command, results)
    report.show(f"{len(requests)} requests, {bench.instances} instances")
    if json_path:
        report.write(json_path)
