"""Runs a comparison. In each round, every server runs once, alone on its cores, and gets the round's load at each
level.

A server restarts for each round, with empty caches. The client is the same as in `bench load`.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Protocol

from pd_cluster import host
from pd_cluster.bench.compare.compared_servers import ReadyServer, check_can_start, on_cores, serving
from pd_cluster.bench.compare.comparison_spec import ComparedServer, ComparisonSpec
from pd_cluster.bench.compare.constant_work import constant_work_s
from pd_cluster.bench.compare.round_ratios import ComparedRun, order_of
from pd_cluster.bench.load_report import LoadRun
from pd_cluster.bench.outcomes import Slo
from pd_cluster.bench.request_arrivals import Arrival, prompt_of
from pd_cluster.bench.serve_bench import NUM_TOKEN_IDS, ask_model, body_of, send_all, sigterm_ends_it
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.client.streaming_client import Sample, make_client
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.errors import ConfigError, GenerationError

WARMUP_CONCURRENCY = 4
IDLE_S = 1.0  # the time without requests in which a server's idle CPU time is measured
NUM_IDLE_REQUESTS = 12  # requests of the load, one at a time


class RunLoad(Protocol):
    """Sends one load to a server and measures it. Raises PdClusterError.

    Sends each request at its time or, if `concurrency` is above 0, as soon as fewer than `concurrency` requests run.
    """

    def __call__(self, url: str, arrivals: Sequence[Arrival], slo: Slo, concurrency: int) -> Awaitable[LoadRun]: ...


async def run_comparison(spec: ComparisonSpec, file: str, run_load: RunLoad) -> tuple[list[ComparedRun], Slo]:
    """Returns all runs in order, and the goals. After a failure, keeps the servers' logs. Raises PdClusterError.

    `file`: the spec's file, for errors.
    """
    try:
        _check_lengths(spec)
        await check_can_start(spec)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.text}") from None
    folder = Path(tempfile.mkdtemp(prefix="pd-cluster-compare-"))  # mode 0700
    runs: list[ComparedRun] = []
    is_whole = False
    try:
        with sigterm_ends_it():
            comparing = _Comparing(spec, run_load, folder, _client_cores(spec))
            slo = await comparing.goals()
            for round_ in range(spec.rounds):
                runs += await comparing.round(round_, slo)
        is_whole = not any(outcome.error for run in runs for outcome in run.load.outcomes)
    finally:
        if is_whole or not any(folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"the comparison failed; the servers' logs: {folder}", flush=True)
    return runs, slo


class _Comparing:
    """The rounds of one comparison. `folder`: the folder of the servers' logs."""

    def __init__(self, spec: ComparisonSpec, run_load: RunLoad, folder: Path, client_cores: frozenset[int]) -> None:
        self._spec, self._run_load = spec, run_load
        self._folder, self._client_cores = folder, client_cores
        self._constant_s = 0.0  # the last duration of constant work

    async def goals(self) -> Slo:
        """Returns the goals; measures the idle first server if they are relative to its medians."""
        goals, spec = self._spec.goals, self._spec
        if not goals.needs_idle:
            return goals.slo(0.0, 0.0)
        async with serving(spec, spec.server[0], self._folder / "idle.log") as served:
            await self._send(served, 2 * spec.rounds, spec.num_warmup_requests, WARMUP_CONCURRENCY, "warming up")
            samples = await self._send(served, 3 * spec.rounds, NUM_IDLE_REQUESTS, 1, f"{spec.server[0].name} idle")
        ttft_s = median(sample.ttft_s or 0.0 for sample in samples)
        tpot_s = [sample.tpot_s for sample in samples if sample.tpot_s is not None]
        if goals.tpot_idle is not None and not tpot_s:
            raise ConfigError(
                "goals.tpot_idle: cannot be measured, because no answer of the idle server has more than one token; "
                "give the workload longer answers"
            )
        found = goals.slo(ttft_s, median(tpot_s or [0.0]))
        print(f"goals: TTFT {1e3 * found.ttft_s:.0f} ms, TPOT {1e3 * found.tpot_s:.1f} ms (0: none)", flush=True)
        return found

    async def round(self, round_: int, slo: Slo) -> list[ComparedRun]:
        by_name = {each.name: each for each in self._spec.server}
        found: list[ComparedRun] = []
        for name in order_of(list(by_name), round_):
            found += await self._slot(by_name[name], round_, slo)
        return found

    async def _slot(self, contender: ComparedServer, round_: int, slo: Slo) -> list[ComparedRun]:
        """Measures one server in one round, between two runs of constant work."""
        spec, log = self._spec, self._folder / f"{contender.name}.log"
        before_s = self._constant_s or await constant_work_s(spec.core_set)
        found = []
        async with serving(spec, contender, log) as served:
            await self._send(served, spec.rounds + round_, spec.num_warmup_requests, WARMUP_CONCURRENCY, "warming up")
            idle_cores = await _cores_while_idle(served)
            for level in spec.levels:
                load, used_s, took_s = await self._load(served, contender, round_, level, slo)
                cores = None
                if idle_cores is not None:  # the server is idle while the client starts and while it writes its report
                    cores = max(0.0, used_s - idle_cores * (took_s - load.duration_s)) / load.duration_s
                found.append(ComparedRun(contender.name, round_, level, load, 0.0, cores, idle_cores))
        self._constant_s = await constant_work_s(spec.core_set)
        mean_s = (before_s + self._constant_s) / 2
        found = [replace(run, constant_s=mean_s) for run in found]
        for run in found:
            print(f"round {round_ + 1} of {spec.rounds}: {_in_words(run, spec.level_name)}", flush=True)
        return found

    async def _load(
        self, served: ReadyServer, contender: ComparedServer, round_: int, level: float, slo: Slo
    ) -> tuple[LoadRun, float, float]:
        """Returns the measured load, and the server's CPU seconds and elapsed seconds. Raises PdClusterError."""
        arrivals = self._spec.arrivals(round_, level)
        started_s, before_s = time.monotonic(), served.cpu_s()
        try:
            with on_cores(self._client_cores):
                async with asyncio.timeout(self._spec.deadline_s):
                    load = await self._run_load(served.url, arrivals, slo, int(level) if self._spec.concurrency else 0)
        except TimeoutError:
            raise GenerationError(
                f"{contender.name}: not answered within {self._spec.deadline_s:g} s; try a smaller load or a "
                "larger deadline_s"
            ) from None
        used_s, took_s = served.cpu_s() - before_s, time.monotonic() - started_s
        failed = [outcome for outcome in load.outcomes if outcome.error]
        if len(failed) == len(load.outcomes):
            why = f"the first: {failed[0].error}" if failed else "nothing was sent"
            raise GenerationError(f"{contender.name}: no request was answered; {why}")
        return load, used_s, took_s

    async def _send(self, served: ReadyServer, round_: int, number: int, concurrency: int, what: str) -> list[Sample]:
        """Sends unmeasured warm-up requests. Raises GenerationError if one fails."""
        arrivals = _some(self._spec.arrivals(round_, self._spec.levels[0]), number)
        async with make_client(concurrency) as client:
            model, most = await ask_model(client, served.url)
            longest = max(each.num_prompt_tokens + each.num_output_tokens for each in arrivals)
            if most is not None and longest > most:
                raise ConfigError(f"{served.url}: a request has {longest} tokens, but that server's context has {most}")
            bodies = [
                body_of(model, prompt_of(each, at, NUM_TOKEN_IDS), each.num_output_tokens)
                for at, each in enumerate(arrivals)
            ]
            samples = await send_all(client, served.url, bodies, concurrency, what)
        if failed := [sample.error for sample in samples if sample.error]:
            raise GenerationError(
                f"{served.url}: {len(failed)} of {len(samples)} requests failed; the first: {failed[0]}"
            )
        return samples


def _check_lengths(spec: ComparisonSpec) -> None:
    """Raises ConfigError for a request that exceeds a server's context, or for a model that is not a folder."""
    checkpoint = None
    longest = max(each.num_prompt_tokens + each.num_output_tokens for each in spec.arrivals(0, spec.levels[0]))
    for at, each in enumerate(spec.server):
        if each.url:
            continue
        checkpoint = checkpoint or Checkpoint.open(Launch(model=spec.model).model_folder)
        most = checkpoint.max_model_len(each.settings.get("max_model_len"))
        if longest > most:
            raise ConfigError(
                f"workload: its longest request has {longest} tokens, but the context of server[{at}] ({each.name}) "
                f"has {most}; give shorter lengths"
            )


def _client_cores(spec: ComparisonSpec) -> frozenset[int]:
    """Returns the cores that the servers do not use, or all cores if there are none."""
    return (host.cores() - spec.core_set) or host.cores()


def _some(arrivals: Sequence[Arrival], number: int) -> list[Arrival]:
    """Returns this many requests, evenly spaced over the load."""
    number = min(number, len(arrivals))
    return [arrivals[at * len(arrivals) // number] for at in range(number)]


async def _cores_while_idle(served: ReadyServer) -> float | None:
    if not served.pids:
        return None
    before_s, started_s = served.cpu_s(), time.monotonic()
    await asyncio.sleep(IDLE_S)
    return (served.cpu_s() - before_s) / (time.monotonic() - started_s)


def _in_words(run: ComparedRun, level_name: str) -> str:
    found = run.figures()
    shown = (("ttft_p50", "TTFT p50"), ("itl_p99", "p99 between tokens"), ("goodput", "goodput"))
    figures = [
        f"{words} {value:.4g} {found[name].unit}"
        for name, words in shown
        if name in found and (value := found[name].value) is not None
    ]
    at = f", {level_name} {run.level:g}" if level_name else ""
    note = f"; NOT VALID: {run.load.slowed_by}" if run.load.slowed_by else ""
    return f"{run.server}{at}: {', '.join(figures)}; constant work {run.constant_s:.2f} s{note}"
