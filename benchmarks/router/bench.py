"""`router`: what a streamed token, a request and an open stream cost the process at the public port.

The real scheduler, started as the launcher starts it, serves in front of made-up workers that speak its protocol and
compute nothing; sglang-router, if installed, in front of made-up HTTP workers, with the same load. CPU time is the
router's own, read from the kernel, so the load generator costs it only its cores. Two shapes of load, many tokens and
many requests, separate the two costs; then a load that takes 80 % of a core shows the addition to TTFT.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.child import ChildFailed, run_child, sigterm_raises
from benchmarks.processes import check_open_files, raise_open_files
from benchmarks.router import compared, profile, shared
from benchmarks.router.figures import OURS, Cost, Loaded, Measured, fit, results
from benchmarks.router.spec import STEP_S, LoadResult, LoadSpec, Profile, Workload
from benchmarks.router.targets import (
    MODEL_NAME,
    SGLANG_ROUTER,
    Target,
    made_up_launch,
    own_scheduler,
    sglang_router,
)
from pd_cluster.cluster.processes.launch import LASTING_STREAMS
from pd_cluster.errors import ConfigError, GenerationError
from pd_cluster.tables import Report, check_writable

DEFAULT_PEERS_DIR = Path(__file__).parents[3] / ".venv-peers"
PACED_LOAD = 0.8  # of a core
HELD_STEP_S = 2.0  # few tokens, since the memory of an open stream counts
LEAST_COST_S = 1e-4  # per request in the paced load: a fit to noise must not ask for any number of them
DEADLINE_S = 120.0
RESUME = "resume"  # of `--against`
OTHER_FILES = 200  # that a router has open besides its streams
TargetContext = Callable[[Path, float], contextlib.AbstractContextManager[Target]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterBench:
    """The command's parameters."""

    rounds: int = 3
    streams: int = 4000
    peers_dir: Path = DEFAULT_PEERS_DIR
    quick: bool = False
    against: Path | None = None
    has_profile: bool = False
    num_schedulers: int = 1
    resumes: bool = False

    @property
    def command(self) -> str:
        return f"python -m benchmarks router --rounds {self.rounds} --streams {self.streams}" + " --quick" * self.quick

    @property
    def sglang_python(self) -> Path:
        return self.peers_dir / SGLANG_ROUTER / "bin" / "python"

    @property
    def warm_up(self) -> Workload:
        return Workload(name="warm-up", num_requests=8 if self.quick else 64, num_tokens=16, num_open=8)

    @property
    def fill_up(self) -> Workload:
        """Returns a load that fills the router's record of its last requests, so that streams do not pay for it."""
        return Workload(name="fill-up", num_requests=10 if self.quick else 1200, num_tokens=1, num_open=8)

    @property
    def many_tokens(self) -> Workload:
        if self.quick:
            return Workload(name="many tokens", num_requests=16, num_tokens=40, num_open=16)
        return Workload(name="many tokens", num_requests=256, num_tokens=256, num_open=128)

    @property
    def few_tokens(self) -> Workload:
        return Workload(name="few tokens", num_requests=100 if self.quick else 2000, num_tokens=2, num_open=16)

    @property
    def alternating(self) -> Workload:
        """Returns the load that two versions get in turn: short, so that others on the machine disturb both alike."""
        return msgspec.structs.replace(self.few_tokens, name="in turn", num_requests=20 if self.quick else 500)

    @property
    def shared_requests(self) -> Workload:
        """Returns a load for several schedulers or one, of so many requests that each of several has work in a step."""
        number = 30 if self.quick else 1500
        return Workload(name="shared requests", num_requests=number, num_tokens=2, num_open=12 if self.quick else 48)

    @property
    def shared_tokens(self) -> Workload:
        """Returns the same of many tokens: schedulers pay for each message, and several have more of them."""
        number = 24 if self.quick else 768
        return Workload(
            name="shared tokens", num_requests=number, num_tokens=40 if self.quick else 128, num_open=number // 2
        )

    def paced(self, cost: Cost) -> Workload:
        """Returns a load whose rate takes PACED_LOAD of a core, if the cost is right."""
        num_requests = 50 if self.quick else 2000
        shape = Workload(name="paced", num_requests=num_requests, num_tokens=64, num_open=0)
        rate_per_s = 50.0 if self.quick else PACED_LOAD / max(LEAST_COST_S, cost.of(shape))
        return msgspec.structs.replace(shape, rate_per_s=rate_per_s)

    @property
    def held(self) -> Workload:
        return Workload(name="held", num_requests=self.streams, num_tokens=64, num_open=self.streams, hold=True)


def make_bench(
    rounds: int,
    streams: int,
    peers_dir: str,
    quick: bool,
    against: str = "",
    has_profile: bool = False,
    num_schedulers: int = 1,
) -> RouterBench:
    """Builds the bench from the command line. Raises ConfigError."""
    checkout = Path(against).expanduser().absolute() if against not in ("", RESUME) else None
    if checkout is not None and not (checkout / "pd_cluster" / "__main__.py").is_file():
        raise ConfigError(f"--against {against}: no checkout of this project is there")
    folder = Path(peers_dir).expanduser().absolute() if peers_dir else DEFAULT_PEERS_DIR
    if quick:
        rounds, streams = 1, min(streams, 50)
    check_open_files(streams + OTHER_FILES)
    return RouterBench(
        rounds=rounds,
        streams=streams,
        peers_dir=folder,
        quick=quick,
        against=checkout,
        has_profile=has_profile,
        num_schedulers=num_schedulers,
        resumes=against == RESUME,
    )


def run(bench: RouterBench, json_path: str = "") -> None:
    """Measures, prints, writes. Raises PdClusterError: a router that does not start, requests that failed."""
    check_writable(json_path)
    raise_open_files()  # the children inherit it
    if bench.num_schedulers > 1:
        _share(bench, json_path)
        return
    if bench.against is not None or bench.resumes or bench.has_profile:
        _look_closer(bench, json_path)
        return
    targets: dict[str, TargetContext] = {OURS: own_scheduler}
    if bench.sglang_python.exists():
        targets[SGLANG_ROUTER] = lambda folder, step_s: sglang_router(folder, step_s, bench.sglang_python)
    else:
        print(f"note: no {SGLANG_ROUTER} in {bench.peers_dir}: PEERS=sglang-router sh scripts/setup_bench_peers.sh")
    with sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        measured = Session(bench, Path(folder)).measure(targets)
    report = Report(bench.command, results(measured, with_goals=not bench.quick))
    report.show(f"a router before made-up workers, a step every {1e3 * STEP_S:g} ms")
    print(
        "note: waited_for_cpu is what the router lost to whatever else ran, the load included; added_ttft holds it, too"
    )
    print("note: this project's router tokenizes and detokenizes; sglang-router passes on what its workers send")
    if json_path:
        report.write(json_path)
    num_errors = sum(each.num_errors for each in measured)
    if num_errors:
        raise GenerationError(f"{num_errors} requests failed; the first ones are above")


def _look_closer(bench: RouterBench, json_path: str) -> None:
    """Compares two versions of the scheduler, or shows where its time goes, in place of the usual figures."""
    with sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        session = Session(bench, Path(folder))
        if bench.has_profile:
            for workload in (bench.few_tokens, bench.many_tokens):
                print("\n".join(profile.lines(session.profile(workload), workload)), flush=True)
        if bench.against is not None:
            ours_s, theirs_s = session.in_turn(partial(own_scheduler, checkout=bench.against), bench.alternating)
            command = f"python -m benchmarks router --against FOLDER --rounds {bench.rounds}" + " --quick" * bench.quick
            report = Report(command, compared.results(ours_s, theirs_s))
            report.show("this version's CPU time of a request of two tokens, beside the other's")
            if json_path:
                report.write(json_path)
        if bench.resumes:
            _compare_kept(bench, session, json_path)


def _compare_kept(bench: RouterBench, session: Session, json_path: str) -> None:
    """Compares a scheduler with one whose streams outlive it, by requests of few and of many tokens."""
    start = partial(own_scheduler, launch=replace(made_up_launch(), scheduler_variables=LASTING_STREAMS))
    found = []
    for workload in (bench.alternating, bench.many_tokens):
        without_s, with_s = session.in_turn(start, workload)
        prefix = f"{workload.num_tokens} tokens: "
        found += [replace(each, name=prefix + each.name) for each in compared.results(with_s, without_s)]
    report = Report(f"python -m benchmarks router --against {RESUME} --rounds {bench.rounds}", found)
    report.show("CPU time of a request whose stream outlives the scheduler, beside one whose stream does not")
    if json_path:
        report.write(json_path)


def _share(bench: RouterBench, json_path: str) -> None:
    """Compares several schedulers over the same workers with one, in turn, in place of the usual figures."""
    with sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        found = Session(bench, Path(folder)).shared(bench.num_schedulers)
    command = f"python -m benchmarks router --schedulers {bench.num_schedulers} --rounds {bench.rounds}"
    report = Report(command + " --quick" * bench.quick, shared.results(found, with_goals=not bench.quick))
    report.show(f"CPU time of {bench.num_schedulers} schedulers over the same workers, beside that of one")
    if json_path:
        report.write(json_path)


class Session:
    """One run of the command."""

    def __init__(self, bench: RouterBench, folder: Path) -> None:
        self._bench, self._folder = bench, folder
        self._next_seed = 1

    def measure(self, targets: dict[str, TargetContext]) -> list[Measured]:
        found: list[Measured] = []
        paced: Workload | None = None  # the first router's, which is ours
        for name, start in targets.items():
            measured = Measured(name)
            with start(self._folder, STEP_S) as target:
                self.load(measured, target, self._bench.warm_up)
                for _ in range(self._bench.rounds):
                    many = self.load(measured, target, self._bench.many_tokens)
                    few = self.load(measured, target, self._bench.few_tokens)
                    measured.costs.append(fit(many, few))
                paced = paced or self._bench.paced(measured.cost)
                measured.paced = self.load(measured, target, paced)
                measured.inside_ms = target.added_ttft_ms(paced.num_requests)
            measured.worker_times_s = target.times_s()
            with start(self._folder, HELD_STEP_S) as target:
                self.load(measured, target, self._bench.fill_up)
                measured.held = self.load(measured, target, self._bench.held)
            found.append(measured)
        return found

    def profile(self, workload: Workload) -> Profile:
        """Returns the CPU time by place of a scheduler of its own under this load."""
        path, measured = self._folder / "profile.json", Measured("profiled")
        with own_scheduler(self._folder, STEP_S, profile=path) as target:
            self.load(measured, target, self._bench.warm_up)
            os.kill(target.pid, signal.SIGUSR1)
            self.load(measured, target, workload)
        return profile.read(path)

    def in_turn(self, other: TargetContext, alternating: Workload) -> tuple[list[float], list[float]]:
        """Returns CPU seconds a request, of each round, of the usual scheduler and of another one."""
        starts: dict[str, TargetContext] = {OURS: own_scheduler, "the other": other}
        found: dict[str, list[float]] = {name: [] for name in starts}
        with contextlib.ExitStack() as running:
            targets = {}
            for name, start in starts.items():
                (folder := self._folder / f"{name}, {alternating.name}").mkdir()
                targets[name] = running.enter_context(start(folder, STEP_S))
            for name, target in targets.items():
                self.load(Measured(name), target, self._bench.warm_up)
            for at in range(self._bench.rounds):
                for name in sorted(targets, reverse=at % 2 == 1):
                    workload, result = self.load(Measured(name), targets[name], alternating)
                    found[name].append(result.cpu_s / workload.num_requests)
        return found[OURS], found["the other"]

    def shared(self, num_schedulers: int) -> list[shared.Compared]:
        """Returns CPU seconds of each load, of each round: of one scheduler, and of several together."""
        loads = [self._bench.shared_requests, self._bench.shared_tokens]
        found = [shared.Compared(load, {1: [], num_schedulers: []}) for load in loads]
        with contextlib.ExitStack() as running:
            targets = {}
            for number in (1, num_schedulers):
                (folder := self._folder / f"{number}").mkdir()
                launch = made_up_launch(number)
                targets[number] = running.enter_context(own_scheduler(folder, STEP_S, launch))
                self.load(Measured(f"{number}"), targets[number], self._bench.warm_up)
            for at in range(self._bench.rounds):
                for each in found:
                    for number in sorted(targets, reverse=at % 2 == 1):
                        name = f"{number} scheduler{'s' * (number > 1)}"
                        measured = Measured(name)
                        _, result = self.load(measured, targets[number], each.workload)
                        if measured.num_errors:
                            raise GenerationError(f"{measured.num_errors} requests failed; the first ones are above")
                        each.cpu_s[number].append(result.cpu_s)
        return found

    def load(self, measured: Measured, target: Target, workload: Workload) -> Loaded:
        spec_file, result_file = self._folder / "load.json", self._folder / "load.result.json"
        spec = LoadSpec(
            port=target.port,
            pid=target.pid,
            others=list(target.others),
            model=MODEL_NAME,
            workload=workload,
            first_seed=self._next_seed,
            deadline_s=DEADLINE_S,
        )
        self._next_seed += workload.num_requests
        spec_file.write_bytes(msgspec.json.encode(spec))
        command = [sys.executable, "-m", "benchmarks.peers.router_load", str(spec_file), str(result_file)]
        run_child(command, self._folder / "load.log", DEADLINE_S + 30, 1)
        result = msgspec.json.decode(result_file.read_bytes(), type=LoadResult)
        self._say(measured, workload, result)
        if result.errors and not result.num_done:
            raise ChildFailed(f"{measured.name}, {workload.name}: {result.errors[0]}")
        return workload, result

    def _say(self, measured: Measured, workload: Workload, result: LoadResult) -> None:
        measured.num_errors += len(result.errors)
        for error in result.errors[:3]:
            print(f"{measured.name}, {workload.name}: {error}", file=sys.stderr)
        rate = f"{result.num_done / result.took_s:.0f} requests/s, " if not workload.hold else ""
        print(
            f"{measured.name}, {workload.name}: {result.took_s:.1f} s, {rate}router {result.cpu_s:.2f} s of CPU, "
            f"load {result.own_cpu_s:.2f} s",
            flush=True,
        )
