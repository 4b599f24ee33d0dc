"""`pd-cluster bench faults`: what requests notice when instances of a cluster die, stand still or are restarted.

Starts two prefill and two decode instances, measures how many requests they serve, and sends seeded requests at 70 %
of that as a Poisson process: first quietly, then during each fault. What must come out is known from the quiet run,
token by token. Only processes that were started here get signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from pd_cluster.bench.client import make_client, measure
from pd_cluster.bench.faults_left import Left
from pd_cluster.bench.faults_load import LONGEST_OUTPUT, LONGEST_PROMPT, Ask, Load, make_asks, poisson
from pd_cluster.bench.faults_report import Run, Tokens, is_right, show
from pd_cluster.bench.faults_scripts import FAULTS, Fault, Means, Seen
from pd_cluster.bench.faults_stage import Stage
from pd_cluster.bench.report import Report, Result, check_writable
from pd_cluster.bench.serve import sigterm_ends_it
from pd_cluster.checkpoint import SHIPPED_MODEL, Checkpoint
from pd_cluster.cluster.launcher import Cluster, Launch
from pd_cluster.cluster.ports import free_port_pair
from pd_cluster.errors import ConfigError, GenerationError, PdClusterError

NUM_PREFILL = NUM_DECODE = 2
CONCURRENCY = 32  # when the capacity is measured
LEAD_S = 2.0  # of load, before the fault
COUNT_S = 3.0  # between two looks at the last requests
MOST_AT_ONCE = 4000
MOST_FOR_CAPACITY = 400
QUICK_FAULTS = ("kill-both", "kill-scheduler")
QUICK_NUM_REQUESTS, QUICK_STALL_S = 60, 6.0
NAME = "faults"


@dataclass(frozen=True, slots=True)
class FaultsBench:
    """The command's parameters. `num_requests`: of each run, at least."""

    model: str = ""
    faults: tuple[str, ...] = tuple(FAULTS)
    num_requests: int = 1000
    load: float = 0.7
    stall_s: float = 20.0
    seed: int = 0
    quick: bool = False

    @property
    def command(self) -> str:
        model = f" --model {self.model}" if self.model else ""
        default = QUICK_FAULTS if self.quick else tuple(FAULTS)
        only = f" --faults {','.join(self.faults)}" if self.faults != default else ""
        size = "--quick" if self.quick else f"--num-requests {self.num_requests}"
        return f"pd-cluster bench faults{model}{only} {size} --load {self.load:g} --seed {self.seed}"


def make_bench(model: str, faults: str, num_requests: int, load: float, seed: int, quick: bool) -> FaultsBench:
    """Raises ConfigError."""
    names = tuple(filter(None, faults.split(","))) or tuple(FAULTS)
    for name in names:
        if name not in FAULTS:
            raise ConfigError(f"--faults {name!r}: expected some of {','.join(FAULTS)}")
    if not 0 < load <= 1:
        raise ConfigError(f"--load {load:g}: must be above 0 and at most 1, a share of what the cluster can serve")
    if quick:
        return FaultsBench(
            model, names if faults else QUICK_FAULTS, QUICK_NUM_REQUESTS, load, QUICK_STALL_S, seed, True
        )
    return FaultsBench(model, names, num_requests, load, seed=seed)


async def run(bench: FaultsBench, json_path: str = "") -> None:
    """Measures, prints, writes. Raises PdClusterError: no cluster, and whatever a request lost or got wrong."""
    check_writable(json_path)
    model = bench.model or str(SHIPPED_MODEL)
    limit = Checkpoint.open(model).max_model_len(None)  # a wrong model is one line, at once
    if limit < (needed := LONGEST_PROMPT + LONGEST_OUTPUT):
        raise ConfigError(f"--model {model}: its context of {limit} tokens is too short; {needed} are needed")
    started_s = time.monotonic()
    with sigterm_ends_it():
        async with _cluster(bench) as (cluster, client):
            runs, capacity = await Scene(bench, cluster, client).play()
    load = f"{bench.load:.0%} of {capacity:.1f} requests/s"
    show(f"two prefill and two decode instances at {load}; {time.monotonic() - started_s:.0f} s in all", runs)
    if json_path:
        results = [Result(name="capacity", value=capacity, unit="requests/s", better="higher")]
        Report(bench.command, results + [result for run in runs for result in run.results()]).write(json_path)
    if not is_right(runs):
        raise GenerationError("requests failed or differ, or blocks are held; see above")


@contextlib.asynccontextmanager
async def _cluster(bench: FaultsBench) -> AsyncIterator[tuple[Cluster, httpx.AsyncClient]]:
    """A fresh one, gone afterwards."""
    launch = Launch(
        model=bench.model,
        num_prefill=NUM_PREFILL,
        num_decode=NUM_DECODE,
        port=free_port_pair(),
        served_model_names=[NAME],
        restart="on-failure",
    )
    lines: deque[str] = deque(maxlen=100)
    cluster = Cluster(launch, lines.append)
    print(f"starting {NUM_PREFILL} prefill, {NUM_DECODE} decode and the scheduler …", flush=True)
    try:
        await cluster.start()
        await cluster.wait_ready()
        async with make_client(MOST_AT_ONCE) as client:
            yield cluster, client
    except PdClusterError:
        print("\n".join(lines), file=sys.stderr, flush=True)
        raise
    finally:
        await cluster.stop()


class Scene:
    """The requests and the cluster that they meet."""

    def __init__(self, bench: FaultsBench, cluster: Cluster, client: httpx.AsyncClient) -> None:
        self._bench = bench
        self._client = client
        self._url = f"{cluster.launch.url}/v1/completions"
        self._stage = Stage(cluster, client)
        self._asks = make_asks(random.Random(bench.seed), bench.num_requests)

    async def play(self) -> tuple[list[Run], float]:
        """The quiet run and one for each fault; and the capacity, in requests per second."""
        await self._stage.whole()
        capacity = await self._capacity()
        rate = self._bench.load * capacity
        quiet = await self._run("quiet", "no fault", rate)
        if quiet.failed:
            raise GenerationError(f"without any fault a request failed: {quiet.failed[0].sample.error}")
        by_number = sorted(quiet.answers, key=lambda answer: answer.number)
        expected = [answer.sample.token_ids for answer in by_number]
        faults = [(key, FAULTS[key]) for key in self._bench.faults]
        return [quiet] + [await self._run(key, fault.title, rate, expected, fault) for key, fault in faults], capacity

    async def _capacity(self) -> float:
        """Of a cluster that is warm."""
        for salt, number in (("warm", CONCURRENCY), ("capacity", min(len(self._asks), MOST_FOR_CAPACITY))):
            load = self._load(salt, 1.0)
            capacity = await load.closed_loop(number, CONCURRENCY)
            if failed := [answer for answer in load.answers if not answer.is_complete]:
                raise GenerationError(f"without any fault a request failed: {failed[0].sample.error}")
        print(f"capacity: {capacity:.1f} requests/s, {CONCURRENCY} at a time", flush=True)
        return capacity

    async def _run(
        self, key: str, title: str, rate: float, expected: Sequence[Tokens] = (), fault: Fault | None = None
    ) -> Run:
        """All requests at least once, and as long as the fault's script takes."""
        started_s, before = time.monotonic(), Left.now()
        load = self._load(key, rate)
        script = asyncio.ensure_future(self._script(fault) if fault is not None else _nothing())
        counting = asyncio.ensure_future(self._count())
        try:
            await load.run(lambda number: number >= len(self._asks) and script.done())
            seen = await script
        finally:
            for task in (script, counting):
                task.cancel()
            await asyncio.gather(script, counting, return_exceptions=True)
        await self._stage.whole()
        num_held = await self._stage.held()
        await self._stage.count_replays()
        num_replayed, _ = self._stage.take_replays()
        run = Run(key, title, load.answers, expected, fault, seen, num_replayed, num_held, Left.now().since(before))
        print(
            f"{title}: {len(run.complete)} of {len(run.answers)} requests in {time.monotonic() - started_s:.0f} s",
            flush=True,
        )
        return run

    async def _script(self, fault: Fault) -> Seen:
        await asyncio.sleep(LEAD_S)
        probe = Ask((1, 2, 3), 1, None).body(NAME, "probe")
        return await fault.script(Means(self._stage, self._bench.stall_s, probe))

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(COUNT_S)
            await self._stage.count_replays()

    def _load(self, salt: str, rate: float) -> Load:
        """The same gaps and the same requests in every run; other prefix cache entries each time they come round."""

        def body_of(number: int) -> dict[str, Any]:
            turn, at = divmod(number, len(self._asks))
            return self._asks[at].body(NAME, f"{salt} {turn}")

        gaps_s = poisson(random.Random(self._bench.seed), rate)
        return Load(body_of, gaps_s, lambda body: measure(self._client, self._url, body))


async def _nothing() -> Seen:
    return Seen()
