"""`python -m benchmarks overload`: measures how requests fare if three times as many arrive as the cluster can serve.

The real scheduler serves in front of simulated workers whose speed a clock sets, so that the capacity is known and
nothing depends on this machine's speed. Requests arrive as a Poisson process in three runs: at 80 % of the capacity, at
three times the capacity, and at three times the capacity from one API key with a tenth of it from another. Prefill is
the bottleneck in one shape, decode in the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.figures import begin, finish, names_of, ratio, result
from benchmarks.mixed_load import NUM_TOKEN_IDS, Load, poisson
from benchmarks.router.scheduler_target import (
    MODEL_NAME,
    NUM_DECODE,
    NUM_PREFILL,
    Target,
    WorkerSpeed,
    made_up_launch,
    own_scheduler,
)
from pd_cluster.bench.process_times import cpu_s
from pd_cluster.bench.serve_bench import sigterm_ends_it
from pd_cluster.client.streaming_client import Sample, measure
from pd_cluster.errors import ConfigError, GenerationError
from pd_cluster.result_tables import Report, Result

STEP_S = 0.04
SHORTEST, LONGEST = 100, 500  # prompt tokens
NORMAL, OVERLOAD, GUEST = 0.8, 3.0, 0.1  # loads, as multiples of the capacity
WARM_S = 3.0  # duration of the warm-up, which is not counted
HOG_QUEUE_S = 1.0  # longer than a hog's request takes to make room for another one
CLIENT_TIMEOUT_S = 60.0
KEYS = ("bench-one", "bench-two")
MOST_OPEN = 2000
NUM_POOLS = 50  # number of connection pools; when a connection ends, its pool spends time on each of its others
GOODPUT_GOAL, FIRST_TOKEN_GOAL, REFUSAL_GOAL_S, CPU_GOAL = 0.95, 2.0, 0.1, 0.05


@dataclass(frozen=True, slots=True)
class Shape:
    """`hog_n`: the number of sequences in each of a hog's requests; the hog sends fewer requests by this factor.
    `max_queue_s` is about the time to the first token at 80 % of the capacity.
    """

    name: str
    pace: WorkerSpeed
    num_output_tokens: int
    hog_n: int
    max_queue_s: float

    @property
    def capacity(self) -> float:
        """The maximum number of requests per second that the workers serve by their clock."""
        return 1 / self.takes_s((SHORTEST + LONGEST) // 2, self.num_output_tokens)

    def takes_s(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Returns a request's share of the time of all instances of the bottleneck role."""
        by_prefill = num_prompt_tokens / (NUM_PREFILL * self.pace.prefill_tokens_per_s)
        by_decode = STEP_S * num_output_tokens / (NUM_DECODE * self.pace.max_num_seqs)
        return by_prefill if self.name == "prefill" else by_decode


SHAPES = {
    "prefill": Shape("prefill", WorkerSpeed(prefill_tokens_per_s=2000.0, max_num_seqs=64), 9, 1, 0.8),
    "decode": Shape("decode", WorkerSpeed(prefill_tokens_per_s=20_000.0, max_num_seqs=16), 65, 8, 0.08),
}


@dataclass(slots=True)
class Run:
    """One key's run: its duration, its share of the capacity, and the number `n` of sequences of each request."""

    shape: Shape
    key: str
    share: float
    n: int
    took_s: float
    samples: list[tuple[float, Sample]] = field(default_factory=list)  # (time of sending after the start, sample)
    workers_cpu: float = 0.0  # CPU use of the workers, in cores

    @property
    def counted(self) -> list[Sample]:
        return [sample for sent_s, sample in self.samples if sent_s >= WARM_S]

    @property
    def complete(self) -> list[Sample]:
        return [sample for sample in self.counted if sample.error is None]

    @property
    def refused(self) -> list[Sample]:
        return [sample for sample in self.counted if sample.status == 429]

    @property
    def failed(self) -> list[Sample]:
        return [sample for sample in self.counted if sample.error is not None and sample.status != 429]

    @property
    def goodput(self) -> float:
        """The share of the bottleneck instances' time spent on requests that were answered in full."""
        ended = [s for sent_s, s in self.samples if s.error is None and WARM_S <= sent_s + s.e2e_s <= self.took_s]
        spent_s = sum(self.shape.takes_s(each.num_prompt_tokens, each.num_output_tokens) for each in ended)
        return spent_s / (self.took_s - WARM_S)

    @property
    def first_token_s(self) -> list[float]:
        return [sample.ttft_s for sample in self.complete if sample.ttft_s is not None]


async def run(seconds: float, shapes: str, seed: int, quick: bool, json: str) -> None:
    """Measures and reports. Raises PdClusterError if a scheduler does not start, and for failed requests."""
    names = names_of("--shapes", shapes, SHAPES)
    if seconds <= WARM_S:
        raise ConfigError(f"--seconds {seconds:g}: must be above {WARM_S:g}; the first ones do not count")
    seconds = WARM_S + 2 if quick else seconds
    begin(json)
    results: list[Result] = []
    failed: list[Sample] = []
    with sigterm_ends_it(), tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        for name in names:
            runs = [await measured(Path(folder), each, seed) for each in runs_of(SHAPES[name], seconds)]
            failed += [sample for each in runs for sample in each.failed]
            results += results_of(SHAPES[name], runs)
    asked = f"{'--quick' if quick else f'--seconds {seconds:g}'} --shapes {','.join(names)} --seed {seed}"
    title = f"simulated workers limited by a clock, {seconds:g} s for each run"
    finish(Report(f"python -m benchmarks overload {asked}", results), title, json, quick)
    if failed:
        raise GenerationError(f"{len(failed)} requests were neither answered nor refused; the first: {failed[0].error}")


def runs_of(shape: Shape, seconds: float) -> list[list[Run]]:
    """Returns groups of simultaneous runs, one run per key; a group's last run counts."""
    alone = [[Run(shape, KEYS[0], share, 1, seconds)] for share in (NORMAL, OVERLOAD)]
    return [*alone, [Run(shape, KEYS[0], OVERLOAD, shape.hog_n, seconds), Run(shape, KEYS[1], GUEST, 1, seconds)]]


async def measured(folder: Path, runs: Sequence[Run], seed: int) -> Run:
    """Makes the runs at the same time. Returns the last one."""
    counts = runs[-1]
    max_queue_s = HOG_QUEUE_S if len(runs) > 1 else counts.shape.max_queue_s
    launch = made_up_launch([f"--max-queue-time={max_queue_s:g}"], KEYS)
    with own_scheduler(folder, STEP_S, launch, counts.shape.pace) as target:
        before_s, started_s = cpu_s(target.workers_pid), time.monotonic()
        await asyncio.gather(*(load(each, target, seed, started_s) for each in runs))
        counts.workers_cpu = (cpu_s(target.workers_pid) - before_s) / (time.monotonic() - started_s)
    print(
        f"{counts.shape.name}, {' beside '.join(f'{each.share:g} x the capacity' for each in reversed(runs))}: goodput "
        f"{counts.goodput:.3f}, {len(counts.refused)} of {len(counts.counted)} refused, {len(counts.failed)} failed",
        flush=True,
    )
    return counts


async def load(run: Run, target: Target, seed: int, started_s: float) -> None:
    """Sends one key's requests."""
    draw = random.Random(f"{seed} {run.key}")
    limits = httpx.Limits(max_connections=MOST_OPEN, max_keepalive_connections=0)
    headers, timeout = {"Authorization": f"Bearer {run.key}"}, httpx.Timeout(CLIENT_TIMEOUT_S)
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
            sample = await measure(draw.choice(pools), url, body, deadline_s=CLIENT_TIMEOUT_S)
            run.samples.append((sent_s, sample))
            return sample

        def body_of(number: int) -> dict[str, Any]:
            prompt = [draw.randrange(NUM_TOKEN_IDS) for _ in range(draw.randint(SHORTEST, LONGEST))]
            more = {"max_tokens": run.shape.num_output_tokens, "ignore_eos": True, "n": run.n}
            return {"model": MODEL_NAME, "prompt": prompt, **more}

        gaps_s = poisson(draw, run.share * run.shape.capacity / run.n)
        await Load(body_of, gaps_s, send).run(lambda _: time.monotonic() - started_s >= run.took_s)


def results_of(shape: Shape, runs: Sequence[Run]) -> Iterator[Result]:
    normal, overload, guest = runs

    def of(name: str, values: Sequence[float], unit: str, goal: float | None = None, at: float = 50) -> Result:
        better = "higher" if unit.startswith("of ") or unit == "requests/s" else "lower"
        return result(f"{shape.name}: {name}", values, unit, better, goal, at)  # type: ignore[arg-type]

    yield of("capacity", [shape.capacity], "requests/s")
    yield of("served at 3 x capacity", [overload.goodput], "of capacity", GOODPUT_GOAL)
    yield of("first token p99 at 80 %", normal.first_token_s, "s", at=99)
    yield of("first token p99 at 3 x", overload.first_token_s, "s", at=99)
    found = ratio(overload.first_token_s, normal.first_token_s, 99)
    yield of("first token p99, 3 x to 80 %", found, "x", FIRST_TOKEN_GOAL)
    yield of("refusal p99", [each.e2e_s for each in overload.refused], "s", REFUSAL_GOAL_S, at=99)
    answered = [len(guest.complete) / len(guest.counted)] if guest.counted else []
    yield of("guest of a hog, answered", answered, "of asked", 1.0)
    yield of("guest of a hog, first token p99", guest.first_token_s, "s", at=99)
    yield of("CPU of the workers", [max(each.workers_cpu for each in runs)], "cores", CPU_GOAL)
