"""`python -m benchmarks soak`: a cluster under steady load for a long time, with faults drawn at random.

It uses the cluster, the requests, the fault-free run and the scripts of `bench faults`. The scheduler, prefill-0 and
decode-0 are never killed, so that slow growth is visible in processes that live on.
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
from pathlib import Path
from typing import Any

import httpx

from benchmarks.faults.bench import (
    MOST_AT_ONCE,
    FaultsBench,
    Scene,
    check_load,
    check_model,
    check_transport,
    expected_of,
    started,
)
from benchmarks.faults.bench import named as faults_named
from benchmarks.faults.left import Left
from benchmarks.faults.list import ALL_FAULTS
from benchmarks.faults.soak_report import LEFT, Soak, Tally, Use, Watch
from benchmarks.faults.terms import Means
from benchmarks.load import Load
from pd_cluster.bench.serve import sigterm_ends_it
from pd_cluster.client.streaming import Sample, make_client, measure
from pd_cluster.errors import ConfigError, GenerationError
from pd_cluster.tables import Report, check_writable

# Faults that end neither the scheduler nor prefill-0 nor decode-0.
SOAK_FAULTS = (
    *("kill-parent", "kill-loading", "kill-again", "kill-preloader", "stall-prefill", "stall-decode"),
    *("stall-scheduler", "pause-scheduler", "flap", "descriptors-worker"),
)
REST_S = (5.0, 15.0)  # between two faults
SAMPLE_S = 10.0
PROGRESS_S = 60.0
NUM_REQUESTS = 300  # different ones
STALL_S = 8.0
MOST_TENANTS = 16
SMALL_CACHES = {"PD_CLUSTER_SERVE_NUM_BLOCKS": "2048", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}  # full within minutes
SETTLE_S = 2.0  # before the first sample: connections of the fault-free run close
QUICK_MINUTES, QUICK_NUM_REQUESTS, QUICK_FAULTS, QUICK_REST_S = 0.25, 40, ("kill-parent",), (0.5, 1.0)


@dataclass(frozen=True, slots=True)
class SoakBench:
    """The command's parameters."""

    model: str = ""
    minutes: float = 30.0
    kv_transport: str = "shm"
    faults: tuple[str, ...] = SOAK_FAULTS
    load: float = 0.4
    seed: int = 0
    quick: bool = False
    leave: float = 0.0  # share of requests whose client leaves early
    tenants: int = 1

    @property
    def command(self) -> str:
        model = f" --model {self.model}" if self.model else ""
        default = QUICK_FAULTS if self.quick else SOAK_FAULTS
        only = f" --faults {','.join(self.faults)}" if self.faults != default else ""
        size = "--quick" if self.quick else f"--minutes {self.minutes:g}"
        leave = f" --leave {self.leave:g}" if self.leave else ""
        leave += f" --tenants {self.tenants}" if self.tenants > 1 else ""
        rest = f"--kv-transport {self.kv_transport} --load {self.load:g}{leave} --seed {self.seed}"
        return f"python -m benchmarks soak{model}{only} {size} {rest}"


def make_bench(
    model: str,
    minutes: float,
    kv_transport: str,
    faults: str,
    load: float,
    seed: int,
    quick: bool,
    leave: float = 0.0,
    tenants: int = 1,
) -> SoakBench:
    """Builds the bench. Raises ConfigError."""
    if not 0 <= leave < 1:
        raise ConfigError(f"--leave {leave:g}: a share of requests, at least 0 and below 1")
    check_load(load)
    check_transport(kv_transport)
    if minutes <= 0:
        raise ConfigError(f"--minutes {minutes:g}: must be above 0")
    names = faults_named(faults, SOAK_FAULTS)
    if quick:
        minutes, names = QUICK_MINUTES, names if faults else QUICK_FAULTS
    if not 1 <= tenants <= MOST_TENANTS:
        raise ConfigError(f"--tenants {tenants}: must be at least 1 and at most {MOST_TENANTS}")
    return SoakBench(model, minutes, kv_transport, names, load, seed, quick, leave, tenants)


async def run(bench: SoakBench, json_path: str = "") -> None:
    """Measures, prints, writes. Raises PdClusterError: no cluster, a lost or wrong request, something left over."""
    check_writable(json_path)
    check_model(bench.model)
    print(f"{bench.command}: faults are drawn from {', '.join(bench.faults)}", flush=True)
    number = QUICK_NUM_REQUESTS if bench.quick else NUM_REQUESTS
    parameters = FaultsBench(bench.model, (), number, bench.load, STALL_S, bench.seed, kv_transport=bench.kv_transport)
    os.environ.update(SMALL_CACHES)  # of all processes that are started
    with sigterm_ends_it():
        async with started(bench.model, bench.kv_transport) as stage, tenants_of(bench) as tenants:
            soak = await _Soaking(bench, Scene(parameters, stage), tenants).play()
    report = Report(bench.command, soak.results())
    report.show("soak")
    for line in (*soak.watch.by_minute(), *soak.tally.lines):
        print(line)
    if json_path:
        report.write(json_path)
    if not soak.is_right:
        raise GenerationError("requests failed or differ, or something is left; see above")


@contextlib.asynccontextmanager
async def tenants_of(bench: SoakBench) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Opens a client for each tenant, with an address of its own."""
    async with contextlib.AsyncExitStack() as clients:
        yield [
            await clients.enter_async_context(make_client(MOST_AT_ONCE, f"127.0.0.{2 + at}"))
            for at in range(bench.tenants)
        ]


class _Soaking:
    """One soak in progress: load, faults and samples, each a task of its own."""

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
        before = Left.now(self._stage.pids())
        self._started_s = time.monotonic()
        until_s = self._started_s + 60 * self._bench.minutes
        rate = self._bench.load * capacity
        load = self._scene.load("soak", rate, self._send)
        drawing = asyncio.ensure_future(self._draw(until_s, self._scene.means("soak", rate)))
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
        left = Left.now(self._stage.pids()).since(before)
        return Soak(took_s, self._tally, self._watch, self._faults, num_replayed, num_held, left)

    async def _send(self, body: Mapping[str, Any]) -> Sample:
        """Sends a request; some are left at a moment of their first second."""
        url, client = f"{self._stage.url}/v1/completions", next(self._tenants)
        if self._leaving.random() >= self._bench.leave:
            return await measure(client, url, body)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._leaving.random()):
                await measure(client, url, body)
        return Sample(error=LEFT)

    async def _draw(self, until_s: float, means: Means) -> None:
        """Runs one fault after another, each once the cluster is whole again."""
        rng = random.Random(self._bench.seed)
        rest_s = QUICK_REST_S if self._bench.quick else REST_S
        order: list[str] = []
        while True:
            await asyncio.sleep(rng.uniform(*rest_s))
            if time.monotonic() >= until_s:
                return
            order = order or rng.sample(self._bench.faults, len(self._bench.faults))  # each once before any repeats
            self._last = order.pop()
            await ALL_FAULTS[self._last].script(means)
            self._faults[self._last] += 1

    async def _sample(self) -> None:
        while True:
            self._watch.note(use_of(self._stage.pids()))
            await asyncio.sleep(SAMPLE_S)

    async def _tell(self, load: Load) -> None:
        """Takes answers as they arrive, so that a long run needs no more memory than a short one."""
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
    """Reads /proc for each of these processes; those that have ended are left out."""
    found = {}
    for pid, name in names.items():
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            own_kib = sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
            num_descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
            found[pid, name] = Use(time.monotonic(), own_kib / 1024, num_descriptors)
    return found
