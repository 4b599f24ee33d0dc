"""`python -m benchmarks faults`: measures the effect on requests when instances of a cluster die, hang or restart.

Starts two prefill and two decode instances, measures how many requests they serve, and sends seeded requests at 70 % of
that rate as a Poisson process, first without a fault, then during each fault. The first run gives the expected output,
token by token. Only processes that were started here receive signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.faults.connection_faults import CONNECTION_FAULTS
from benchmarks.faults.fault_scripts import FAULTS
from benchmarks.faults.fault_types import Fault, FaultContext, FaultObservations
from benchmarks.faults.faulted_cluster import FaultedCluster
from benchmarks.faults.faults_report import Run, Tokens, is_right, show
from benchmarks.faults.resource_use import MOST_DESCRIPTORS, ResourceUse
from benchmarks.figures import begin, names_of
from benchmarks.mixed_load import Load, LoadRequest, Send, make_asks, poisson
from pd_cluster.bench.serve_bench import running, sigterm_ends_it
from pd_cluster.client.streaming_client import make_client
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.port_reservations import free_port_pair
from pd_cluster.errors import ConfigError, GenerationError
from pd_cluster.result_tables import Report, Result
from pd_cluster.transport.transport_table import choices_for

NUM_PREFILL = NUM_DECODE = 2
CONCURRENCY = 32  # requests at a time while the capacity is measured
LEAD_S = 2.0  # duration of the load before the fault
CLOSE_S = 10.0  # longer than the time for which idle connections are kept
COUNT_S = 3.0  # time between two reads of the last requests
MOST_AT_ONCE = 4000
MOST_FOR_CAPACITY = 400
QUICK_FAULTS = ("kill-both", "kill-scheduler")
STALL_S = 20.0
QUICK_NUM_REQUESTS, QUICK_STALL_S, QUICK_SCALE = 60, 6.0, 0.02
ALL_FAULTS: dict[str, Fault] = {**FAULTS, **CONNECTION_FAULTS}
NAME = "faults"
TRANSPORTS = choices_for("cpu")  # transports between processes of one host, with pools in host memory


@dataclass(frozen=True, slots=True)
class FaultsBench:
    """The command's parameters. `faults`: names with commas; `num_requests`: the minimum number for each run."""

    faults: str
    num_requests: int
    load: float
    seed: int
    quick: bool
    kv_transport: str

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        names_of("--faults", self.faults, ALL_FAULTS)
        check(self.load, self.kv_transport)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the faults to apply, in order."""
        return QUICK_FAULTS if self.quick and not self.faults else names_of("--faults", self.faults, ALL_FAULTS)

    @property
    def command(self) -> str:
        only = f" --faults {self.faults}" if self.faults else ""
        size = "--quick" if self.quick else f"--num-requests {self.num_requests}"
        over = f" --kv-transport {self.kv_transport}" if self.kv_transport else ""
        return f"python -m benchmarks faults{only}{over} {size} --load {self.load:g} --seed {self.seed}"


def check(load: float, kv_transport: str) -> None:
    """Raises ConfigError, also for a transport that pools on CPU cannot use."""
    if not 0 < load <= 1:
        raise ConfigError(f"--load {load:g}: must be above 0 and at most 1, a share of what the cluster can serve")
    if kv_transport not in ("", *TRANSPORTS):
        raise ConfigError(f"--kv-transport {kv_transport!r}: expected {' or '.join(TRANSPORTS)}")


async def run(bench: FaultsBench, json_path: str = "") -> None:
    """Measures, prints and writes. Raises PdClusterError without a cluster, and if any request is lost or wrong."""
    begin(json_path)
    started_s = time.monotonic()
    with sigterm_ends_it():
        async with started(bench.kv_transport) as stage:
            if bench.quick:
                scene = Scene(stage, QUICK_NUM_REQUESTS, bench.load, bench.seed, QUICK_STALL_S, QUICK_SCALE)
            else:
                scene = Scene(stage, bench.num_requests, bench.load, bench.seed, STALL_S)
            quiet, capacity = await scene.quiet()
            runs = [quiet, *[await scene.play(key, capacity, expected_of(quiet)) for key in bench.names]]
    load = f"{bench.load:.0%} of {capacity:.1f} requests/s"
    show(f"two prefill and two decode instances at {load}; {time.monotonic() - started_s:.0f} s in all", runs)
    if json_path:
        results = [Result(name="capacity", value=capacity, unit="requests/s", better="higher")]
        Report(bench.command, results + [result for run in runs for result in run.results()]).write(json_path)
    if not is_right(runs):
        raise GenerationError("requests failed or differ, or blocks are held; see above")


@contextlib.asynccontextmanager
async def started(kv_transport: str) -> AsyncIterator[FaultedCluster]:
    """Starts a new cluster of the shipped model, and stops it afterwards."""
    launch = Launch(
        model="",
        num_prefill=NUM_PREFILL,
        num_decode=NUM_DECODE,
        port=free_port_pair(),
        served_model_names=[NAME],
        restart="on-failure",
        arguments=[f"--kv-transport={kv_transport}"] if kv_transport else [],
    )
    async with make_client(MOST_AT_ONCE) as client, running(launch) as cluster:
        yield FaultedCluster(cluster, client)


class Scene:
    """The requests, and the cluster that serves them. `scale`: the factor by which faults' counts are reduced."""

    def __init__(
        self, stage: FaultedCluster, num_requests: int, load: float, seed: int, stall_s: float, scale: float = 1.0
    ) -> None:
        self.stage = stage
        self._load, self._seed, self._stall_s, self._scale = load, seed, stall_s, scale
        self._asks = make_asks(random.Random(seed), num_requests)

    async def play(self, key: str, capacity: float, expected: Sequence[Tokens]) -> Run:
        """Runs one fault."""
        fault = ALL_FAULTS[key]
        await self.stage.whole()
        return await self._run(key, fault.title, self._load * capacity, expected, fault)

    async def quiet(self) -> tuple[Run, float]:
        """Makes the run without a fault. Returns it, and the capacity in requests per second."""
        await self.stage.whole()
        capacity = await self._capacity()
        quiet = await self._run("quiet", "no fault", self._load * capacity)
        if quiet.failed:
            raise GenerationError(f"without any fault a request failed: {quiet.failed[0].sample.error}")
        return quiet, capacity

    async def _capacity(self) -> float:
        """Measures a warm cluster's capacity."""
        for salt, number in (("warm", CONCURRENCY), ("capacity", min(len(self._asks), MOST_FOR_CAPACITY))):
            load = self.load(salt, 1.0)
            capacity = await load.closed_loop(number, CONCURRENCY)
            if failed := [answer for answer in load.answers if not answer.is_complete]:
                raise GenerationError(f"without any fault a request failed: {failed[0].sample.error}")
        print(f"capacity: {capacity:.1f} requests/s, {CONCURRENCY} at a time", flush=True)
        return capacity

    async def _run(
        self, key: str, title: str, rate: float, expected: Sequence[Tokens] = (), fault: Fault | None = None
    ) -> Run:
        """Sends all requests at least once, and continues while the fault's script runs."""
        started_s, before = time.monotonic(), ResourceUse.now(self.stage.pids())
        load = self.load(key, rate)
        script = asyncio.ensure_future(self._script(fault) if fault is not None else _nothing())
        counting = asyncio.ensure_future(self.count())
        try:
            await load.run(lambda number: number >= len(self._asks) and script.done())
            seen = await script
        finally:
            for task in (script, counting):
                task.cancel()
            await asyncio.gather(script, counting, return_exceptions=True)
        await self.stage.whole()
        num_held = await self.stage.held()
        await self.stage.count_replays()
        num_replayed, _ = self.stage.take_replays()
        left = await self._left(before)
        run = Run(key, title, load.answers, expected, fault, seen, num_replayed, num_held, left)
        print(
            f"{title}: {len(run.complete)} of {len(run.answers)} requests in {time.monotonic() - started_s:.0f} s",
            flush=True,
        )
        return run

    async def _left(self, before: ResourceUse) -> ResourceUse:
        """Returns the resources that are in use beyond `before`, after clients' connections have had time to close."""
        deadline_s = time.monotonic() + CLOSE_S
        while True:
            left = ResourceUse.now(self.stage.pids()).since(before)
            if left.num_descriptors <= MOST_DESCRIPTORS or time.monotonic() > deadline_s:
                return left
            await asyncio.sleep(CLOSE_S / 10)

    async def _script(self, fault: Fault) -> FaultObservations:
        await asyncio.sleep(LEAD_S)
        return await fault.script(self.context())

    def context(self) -> FaultContext:
        probe = LoadRequest((1, 2, 3), 1, None).body(NAME, "probe")
        return FaultContext(self.stage, self._stall_s, probe, self._scale, random.Random(self._seed))

    async def count(self) -> None:
        while True:
            await asyncio.sleep(COUNT_S)
            await self.stage.count_replays()

    def load(self, salt: str, rate: float, send: Send | None = None) -> Load:
        """Makes a load that has the same gaps and the same requests in every run."""
        gaps_s = poisson(random.Random(self._seed), rate)
        return Load(self._body_of(salt), gaps_s, send or self.stage.stream)

    def _body_of(self, salt: str) -> Callable[[int], dict[str, Any]]:
        """Returns a function that makes request bodies. Repeated requests use different entries of the prefix cache."""

        def body_of(number: int) -> dict[str, Any]:
            turn, at = divmod(number, len(self._asks))
            return self._asks[at].body(NAME, f"{salt} {turn}")

        return body_of


def expected_of(quiet: Run) -> list[Tokens]:
    """Returns the right tokens of the requests, in order of their numbers."""
    return [answer.sample.token_ids for answer in sorted(quiet.answers, key=lambda answer: answer.number)]


async def _nothing() -> FaultObservations:
    return FaultObservations()
