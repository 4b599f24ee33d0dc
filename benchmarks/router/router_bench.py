"""`python -m benchmarks router`: measures the costs of a token, a request and an open stream at the public port.

The real scheduler, started as the launcher starts it, serves in front of simulated workers that use its protocol and
compute nothing. CPU time is read from the kernel, so the load generator affects the scheduler only by the cores that it
uses. Two loads, one of many tokens and one of many requests, separate the costs of both. Then a load that takes 80 % of
a core shows the time that the scheduler adds to TTFT.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.child_process import ChildFailed, run_module, sigterm_raises
from benchmarks.figures import begin, finish, result
from benchmarks.process_use import raise_open_files
from benchmarks.router.router_messages import STEP_S, LoadResult, LoadSpec, RouterLoad
from benchmarks.router.scheduler_target import MODEL_NAME, Target, own_scheduler
from pd_cluster.errors import ConfigError, GenerationError
from pd_cluster.result_tables import Report, Result, counted

PACED_LOAD = 0.8  # share of a core
HELD_STEP_S = 2.0  # long, so that there are few tokens while the memory of open streams is measured
LEAST_COST_S = 1e-4  # minimum cost per request in the paced load, so that a noisy fit cannot make its rate unlimited
DEADLINE_S = 120.0
OTHER_FILES = 200  # files that a scheduler has open besides its streams
MOST_CPU_TOKEN_US, MOST_CPU_REQUEST_MS, MOST_ADDED_TTFT_MS, MOST_STREAM_KIB = 50.0, 1.25, 10.0, 40.0


@dataclass(frozen=True, slots=True)
class Cost:
    """The scheduler's CPU seconds per token and per request."""

    token_s: float
    request_s: float


@dataclass(slots=True)
class RouterFigures:
    """`costs`: the costs in each round. `inside_ms`: the time added to TTFT, by the scheduler's own time stamps."""

    costs: list[Cost] = field(default_factory=list)
    paced: tuple[RouterLoad, LoadResult] | None = None
    held: LoadResult | None = None
    num_held: int = 0
    inside_ms: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Bench:
    """One run of the command, in a separate folder."""

    rounds: int
    streams: int
    quick: bool
    folder: Path
    _next_seed: int = 1
    _num_errors: int = 0

    def request_load(self, name: str, num_requests: int, quick: int, num_tokens: int, num_open: int) -> RouterLoad:
        num_requests = quick if self.quick else num_requests
        num_open = min(num_open, num_requests)
        return RouterLoad(name=name, num_requests=num_requests, num_tokens=num_tokens, num_open=num_open)

    def paced(self, costs: list[Cost]) -> RouterLoad:
        """Returns a load whose rate takes PACED_LOAD of a core if the measured costs are right."""
        load = self.request_load("paced", 2000, 50, 64, 0)
        request_s = median(each.request_s for each in costs) + 64 * median(each.token_s for each in costs)
        rate_per_s = 50.0 if self.quick else PACED_LOAD / max(LEAST_COST_S, request_s)
        return msgspec.structs.replace(load, rate_per_s=rate_per_s)

    def measure(self) -> RouterFigures:
        found = RouterFigures()
        many, few = self.request_load("many tokens", 256, 16, 256, 128), self.request_load("few", 2000, 100, 2, 16)
        with own_scheduler(self.folder, STEP_S) as target:
            self.load(target, self.request_load("warm-up", 64, 8, 16, 8))
            for _ in range(self.rounds):
                found.costs.append(fit(many, self.load(target, many).cpu_s, few, self.load(target, few).cpu_s))
            paced = self.paced(found.costs)
            found.paced = paced, self.load(target, paced)
            found.inside_ms = target.added_ttft_ms(paced.num_requests)
        with own_scheduler(self.folder, HELD_STEP_S) as target:
            self.load(target, self.request_load("fill-up", 1200, 10, 1, 8))  # fills the record of last requests
            shape = self.request_load("held", self.streams, self.streams, 64, self.streams)
            found.held = self.load(target, msgspec.structs.replace(shape, is_held=True))
            found.num_held = self.streams
        return found

    def in_turn(self, checkout: Path) -> tuple[list[float], list[float]]:
        """Returns the CPU seconds of a request of two tokens in each round, here and in another checkout."""
        load = self.request_load("in turn", 500, 20, 2, 16)  # short, so that other programs disturb both alike
        found: list[list[float]] = [[], []]
        with contextlib.ExitStack() as running:
            targets = []
            for at, place in enumerate((None, checkout)):
                (folder := self.folder / str(at)).mkdir()
                targets.append(running.enter_context(own_scheduler(folder, STEP_S, checkout=place)))
                self.load(targets[at], self.request_load("warm-up", 64, 8, 16, 8))
            for number in range(self.rounds):
                for at in (0, 1) if number % 2 == 0 else (1, 0):
                    found[at].append(self.load(targets[at], load).cpu_s / load.num_requests)
        return found[0], found[1]

    def load(self, target: Target, shape: RouterLoad) -> LoadResult:
        """Sends the load. Raises ChildFailed if none of its requests was answered."""
        spec = LoadSpec(target.port, target.pid, MODEL_NAME, shape, self._next_seed, DEADLINE_S)
        self._next_seed += shape.num_requests
        result_file = run_module("router_load", spec, self.folder / "load", DEADLINE_S + 30, 1)
        found = msgspec.json.decode(result_file.read_bytes(), type=LoadResult)
        if found.errors and not found.num_done:
            raise ChildFailed(f"{shape.name}: {found.errors[0]}")
        self._num_errors += len(found.errors)
        for error in found.errors[:3]:
            print(f"{shape.name}: {error}", file=sys.stderr)
        print(
            f"{shape.name}: {found.num_done} requests in {found.took_s:.1f} s, scheduler {found.cpu_s:.2f} s of CPU, "
            f"load {found.own_cpu_s:.2f} s",
            flush=True,
        )
        return found

    def check(self) -> None:
        """Raises GenerationError if any request failed."""
        if self._num_errors:
            raise GenerationError(f"{self._num_errors} requests failed; the first ones are above")


def fit(many: RouterLoad, many_s: float, few: RouterLoad, few_s: float) -> Cost:
    """Solves two loads of different shapes as equations: num_tokens * a + num_requests * b = CPU time."""
    t1, r1 = many.num_requests * many.num_tokens, many.num_requests
    t2, r2 = few.num_requests * few.num_tokens, few.num_requests
    determinant = t1 * r2 - t2 * r1
    return Cost((many_s * r2 - few_s * r1) / determinant, (t1 * few_s - t2 * many_s) / determinant)


def run(rounds: int, streams: int, against: str, quick: bool, json: str) -> None:
    """`against`: another checkout. Raises PdClusterError if a scheduler does not start, and for failed requests."""
    begin(json)
    if quick:
        rounds, streams = 1, min(streams, 50)
    checkout = Path(against).expanduser().absolute() if against else None
    if checkout is not None and not (checkout / "pd_cluster" / "__main__.py").is_file():
        raise ConfigError(f"--against {against}: no checkout of this project is there")
    raise_open_files(streams + OTHER_FILES)  # child processes inherit the limit
    command = f"python -m benchmarks router --rounds {rounds}{' --quick' * quick}"
    with sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        bench = Bench(rounds, streams, quick, Path(folder))
        if checkout is not None:
            command += " --against FOLDER"
            found, title = [*compared(*bench.in_turn(checkout))], "CPU time of a request of two tokens"
        else:
            command += f" --streams {streams}"
            found = [*results(bench.measure())]
            title = f"the scheduler with simulated workers, a step every {1e3 * STEP_S:g} ms"
    finish(Report(command, found), title, json, quick)
    bench.check()


def results(found: RouterFigures) -> Iterator[Result]:
    yield result("cpu_per_token", [1e6 * each.token_s for each in found.costs], "us", goal=MOST_CPU_TOKEN_US)
    yield result("cpu_per_request", [1e3 * each.request_s for each in found.costs], "ms", goal=MOST_CPU_REQUEST_MS)
    if found.paced is not None:
        load, told = found.paced
        yield result("requests_per_s", [load.rate_per_s], "requests/s", "higher")
        yield result("cpu_then", [100 * told.cpu_s / told.took_s], "% of a core")
        yield result("added_ttft_p50", found.inside_ms, "ms")
        yield result("added_ttft_p99", found.inside_ms, "ms", goal=MOST_ADDED_TTFT_MS, at=99)
        yield result("waited_for_cpu", [100 * told.waited_s / told.took_s], "% of the time")
        yield result("gap_p99", [1e3 * gap_s for gap_s in told.gaps_s], "ms", at=99)
        yield counted("errors", len(told.errors), "requests", 0)
    if found.held is not None:
        grown_kib = (found.held.rss_after_nbytes - found.held.rss_before_nbytes) / 1024
        yield result("memory_per_stream", [grown_kib / found.num_held], "KiB", goal=MOST_STREAM_KIB)


def compared(ours_s: list[float], theirs_s: list[float]) -> Iterator[Result]:
    """Yields the results. Other work on the machine has disturbed the shortest times the least."""
    ratios = [mine / other for mine, other in zip(ours_s, theirs_s, strict=True)]
    yield result("here, least", [1e3 * each for each in ours_s], "ms", at=0)
    yield result("the other, least", [1e3 * each for each in theirs_s], "ms", at=0)
    yield result("ratio of the least", [min(ours_s) / min(theirs_s)], "x")
    yield result("ratio of a round, median", ratios, "x")
