"""`python -m benchmarks start`: measures how long a cluster's start and a worker's restart take, in units of `import
torch`.

Each round directly follows its own `python -c "import torch"`, so that ratios are valid even if the machine's speed
drifts. `pd-cluster up`, with the shipped model, is started by its command line; only its processes receive signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.faults.faulted_cluster import is_whole
from benchmarks.figures import begin, finish, result
from benchmarks.process_use import mapped_kib
from pd_cluster.bench.process_times import family
from pd_cluster.cluster.processes.port_reservations import free_port_pair
from pd_cluster.errors import GenerationError
from pd_cluster.result_tables import Report, Result

READY_TIMEOUT_S = 120.0
END_TIMEOUT_S = 30.0
POLL_S = 0.01
WAYS = {"forked ranks": (), "spawned ranks": ("--spawn",)}
UP_GOAL, WORKER_GOAL_S, RANK_GOAL_S = 2.0, 4.0, 3.0

Figures = dict[str, float]


@dataclass(slots=True)
class Up:
    """A running `pd-cluster up`. `ready_s`: the time from its start until it reports that it is ready."""

    process: subprocess.Popen[str]
    admin_url: str
    ready_s: float
    client: httpx.Client = field(default_factory=lambda: httpx.Client(trust_env=False, timeout=5))

    def instances(self) -> list[dict[str, Any]]:
        """Returns the entries; empty while there is no answer."""
        with contextlib.suppress(httpx.HTTPError):
            found: list[dict[str, Any]] = self.client.get(f"{self.admin_url}/instances").json()["instances"]
            return found
        return []

    def back_s(self, name: str, victim: Callable[[dict[str, Any]], int]) -> float:
        """Kills a process of an instance. Returns the time until the instance has restarted and every link is up."""
        (entry,) = (each for each in self.instances() if each["instance_id"] == name)
        started_s = time.monotonic()
        os.kill(victim(entry), signal.SIGKILL)
        while True:
            entries = self.instances()
            new = [each for each in entries if each["instance_id"] == name and each["epoch"] != entry["epoch"]]
            if new and is_whole(entries):
                return time.monotonic() - started_s
            if time.monotonic() - started_s > READY_TIMEOUT_S:
                raise GenerationError(f"{name} was not back within {READY_TIMEOUT_S:g} s")
            time.sleep(POLL_S)

    def pss_mib(self) -> float:
        """Returns the memory of all processes. Shared pages count once."""
        return sum(mapped_kib(pid, "Pss") for pid in family(self.process.pid)) / 1024


@contextlib.contextmanager
def up(*flags: str) -> Iterator[Up]:
    """Yields the cluster. Raises GenerationError if it is not ready in time."""
    port = free_port_pair()
    command = [sys.executable, "-m", "pd_cluster", "up", f"--port={port}", *flags]
    started_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        _await_ready(process)
        yield Up(process, f"http://127.0.0.1:{port + 1}", time.monotonic() - started_s)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _await_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    lines: list[str] = []
    timer = threading.Timer(READY_TIMEOUT_S, process.kill)  # ends the output, for which the loop below waits
    timer.start()
    try:
        for line in process.stdout:
            if line.startswith("ready after"):
                return
            lines.append(line.rstrip())
    finally:
        timer.cancel()
    raise GenerationError("pd-cluster up was not ready: " + " / ".join(lines[-3:]))


def import_torch_s() -> float:
    started_s = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=READY_TIMEOUT_S)
    return time.monotonic() - started_s


def measure_round(with_memory: bool) -> Figures:
    found: Figures = {}
    for way, flags in WAYS.items():
        torch_s = import_torch_s()
        with up(*flags) as running:
            found[f"up, {way}"] = running.ready_s
            found[f"up / import torch, {way}"] = running.ready_s / torch_s
            found[f"killed worker back, {way}"] = running.back_s("decode-0", lambda entry: int(entry["pid"]))
            found[f"killed rank back, {way}"] = running.back_s("decode-0", lambda entry: int(entry["rank_pids"][0]))
        found.setdefault("import torch", torch_s)
        if with_memory:
            with up("--prefill=2", "--decode=2", *flags) as running:
                found[f"memory of 2 + 2, {way}"] = running.pss_mib()
    return found


def results(rounds: Sequence[Figures]) -> list[Result]:
    goals = {"up / import torch": UP_GOAL, "killed worker back": WORKER_GOAL_S, "killed rank back": RANK_GOAL_S}
    goals = {f"{name}, forked ranks": goal for name, goal in goals.items()}
    found = []
    for name in rounds[0]:
        unit = "MiB" if name.startswith("memory") else "x" if " / " in name else "s"
        found.append(result(name, [each[name] for each in rounds if name in each], unit, goal=goals.get(name)))
    return found


def run(rounds: int, json: str) -> None:
    begin(json)
    found = []
    for at in range(rounds):
        found.append(measure_round(with_memory=not at))
        print(f"round {at + 1} of {rounds}", flush=True)
    finish(Report(f"python -m benchmarks start --rounds {rounds}", results(found)), "start-up", json)
