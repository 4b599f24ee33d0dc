"""`python -m benchmarks serve-against hybrid,resume,vllm`: prefill and decode instances beside other servers, in turn.

All have the same model, the same cores of this machine and the same requests, and none caches prefixes. "hybrid" is the
same cluster with its prefill instances drained: they lend their cores, and the decode instances compute everything.
"resume" is the same cluster with streams that outlive their scheduler, as those of `up`. "vllm" is vLLM's own server
for CPU. A ratio compares runs of one round, which follow each other. Each round begins with constant work on two cores
and no server: no server's times between tokens can be more even than the machine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx
import msgspec

from benchmarks.child import end_group, last_lines, make_model, run_child
from benchmarks.engine.bench import DEFAULT_PEERS_DIR, PEERS
from benchmarks.peers import vllm_server
from benchmarks.processes import cpu_s
from benchmarks.spec import PeerResult, Spec, Workload
from benchmarks.tiny_model import QUICK_SHAPE, ModelShape
from pd_cluster.bench.serve import (
    ServeBench,
    ask_model,
    check_shape,
    make_bodies,
    own_cluster,
    send_all,
    sigterm_ends_it,
)
from pd_cluster.client.admin import Admin
from pd_cluster.client.instances import fetch_instances
from pd_cluster.client.operate import MARGIN_S, POLL_S, is_drained
from pd_cluster.client.streaming import Sample, make_client
from pd_cluster.cluster.processes.launcher import Cluster
from pd_cluster.cluster.processes.ports import free_port_pair
from pd_cluster.errors import ConfigError, GenerationError, PdClusterError
from pd_cluster.tables import Report, Result, check_writable, percentile, spread

SPLIT, HYBRID, RESUME, VLLM = "split", "hybrid", "resume", "vllm"
OTHERS = (HYBRID, RESUME, VLLM)
LASTING = ("--resume-window=30", "--resume-scheduler-only")
MOST_P99 = 1.3  # times the mean between tokens
STEADY_S, STEADY_DEADLINE_S = 10.0, 120.0
GOALS = {(HYBRID, "tokens"): 0.95, (VLLM, "tokens"): 1.0, (VLLM, "ttft"): 1.0}


@dataclass(frozen=True, slots=True)
class AgainstBench:
    """The command's parameters; `serve` has the cluster's and those of the requests."""

    serve: ServeBench
    others: tuple[str, ...]
    rounds: int
    peers_dir: Path
    quick: bool

    @property
    def command(self) -> str:
        quick = " --quick" if self.quick else ""
        return f"{self.serve.command} --against {','.join(self.others)} --rounds {self.rounds}{quick}"


def make_bench(serve: ServeBench, against: str, rounds: int, peers_dir: str, quick: bool) -> AgainstBench:
    """Builds the bench from the command line. Raises ConfigError."""
    others = tuple(name.strip() for name in against.split(",") if name.strip())
    if unknown := [name for name in others if name not in OTHERS]:
        raise ConfigError(f"--against {unknown[0]}: expected some of {','.join(OTHERS)}")
    if serve.url:
        raise ConfigError("--against starts a cluster of its own; leave out --url")
    flags = (*serve.more_flags, "--no-enable-prefix-caching")
    folder = Path(peers_dir).expanduser().absolute() if peers_dir else DEFAULT_PEERS_DIR
    return AgainstBench(dataclasses.replace(serve, more_flags=flags), others, 1 if quick else rounds, folder, quick)


@dataclass(frozen=True, slots=True)
class Run:
    """A target's answers in one round, as clients saw them; times in ms.

    `cpu_us`: of our scheduler, for each output token.
    """

    tokens: float  # output tokens/s
    ttft: float  # mean
    itl: float  # mean time between arrivals of tokens
    itl_p99: float
    second: float  # median time from token one to token two
    cpu_us: float = 0.0

    @classmethod
    def of(cls, samples: Sequence[Sample], took_s: float, used_s: float = 0.0) -> Run:
        """Raises GenerationError if a request failed."""
        if failed := [sample for sample in samples if sample.error is not None]:
            raise GenerationError(f"{len(failed)} requests failed; the first: {failed[0].error}")
        gaps_ms = [1e3 * gap_s for sample in samples for gap_s in sample.itl_s]
        num_tokens = sum(sample.num_output_tokens for sample in samples)
        return cls(
            tokens=num_tokens / took_s,
            ttft=1e3 * mean(sample.ttft_s or 0.0 for sample in samples),
            itl=mean(gaps_ms),
            itl_p99=percentile(gaps_ms, 99) or 0.0,
            second=median(1e3 * sample.itl_s[0] for sample in samples),
            cpu_us=1e6 * used_s / num_tokens,
        )

    def __str__(self) -> str:
        return (
            f"{self.tokens:.0f} tokens/s, mean TTFT {self.ttft:.0f} ms, "
            f"between tokens {self.itl:.1f} ms, p99 {self.itl_p99:.1f} ms, before token two {self.second:.1f} ms"
        )


@dataclass(frozen=True, slots=True)
class Steady:
    """Passes of constant work, in ms."""

    mean: float
    p99: float

    def __str__(self) -> str:
        return f"{self.mean:.1f} ms a pass, p99 {self.p99:.1f} ms"


@dataclass(frozen=True, slots=True)
class Round:
    runs: dict[str, Run]
    steady: Steady


@dataclass(frozen=True, slots=True)
class Target:
    url: str
    prepare: Callable[[], Awaitable[None]]
    scheduler_pid: int = 0  # of a cluster of ours


async def run(bench: AgainstBench, json_path: str = "") -> None:
    """Measures, prints, writes. Raises PdClusterError."""
    check_writable(json_path)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder, sigterm_ends_it():
        shape = QUICK_SHAPE if bench.quick else ModelShape()
        model = bench.serve.model or str(await asyncio.to_thread(make_model, Path(folder), shape))
        async with _targets(bench, model, Path(folder)) as targets:
            rounds = [round_ async for round_ in _rounds(bench, targets, Path(folder))]
    report = Report(bench.command, list(results(rounds)))
    serve = bench.serve
    report.show(
        f"{serve.num_requests} requests of {serve.input_len} + {serve.output_len} tokens, {serve.concurrency} at a "
        f"time; {len(rounds)} rounds, {time.monotonic() - started_s:.0f} s"
    )
    if bench.quick:
        print("note: --quick tells whether everything runs; its figures mean nothing")
    if json_path:
        report.write(json_path)


# ---- the servers


@contextlib.asynccontextmanager
async def _targets(bench: AgainstBench, model: str, folder: Path) -> AsyncIterator[Mapping[str, Target]]:
    """Starts the servers, one after the other, and yields those that can be asked."""
    async with contextlib.AsyncExitStack() as stack:
        targets: dict[str, Target] = {}
        cluster = await stack.enter_async_context(own_cluster(dataclasses.replace(bench.serve, model=model)))
        url, pid = cluster.launch.url, cluster.pid_of("scheduler")
        targets[SPLIT] = Target(url, lambda: _put_prefill(cluster, in_service=True), pid)
        if HYBRID in bench.others:
            targets[HYBRID] = Target(url, lambda: _put_prefill(cluster, in_service=False), pid)
        if RESUME in bench.others:
            own = dataclasses.replace(bench.serve, model=model, more_flags=(*bench.serve.more_flags, *LASTING))
            other = await stack.enter_async_context(own_cluster(own))
            targets[RESUME] = Target(other.launch.url, _nothing, other.pid_of("scheduler"))
        if VLLM in bench.others:
            try:
                address = await stack.enter_async_context(_vllm(bench, model, folder))
            except PdClusterError as error:
                print(f"note: {error}", flush=True)
            else:
                targets[VLLM] = Target(address, _nothing)
        yield targets


async def _nothing() -> None: ...


async def _put_prefill(cluster: Cluster, in_service: bool) -> None:
    """Drains the prefill instances, or takes them into service again, and waits for it. Raises PdClusterError."""
    admin = Admin(cluster.launch.admin_url, str(cluster.admin_token_file))
    names = cluster.launch.worker_names[: cluster.launch.num_prefill]
    for name in names:
        command, body = ("undrain", {}) if in_service else ("drain", {"force": True})
        response = await admin.ask(f"/instances/{name}/{command}", body)
        if response.status_code != 200:
            raise PdClusterError(f"{name}: {response.text[:200]}")
    deadline_s = time.monotonic() + MARGIN_S
    while not all(map(_is_in if in_service else is_drained, await _entries(admin, names))):
        if time.monotonic() > deadline_s:
            raise PdClusterError(f"{', '.join(names)}: not {'in service' if in_service else 'drained'} in time")
        await asyncio.sleep(POLL_S)


async def _entries(admin: Admin, names: Sequence[str]) -> list[dict[str, Any]]:
    return [entry for entry in await fetch_instances(admin) if entry["instance_id"] in names]


def _is_in(entry: dict[str, Any]) -> bool:
    return bool(entry["state"] == "ready" and entry["service"] == "in")


@contextlib.asynccontextmanager
async def _vllm(bench: AgainstBench, model: str, folder: Path) -> AsyncIterator[str]:
    """Yields the address of vLLM's server. Raises PdClusterError if it is not there or does not start."""
    peer, serve = PEERS[VLLM], bench.serve
    if not peer.is_there(bench.peers_dir):
        raise ConfigError(f"{VLLM} is not in {bench.peers_dir}; set it up with: sh scripts/setup_bench_peers.sh FOLDER")
    place = folder / VLLM
    place.mkdir()
    (place / "model").symlink_to(Path(model).absolute())
    spec = Spec(
        model=str(place / "model"),
        python=peer.python(bench.peers_dir),
        num_threads=len(os.sched_getaffinity(0)),
        batch_size=serve.concurrency,
        warmup=Workload(name="", prompts=[], output_lens=[]),
    )
    port, log = free_port_pair(), place / "log"
    print("starting vLLM's server …", flush=True)
    started_s = time.monotonic()
    with log.open("wb") as output:
        server = subprocess.Popen(
            vllm_server.command(spec, port),
            env=vllm_server.environment(spec),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            try:
                await vllm_server.wait_ready(client, server)
            except RuntimeError as error:
                raise GenerationError(f"{error}; its last lines:\n{last_lines(log)}") from None
        print(f"ready after {time.monotonic() - started_s:.1f} s", flush=True)
        yield url
    finally:
        await asyncio.to_thread(end_group, server)


# ---- rounds


async def _rounds(bench: AgainstBench, targets: Mapping[str, Target], folder: Path) -> AsyncIterator[Round]:
    """Asks every target in each round; another one is the first each time."""
    names = list(targets)
    async with make_client(bench.serve.concurrency) as client:
        for at in range(bench.rounds):
            steady = await asyncio.to_thread(_steady, folder, 1.0 if bench.quick else STEADY_S)
            print(f"round {at + 1} of {bench.rounds}: constant work: {steady}", file=sys.stderr, flush=True)
            found: dict[str, Run] = {}
            for name in names[at % len(names) :] + names[: at % len(names)]:
                await targets[name].prepare()
                found[name] = await _ask(bench.serve, client, targets[name], name)
                print(f"round {at + 1} of {bench.rounds}: {name}: {found[name]}", file=sys.stderr, flush=True)
            yield Round(found, steady)


def _steady(folder: Path, seconds: float) -> Steady:
    """Raises GenerationError."""
    result = folder / "steady.json"
    command = [sys.executable, "-m", "benchmarks.peers.steady", str(result), str(seconds)]
    run_child(command, folder / "steady.log", STEADY_DEADLINE_S, 1)
    figures = msgspec.json.decode(result.read_bytes(), type=PeerResult).figures
    return Steady(figures["mean_ms"], figures["p99_ms"])


async def _ask(serve: ServeBench, client: httpx.AsyncClient, target: Target, name: str) -> Run:
    url, pid = target.url, target.scheduler_pid
    model, max_model_len = await ask_model(client, url)
    check_shape(serve, max_model_len)
    bodies = make_bodies(serve, model, serve.concurrency + serve.num_requests)
    await send_all(client, url, bodies[: serve.concurrency], serve.concurrency, f"{name}, warming up")
    started_s, before_s = time.monotonic(), cpu_s(pid) if pid else 0.0
    samples = await send_all(client, url, bodies[serve.concurrency :], serve.concurrency, name)
    return Run.of(samples, time.monotonic() - started_s, cpu_s(pid) - before_s if pid else 0.0)


# ---- figures


def results(rounds: Sequence[Round]) -> Iterator[Result]:
    """Yields medians over the rounds; ratios are those within a round."""
    names = list(rounds[0].runs)
    for name in names:
        runs = [each.runs[name] for each in rounds]
        yield _figure(f"{name}: output tokens", [each.tokens for each in runs], "tokens/s", is_rate=True)
        yield _figure(f"{name}: mean TTFT", [each.ttft for each in runs], "ms")
        yield _figure(f"{name}: mean between tokens", [each.itl for each in runs], "ms")
        yield _figure(f"{name}: p99 between tokens", [each.itl_p99 for each in runs], "ms")
        yield _figure(f"{name}: before token two, p50", [each.second for each in runs], "ms")
        yield _figure(
            f"{name}: p99 / mean between tokens",
            [each.itl_p99 / each.itl for each in runs],
            "times",
            goal=MOST_P99 if name == SPLIT else None,
        )
    yield _figure("constant work: mean of a pass", [each.steady.mean for each in rounds], "ms")
    yield _figure("constant work: p99 / mean", [each.steady.p99 / each.steady.mean for each in rounds], "times")
    for name in [name for name in names if name != SPLIT]:
        pairs = [(each.runs[SPLIT], each.runs[name]) for each in rounds]
        faster = [split.tokens / other.tokens for split, other in pairs]
        sooner = [other.ttft / split.ttft for split, other in pairs]
        yield _figure(f"split / {name}: output tokens", faster, "times", GOALS.get((name, "tokens")), is_rate=True)
        yield _figure(f"{name} / split: mean TTFT", sooner, "times", GOALS.get((name, "ttft")), is_rate=True)
        if all(split.cpu_us and other.cpu_us for split, other in pairs):
            costs = [other.cpu_us / split.cpu_us for split, other in pairs]
            yield _figure(f"{name} / split: scheduler's CPU a token", costs, "times")


def _figure(name: str, values: Sequence[float], unit: str, goal: float | None = None, is_rate: bool = False) -> Result:
    return Result(
        name=name,
        value=median(values),
        unit=unit,
        better="higher" if is_rate else "lower",
        samples=len(values),
        spread=spread(values),
        goal=goal,
    )
