"""`python -m benchmarks overload`: the fate of requests when three times as many arrive as the cluster can serve.

The real scheduler serves in front of made-up workers whose speed a clock sets, so that the capacity is known and
nothing depends on this machine's speed. Requests arrive as a Poisson process: at 80 % of the capacity, at three times
the capacity, and at three times from one API key beside a tenth from another. Prefill is the bottleneck in one shape,
decode in the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.load import NUM_TOKEN_IDS, Load, poisson
from benchmarks.processes import cpu_s
from benchmarks.router.targets import MODEL_NAME, NUM_DECODE, NUM_PREFILL, Pace, Target, own_scheduler
from pd_cluster.bench.serve import sigterm_ends_it
from pd_cluster.client.streaming import Sample, measure
from pd_cluster.cluster.processes.launch import Launch
from pd_cluster.cluster.processes.ports import free_port_pair
from pd_cluster.errors import ConfigError, GenerationError
from pd_cluster.tables import Report, Result, check_writable, percentile

STEP_S = 0.04
SHORTEST, LONGEST = 100, 500  # prompt tokens
MEAN = (SHORTEST + LONGEST) / 2
NORMAL, OVERLOAD, GUEST = 0.8, 3.0, 0.1  # of the capacity
WARM_S = 3.0  # warm-up, not counted
HOG_QUEUE_S = 1.0  # longer than one of a hog's requests takes to make room for another
CLIENT_TIMEOUT_S = 60.0
KEYS = ("bench-one", "bench-two")
MOST_OPEN = 2000
NUM_POOLS = 50  # a pool takes time for each of its connections whenever one ends
GOODPUT_GOAL, FIRST_TOKEN_GOAL, REFUSAL_GOAL_S, CPU_GOAL = 0.95, 2.0, 0.1, 0.05


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape of requests. `capacity`: the most requests per second that the workers serve, by their clock.

    `hog_n`: sequences of each of a hog's requests, which are as many fewer. `max_queue_s` is about a first token's
    time at 80 % of the capacity.
    """

    name: str
    pace: Pace
    num_output_tokens: int
    hog_n: int
    max_queue_s: float

    @property
    def capacity(self) -> float:
        return 1 / self.takes_s(round(MEAN), self.num_output_tokens)

    def takes_s(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Returns a request's share of the time of all instances of the bottleneck role."""
        by_prefill = num_prompt_tokens / (NUM_PREFILL * self.pace.prefill_tokens_per_s)
        by_decode = STEP_S * num_output_tokens / (NUM_DECODE * self.pace.max_num_seqs)
        return by_prefill if self.name == "prefill" else by_decode


SHAPES = (
    Shape("prefill", Pace(prefill_tokens_per_s=2000.0, max_num_seqs=64), 9, 1, 0.8),
    Shape("decode", Pace(prefill_tokens_per_s=20_000.0, max_num_seqs=16), 65, 8, 0.08),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadBench:
    """The command's parameters."""

    seconds: float = 60.0
    max_queue_s: float | None = None  # None: each shape's own
    shapes: tuple[str, ...] = tuple(shape.name for shape in SHAPES)
    seed: int = 0
    quick: bool = False

    @property
    def command(self) -> str:
        size = "--quick" if self.quick else f"--seconds {self.seconds:g}"
        flag = "" if self.max_queue_s is None else f" --max-queue-time {self.max_queue_s:g}"
        return f"python -m benchmarks overload {size} --shapes {','.join(self.shapes)}{flag} --seed {self.seed}"


@dataclass(slots=True)
class Run:
    """One key's run. `share`: of the capacity. CPU is in cores: the workers', the scheduler's, this process's."""

    shape: Shape
    name: str
    share: float
    took_s: float = 0.0
    samples: list[tuple[float, Sample]] = field(default_factory=list)  # when each was sent, from the beginning
    workers_cpu: float = 0.0
    scheduler_cpu: float = 0.0
    own_cpu: float = 0.0

    def counted(self) -> list[Sample]:
        return [sample for sent_s, sample in self.samples if sent_s >= WARM_S]

    def ended(self) -> list[Sample]:
        """Complete requests that ended while load arrived, after the warm-up."""
        return [s for sent_s, s in self.samples if s.error is None and WARM_S <= sent_s + s.e2e_s <= self.took_s]

    @property
    def complete(self) -> list[Sample]:
        return [sample for sample in self.counted() if sample.error is None]

    @property
    def refused(self) -> list[Sample]:
        return [sample for sample in self.counted() if sample.status == 429]

    @property
    def failed(self) -> list[Sample]:
        return [sample for sample in self.counted() if sample.error is not None and sample.status != 429]

    @property
    def goodput(self) -> float:
        """The share of the bottleneck instances' time spent on requests that were answered in full."""
        took_s = sum(self.shape.takes_s(each.num_prompt_tokens, each.num_output_tokens) for each in self.ended())
        return took_s / (self.took_s - WARM_S)

    def first_token_s(self, percent: float) -> float | None:
        return percentile([sample.ttft_s for sample in self.complete if sample.ttft_s is not None], percent)

    def refusal_s(self, percent: float) -> float | None:
        return percentile([sample.e2e_s for sample in self.refused], percent)


def make_bench(seconds: float, max_queue_s: float | None, shapes: str, seed: int, quick: bool) -> OverloadBench:
    """Builds the bench. Raises ConfigError."""
    known = [shape.name for shape in SHAPES]
    names = tuple(filter(None, shapes.split(","))) or tuple(known)
    for name in names:
        if name not in known:
            raise ConfigError(f"--shapes {name!r}: expected some of {','.join(known)}")
    if seconds <= WARM_S:
        raise ConfigError(f"--seconds {seconds:g}: must be above {WARM_S:g}; the first ones do not count")
    return OverloadBench(
        seconds=WARM_S + 2 if quick else seconds, max_queue_s=max_queue_s, shapes=names, seed=seed, quick=quick
    )


async def run(bench: OverloadBench, json_path: str = "") -> None:
    """Measures, prints, writes. Raises PdClusterError: a scheduler that does not start, failed requests."""
    check_writable(json_path)
    results: list[Result] = []
    num_failed = 0
    with sigterm_ends_it(), tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        for shape in SHAPES:
            if shape.name in bench.shapes:
                runs = await _measure(bench, shape, Path(folder))
                num_failed += sum(len(each.failed) for each in runs)
                results += _results(shape, runs, with_goals=not bench.quick)
    report = Report(bench.command, results)
    report.show(f"made-up workers that a clock limits, {bench.seconds:g} s for each run")
    if json_path:
        report.write(json_path)
    if num_failed:
        raise GenerationError(f"{num_failed} requests were neither answered nor refused; the first ones are above")


async def _measure(bench: OverloadBench, shape: Shape, folder: Path) -> list[Run]:
    runs = []
    for name, max_queue_s, loads in (
        ("80 % of capacity", shape.max_queue_s, {KEYS[0]: (NORMAL, 1)}),
        ("3 x capacity", shape.max_queue_s, {KEYS[0]: (OVERLOAD, 1)}),
        ("a hog's guest", HOG_QUEUE_S, {KEYS[0]: (OVERLOAD, shape.hog_n), KEYS[1]: (GUEST, 1)}),
    ):
        launch = Launch(
            num_prefill=NUM_PREFILL,
            num_decode=NUM_DECODE,
            port=free_port_pair(),
            served_model_names=[MODEL_NAME],
            arguments=["--max-queue-time", f"{max_queue_s if bench.max_queue_s is None else bench.max_queue_s:g}"],
            api_keys=list(KEYS),
        )
        with own_scheduler(folder, STEP_S, launch, shape.pace) as target:
            found = await run_loads(bench, shape, name, target, loads)
        runs.append(found[-1])
        for each in found:
            print(_line(each), flush=True)
            for sample in each.failed[:3]:
                print(f"  {sample.error}", flush=True)
    return runs


async def run_loads(
    bench: OverloadBench,
    shape: Shape,
    name: str,
    target: Target,
    loads: Mapping[str, tuple[float, int]],
    timeout_s: float = CLIENT_TIMEOUT_S,
) -> list[Run]:
    """Returns a run for each key, "" for none; the last key's is the one that counts.

    `timeout_s`: after which clients leave, counted from the request.
    """
    names = [name] if len(loads) == 1 else ["a hog", name]
    found = [Run(shape, name, share) for name, (share, _) in zip(names, loads.values(), strict=True)]
    pids = (target.workers_pid, target.pid)
    before, own_before = [cpu_s(pid) for pid in pids], time.process_time()
    started_s = time.monotonic()
    await asyncio.gather(
        *(
            _load(bench, shape, target, Clients(key, num_sequences, timeout_s), found[at], started_s)
            for at, (key, (_, num_sequences)) in enumerate(loads.items())
        )
    )
    took_s = time.monotonic() - started_s
    workers, scheduler = ((cpu_s(pid) - then) / took_s for pid, then in zip(pids, before, strict=True))
    for each in found:
        each.workers_cpu, each.scheduler_cpu = workers, scheduler
        each.own_cpu = (time.process_time() - own_before) / took_s
    return found


class Clients(NamedTuple):
    """Those of one API key; "": without any."""

    key: str
    num_sequences: int
    timeout_s: float


async def _load(
    bench: OverloadBench, shape: Shape, target: Target, clients: Clients, into: Run, started_s: float
) -> None:
    draw = random.Random(f"{bench.seed} {clients.key}")
    limits = httpx.Limits(max_connections=MOST_OPEN, max_keepalive_connections=0)
    headers = {"Authorization": f"Bearer {clients.key}"} if clients.key else {}
    timeout = httpx.Timeout(CLIENT_TIMEOUT_S)
    url = f"http://127.0.0.1:{target.port}/v1/completions"
    async with contextlib.AsyncExitStack() as running:
        pools = [
            await running.enter_async_context(
                httpx.AsyncClient(limits=limits, timeout=timeout, headers=headers, trust_env=False, verify=False)
            )
            for _ in range(NUM_POOLS)
        ]

        async def send(body: Mapping[str, Any]) -> Sample:
            sent_s = time.monotonic() - started_s
            sample = await measure(draw.choice(pools), url, body, deadline_s=clients.timeout_s)
            into.samples.append((sent_s, sample))
            return sample

        def body_of(number: int) -> dict[str, Any]:
            prompt = [draw.randrange(NUM_TOKEN_IDS) for _ in range(draw.randint(SHORTEST, LONGEST))]
            return {
                "model": MODEL_NAME,
                "prompt": prompt,
                "max_tokens": shape.num_output_tokens,
                "ignore_eos": True,
                "n": clients.num_sequences,
            }

        gaps_s: Iterable[float] = poisson(draw, into.share * shape.capacity / clients.num_sequences)
        await Load(body_of, gaps_s, send).run(lambda _: time.monotonic() - started_s >= bench.seconds)
    into.took_s = bench.seconds


def _line(run: Run) -> str:
    def told(value: float | None) -> str:
        return "-" if value is None else f"{1e3 * value:.0f} ms"

    return (
        f"{run.shape.name}, {run.name}: goodput {run.goodput:.3f} of {run.shape.capacity:.1f} requests/s, "
        f"{len(run.refused)} of {len(run.counted())} refused, {len(run.failed)} failed; first token p50 "
        f"{told(run.first_token_s(50))}, p99 {told(run.first_token_s(99))}; refusal p99 {told(run.refusal_s(99))}; "
        f"CPU: workers {run.workers_cpu:.1%}, scheduler {run.scheduler_cpu:.1%}, client {run.own_cpu:.1%}"
    )


def _results(shape: Shape, runs: Sequence[Run], with_goals: bool) -> Iterator[Result]:
    normal, overload, guest = runs

    def result(name: str, value: float | None, unit: str, better: Any, goal: float | None, samples: int) -> Result:
        goal = goal if with_goals else None
        return Result(name=f"{shape.name}: {name}", value=value, unit=unit, better=better, goal=goal, samples=samples)

    first_s, normal_s, guest_s = (run.first_token_s(99) for run in (overload, normal, guest))
    yield result("capacity", shape.capacity, "requests/s", "higher", None, 1)
    served = overload.goodput
    yield result("served at 3 x capacity", served, "of capacity", "higher", GOODPUT_GOAL, len(overload.ended()))
    yield result("first token p99 at 80 %", normal_s, "s", "lower", None, len(normal.complete))
    yield result("first token p99 at 3 x", first_s, "s", "lower", None, len(overload.complete))
    ratio = first_s / normal_s if first_s and normal_s else None
    yield result("first token p99, 3 x to 80 %", ratio, "x", "lower", FIRST_TOKEN_GOAL, len(overload.complete))
    yield result("refusal p99", overload.refusal_s(99), "s", "lower", REFUSAL_GOAL_S, len(overload.refused))
    yield result("guest of a hog, answered", _share(guest), "of asked", "higher", 1.0, len(guest.counted()))
    yield result("guest of a hog, first token p99", guest_s, "s", "lower", None, len(guest.complete))
    most = max(each.workers_cpu for each in runs)
    yield result("CPU of the workers", most, "cores", "lower", CPU_GOAL, len(runs))
    yield result("CPU of the client", max(each.own_cpu for each in runs), "cores", "lower", None, len(runs))


def _share(run: Run) -> float | None:
    return len(run.complete) / len(run.counted()) if run.counted() else None
