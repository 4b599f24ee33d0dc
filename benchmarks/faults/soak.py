"""`python -m benchmarks soak`: runs a cluster under steady load for a long time, with random faults.

It uses the cluster, the requests, the fault-free run and the scripts of `benchmarks faults`. The scheduler, prefill-0
and decode-0 are never killed, so that slow growth is visible in these processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.faults.fault_types import FaultContext
from benchmarks.faults.faults_bench import ALL_FAULTS, MOST_AT_ONCE, Scene, check, expected_of, started
from benchmarks.faults.resource_use import ResourceUse
from benchmarks.faults.soak_report import LEFT, Soak, Tally, Use, Watch
from benchmarks.figures import begin, finish, names_of
from benchmarks.mixed_load import Load
from benchmarks.process_use import mapped_kib, num_descriptors
from pd_cluster.bench.serve_bench import sigterm_ends_it
from pd_cluster.client.streaming_client import Sample, make_client, measure
from pd_cluster.errors import ConfigError, GenerationError
from pd_cluster.result_tables import Report

# Faults that do not end the scheduler, prefill-0 or decode-0.
SOAK_FAULTS = (
    *("kill-parent", "kill-loading", "kill-again", "kill-preloader", "stall-prefill", "stall-decode"),
    *("stall-scheduler", "pause-scheduler", "flap", "descriptors-worker"),
)
REST_S = (5.0, 15.0)  # range of the pause between two faults
SAMPLE_S = 10.0
PROGRESS_S = 60.0
NUM_REQUESTS = 300  # number of different requests
STALL_S = 8.0
MOST_TENANTS = 16
SMALL_CACHES = {"PD_CLUSTER_SERVE_NUM_BLOCKS": "2048", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}  # full within minutes
SETTLE_S = 2.0  # pause before the first sample, in which the fault-free run's connections close
QUICK_MINUTES, QUICK_NUM_REQUESTS, QUICK_FAULTS, QUICK_REST_S = 0.25, 40, ("kill-parent",), (0.5, 1.0)


@dataclass(frozen=True, slots=True)
class SoakBench:
    """The command's parameters. `leave`: the share of requests whose client leaves early."""

    minutes: float
    kv_transport: str
    faults: str
    load: float
    seed: int
    quick: bool
    leave: float
    tenants: int

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if not 0 <= self.leave < 1:
            raise ConfigError(f"--leave {self.leave:g}: a share of requests, at least 0 and below 1")
        check(self.load, self.kv_transport)
        if self.minutes <= 0:
            raise ConfigError(f"--minutes {self.minutes:g}: must be above 0")
        if not 1 <= self.tenants <= MOST_TENANTS:
            raise ConfigError(f"--tenants {self.tenants}: must be at least 1 and at most {MOST_TENANTS}")
        names_of("--faults", self.faults, SOAK_FAULTS)

    @property
    def names(self) -> tuple[str, ...]:
        """The faults."""
        return QUICK_FAULTS if self.quick and not self.faults else names_of("--faults", self.faults, SOAK_FAULTS)

    @property
    def command(self) -> str:
        only = f" --faults {self.faults}" if self.faults else ""
        size = "--quick" if self.quick else f"--minutes {self.minutes:g}"
        leave = f" --leave {self.leave:g}" if self.leave else ""
        leave += f" --tenants {self.tenants}" if self.tenants > 1 else ""
        rest = f"--kv-transport {self.kv_transport} --load {self.load:g}{leave} --seed {self.seed}"
        return f"python -m benchmarks soak{only} {size} {rest}"


async def run(bench: SoakBench, json_path: str = "") -> None:
    """Measures, prints, writes. Raises PdClusterError without a cluster, for a lost or wrong request, and for leaks."""
    begin(json_path)
    print(f"{bench.command}: faults are drawn from {', '.join(bench.names)}", flush=True)
    number = QUICK_NUM_REQUESTS if bench.quick else NUM_REQUESTS
    os.environ.update(SMALL_CACHES)  # for all processes that are started
    with sigterm_ends_it():
        async with started(bench.kv_transport) as stage, tenants_of(bench) as tenants:
            soak = await _Soaking(bench, Scene(stage, number, bench.load, bench.seed, STALL_S), tenants).play()
    finish(Report(bench.command, soak.results()), "soak", json_path)
    for line in (*soak.watch.by_minute(), *soak.tally.lines):
        print(line)
    if not soak.is_right:
        raise GenerationError("requests failed or differ, or something is left; see above")


@contextlib.asynccontextmanager
async def tenants_of(bench: SoakBench) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Opens a client for each tenant, each with its own address."""
    async with contextlib.AsyncExitStack() as clients:
        yield [
            await clients.enter_async_context(make_client(MOST_AT_ONCE, f"127.0.0.{2 + at}"))
            for at in range(bench.tenants)
        ]


class _Soaking:
    """One soak in progress. Load, faults and samples are separate tasks."""

    def __init__(self, bench: SoakBench, scene: Scene, tenants: Sequence[httpx.AsyncClient]) -> None:
        self._bench = bench
        self._scene = scene
        self._stage = scene.stage
        self._faults: Counter[str] = Counter()
        self._leaving = random.Random(f"{bench.seed} leaving")
        self._tenants = itertools.cycle(tenants)
        self._watch = Watch()
        self._last = "none yet"

    async def play(self) -> Soak:
        quiet, capacity = await self._scene.quiet()
        self._tally = Tally(expected_of(quiet))
        self._stage.take_replays()
        await asyncio.sleep(SETTLE_S)
        before = ResourceUse.now(self._stage.pids())
        self._started_s = time.monotonic()
        until_s = self._started_s + 60 * (QUICK_MINUTES if self._bench.quick else self._bench.minutes)
        rate = self._bench.load * capacity
        load = self._scene.load("soak", rate, self._send)
        drawing = asyncio.ensure_future(self._draw(until_s, self._scene.context()))
        watching = [asyncio.ensure_future(each) for each in (self._scene.count(), self._sample(), self._tell(load))]
        try:
            await load.run(lambda number: drawing.done() and time.monotonic() >= until_s)
            await drawing
        finally:
            for task in (drawing, *watching):
                task.cancel()
            await asyncio.gather(drawing, *watching, return_exceptions=True)
        took_s = time.monotonic() - self._started_s
        await self._stage.whole()
        num_held = await self._stage.held()
        await self._stage.count_replays()
        num_replayed, _ = self._stage.take_replays()
        self._take(load)
        left = ResourceUse.now(self._stage.pids()).since(before)
        return Soak(took_s, self._tally, self._watch, self._faults, num_replayed, num_held, left)

    async def _send(self, body: Mapping[str, Any]) -> Sample:
        """Sends a request. The client of some requests leaves within the first second."""
        url, client = f"{self._stage.url}/v1/completions", next(self._tenants)
        if self._leaving.random() >= self._bench.leave:
            return await measure(client, url, body)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._leaving.random()):
                await measure(client, url, body)
        return Sample(error=LEFT)

    async def _draw(self, until_s: float, context: FaultContext) -> None:
        """Runs one fault after another, each when the cluster is complete again."""
        rng = random.Random(self._bench.seed)
        rest_s = QUICK_REST_S if self._bench.quick else REST_S
        order: list[str] = []
        while True:
            await asyncio.sleep(rng.uniform(*rest_s))
            if time.monotonic() >= until_s:
                return
            order = order or rng.sample(self._bench.names, len(self._bench.names))  # each once before any repeats
            self._last = order.pop()
            await ALL_FAULTS[self._last].script(context)
            self._faults[self._last] += 1

    async def _sample(self) -> None:
        while True:
            self._watch.note(use_of(self._stage.pids()))
            await asyncio.sleep(SAMPLE_S)

    async def _tell(self, load: Load) -> None:
        """Processes answers as they arrive, so that a long run needs no more memory than a short one."""
        told_s = self._started_s
        while True:
            await asyncio.sleep(1.0)
            self._take(load)
            if time.monotonic() - told_s >= PROGRESS_S:
                told_s = time.monotonic()
                tally = self._tally
                num_failed = tally.num_answers - tally.num_refused - tally.num_complete
                print(
                    f"{(told_s - self._started_s) / 60:.0f} min: {tally.num_answers} requests, {num_failed} failed, "
                    f"{tally.num_complete - tally.num_exact} different, {self._faults.total()} faults, "
                    f"the last {self._last}",
                    flush=True,
                )

    def _take(self, load: Load) -> None:
        for answer in load.answers:
            self._tally.take(answer)
        load.answers.clear()


def use_of(names: dict[int, str]) -> dict[tuple[int, str], Use]:
    """Reads /proc for each of these processes. Leaves out processes that have ended."""
    found = {}
    for pid, name in names.items():
        with contextlib.suppress(OSError):
            found[pid, name] = Use(time.monotonic(), mapped_kib(pid, "Anonymous") / 1024, num_descriptors(pid))
    return found
