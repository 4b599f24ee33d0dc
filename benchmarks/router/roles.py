"""`python -m benchmarks roles`: goodput with --auto-role while the lengths of requests change, and with fixed roles.

Four clusters of four simulated workers, whose speed a clock sets, get the same requests at the same time: one whose
scheduler assigns roles, and one for each fixed split. Each phase has lengths for which another split is the best. A
request counts if it meets both goals.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.figures import begin, finish, result
from benchmarks.mixed_load import NUM_TOKEN_IDS, Load, poisson
from benchmarks.router.scheduler_target import MODEL_NAME, Target, WorkerSpeed, made_up_launch, own_scheduler
from pd_cluster.bench.serve_bench import sigterm_ends_it
from pd_cluster.client.streaming_client import Sample, measure
from pd_cluster.errors import GenerationError
from pd_cluster.result_tables import Report, Result

PACE, STEP_S = WorkerSpeed(prefill_tokens_per_s=2000.0, max_num_seqs=16), 0.04
SETTLE_S = 60.0  # the time from a change of lengths within which roles must be right
TTFT_GOAL_S, TPOT_GOAL_S, GOODPUT_GOAL = 3.0, 0.08, 0.9
CLIENT_TIMEOUT_S, POLL_S = 60.0, 0.5
SPLITS = ((1, 3), (2, 2), (3, 1))  # numbers of prefill and decode instances
AUTO = "--auto-role"


class Phase(NamedTuple):
    """Mean numbers of tokens. `rate_per_s`: about 75 % of the capacity of the best split."""

    name: str
    num_prompt_tokens: int
    num_output_tokens: int
    rate_per_s: float


PHASES = (
    Phase("equal work", 600, 100, 4.8),
    Phase("long prompts", 1200, 50, 3.8),
    Phase("long answers", 200, 200, 4.5),
)


@dataclass(slots=True)
class Run:
    """One cluster's samples with their times of sending, and the times at which its split changed."""

    name: str
    num_prefill: int
    flags: tuple[str, ...] = ()
    samples: list[tuple[float, Sample]] = field(default_factory=list)
    splits: list[tuple[float, int]] = field(default_factory=list)  # (time, prefill instances)

    def goodput(self, start_s: float, stop_s: float) -> float:
        """Returns the requests per second that were sent between these times and met the goals."""
        good = [sample for sent_s, sample in self.samples if start_s <= sent_s < stop_s and is_good(sample)]
        return len(good) / (stop_s - start_s)


def is_good(sample: Sample) -> bool:
    is_prompt = sample.ttft_s is not None and sample.ttft_s <= TTFT_GOAL_S
    return sample.error is None and is_prompt and (sample.tpot_s or 0.0) <= TPOT_GOAL_S


async def run(seconds: float, seed: int, quick: bool, json: str) -> None:
    """Measures and reports. Raises PdClusterError if a scheduler does not start or a request fails."""
    phase_s = 3.0 if quick else seconds
    begin(json)
    runs = [
        Run(AUTO, 2, (AUTO, f"--slo-ttft={TTFT_GOAL_S:g}", f"--slo-tpot={TPOT_GOAL_S:g}")),
        *(Run(f"{num_prefill}P{num_decode}D", num_prefill) for num_prefill, num_decode in SPLITS),
    ]
    with (
        sigterm_ends_it(),
        tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder,
        contextlib.ExitStack() as open_,
    ):
        targets = [open_.enter_context(scheduler_of(Path(folder) / each.name, each)) for each in runs]
        started_s = time.monotonic()
        loads = [load(each, target, started_s, phase_s, seed) for each, target in zip(runs, targets, strict=True)]
        await asyncio.gather(*loads, watch(runs[0], targets[0], started_s, phase_s * len(PHASES)))
    asked = "--quick" if quick else f"--seconds {seconds:g}"
    title = f"made-up workers that a clock limits, three phases of {phase_s:g} s"
    finish(
        Report(f"python -m benchmarks roles {asked} --seed {seed}", [*results_of(runs, phase_s)]), title, json, quick
    )
    failed = [sample.error for each in runs for _, sample in each.samples if sample.error and sample.status != 429]
    if failed:
        raise GenerationError(f"{len(failed)} requests were neither answered nor refused; the first: {failed[0]}")


def scheduler_of(folder: Path, of: Run) -> contextlib.AbstractContextManager[Target]:
    folder.mkdir()
    launch = made_up_launch(of.flags)
    launch = replace(launch, num_prefill=of.num_prefill, num_decode=sum(SPLITS[0]) - of.num_prefill)
    return own_scheduler(folder, STEP_S, launch, PACE)


async def load(of: Run, target: Target, started_s: float, phase_s: float, seed: int) -> None:
    """Sends all phases' requests, one phase after the other; each run sends the same ones."""
    limits, timeout = httpx.Limits(max_connections=None, max_keepalive_connections=0), httpx.Timeout(CLIENT_TIMEOUT_S)
    url = f"http://127.0.0.1:{target.port}/v1/completions"
    async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False, verify=False) as client:

        async def send(body: Mapping[str, Any]) -> Sample:
            sent_s = time.monotonic() - started_s
            sample = await measure(client, url, body, deadline_s=CLIENT_TIMEOUT_S)
            of.samples.append((sent_s, sample))
            return sample

        async with asyncio.TaskGroup() as running:  # the answers of a phase may end after it
            for at, phase in enumerate(PHASES):
                draw = random.Random(f"{seed} {phase.name}")
                end_s = started_s + (at + 1) * phase_s
                sending = Load(
                    lambda _, draw=draw, phase=phase: body_of(draw, phase), poisson(draw, phase.rate_per_s), send
                )
                running.create_task(sending.run(lambda _, end_s=end_s: time.monotonic() >= end_s))
                await asyncio.sleep(max(0.0, end_s - time.monotonic()))


def body_of(draw: random.Random, phase: Phase) -> dict[str, Any]:
    """Makes a request whose lengths lie within a quarter of the means."""
    num_prompt, num_output = (
        draw.randint(round(0.75 * mean), round(1.25 * mean))
        for mean in (phase.num_prompt_tokens, phase.num_output_tokens)
    )
    prompt = [draw.randrange(NUM_TOKEN_IDS) for _ in range(num_prompt)]
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": num_output, "ignore_eos": True}


async def watch(of: Run, target: Target, started_s: float, seconds: float) -> None:
    """Notes each change of the split."""
    async with httpx.AsyncClient(timeout=10, trust_env=False, verify=False) as client:
        while (now_s := time.monotonic() - started_s) < seconds:
            listed = (await client.get(f"{target.admin_url}/instances")).json()["instances"]
            num_prefill = sum(each["role"] == "prefill" for each in listed)
            if not of.splits or of.splits[-1][1] != num_prefill:
                of.splits.append((now_s, num_prefill))
                print(f"{now_s:.0f} s: {num_prefill}P{len(listed) - num_prefill}D", flush=True)
            await asyncio.sleep(POLL_S)


def results_of(runs: list[Run], phase_s: float) -> Iterator[Result]:
    auto, *fixed = runs
    settle_s = min(SETTLE_S, phase_s / 2)
    for at, phase in enumerate(PHASES):
        start_s, stop_s = at * phase_s, (at + 1) * phase_s
        steady = {each.name: each.goodput(start_s + settle_s, stop_s) for each in runs}
        best = max(steady[each.name] for each in fixed)
        for name, value in steady.items():
            yield result(f"{phase.name}: goodput, {name}", [value], "requests/s", "higher")
        share = [steady[AUTO] / best] if best else []
        yield result(f"{phase.name}: {AUTO} ÷ best fixed split", share, "x", "higher", GOODPUT_GOAL)
        changes = [when_s - start_s for when_s, _ in auto.splits[1:] if start_s <= when_s < stop_s]
        yield result(f"{phase.name}: last change of a role after", [max(changes, default=0.0)], "s", "lower", SETTLE_S)
