"""`router --dashboard`: what an open dashboard costs the scheduler, and the noting when none is open.

The same paced load runs with nobody looking and with a session that asks as the dashboard's page does, in turns, and so
does a scheduler without requests. CPU time is the scheduler's own, read from the kernel.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.child import sigterm_raises
from benchmarks.processes import cpu_s, raise_open_files
from benchmarks.router.bench import RouterBench, Session
from benchmarks.router.figures import OURS, Measured
from benchmarks.router.spec import STEP_S, Workload
from benchmarks.router.targets import Target, own_scheduler
from pd_cluster.tables import Report, Result, check_writable
from ranktable_tools.keys import ADMIN_TOKEN_FILE

PERIOD_S = 0.5  # the page's
MOST_SHARE = 1.03  # the rule for what is seldom looked at
RATE_PER_S = 60.0


@dataclass(slots=True)
class Costs:
    """Seconds of the scheduler's CPU, by round: of the load, and of each second without one."""

    load: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)


def run(bench: RouterBench, json_path: str = "") -> None:
    """Measures, prints, writes. Raises PdClusterError."""
    check_writable(json_path)
    raise_open_files()
    num_requests, rest_s = (20, 0.5) if bench.quick else (600, 5.0)
    load = Workload(name="paced", num_requests=num_requests, num_tokens=64, num_open=0, rate_per_s=RATE_PER_S)
    closed, opened = Costs(), Costs()
    with (
        sigterm_raises(),
        tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder,
        own_scheduler(Path(folder), STEP_S) as target,
    ):
        token_file = Path(folder) / ADMIN_TOKEN_FILE
        session, measured = Session(bench, Path(folder)), Measured(OURS)
        session.load(measured, target, bench.warm_up)
        for _ in range(bench.rounds):
            for costs in (closed, opened):
                with contextlib.nullcontext() if costs is closed else looking(target, token_file):
                    costs.load.append(session.load(measured, target, load)[1].cpu_s)
                    before_s = cpu_s(target.pid)
                    time.sleep(rest_s)
                    costs.rest.append((cpu_s(target.pid) - before_s) / rest_s)
    report = Report(f"{bench.command} --dashboard", _results(closed, opened, num_requests))
    report.show(f"{num_requests} requests of 64 tokens, {RATE_PER_S:g} a second; least of {bench.rounds} rounds")
    if json_path:
        report.write(json_path)


@contextlib.contextmanager
def looking(target: Target, token_file: Path) -> Iterator[None]:
    """Begins a session by a link, and asks for the overview as the dashboard's page does, until the end."""
    over = threading.Event()

    def look() -> None:
        since, mark = "", 0
        with httpx.Client(base_url=target.admin_url, trust_env=False, timeout=10) as client:
            token = {"Authorization": f"Bearer {token_file.read_text().strip()}"}
            code = client.post("/dashboard/codes", headers=token).json()["code"]
            client.post("/dashboard/api/session", json={"code": code}, headers={"Origin": target.admin_url})
            while not over.is_set():
                found = client.get(f"/dashboard/api/overview?since_mark={mark}{since}").json()
                since = f"&since={found['samples'][-1]['at_s']}" if found["samples"] else since
                mark = found["marks"][-1]["number"] if found["marks"] else mark
                over.wait(PERIOD_S)

    page = threading.Thread(target=look, daemon=True)
    page.start()
    try:
        yield
    finally:
        over.set()
        page.join()


def _results(closed: Costs, opened: Costs, num_requests: int) -> list[Result]:
    rounds = len(closed.load)
    each = [
        ("request, nobody looks", 1e6 * min(closed.load) / num_requests, "µs"),
        ("request, one dashboard open", 1e6 * min(opened.load) / num_requests, "µs"),
        ("second at rest, nobody looks", 1e3 * min(closed.rest), "ms"),
        ("second at rest, one dashboard open", 1e3 * min(opened.rest), "ms"),
    ]
    found = [
        Result(name=f"cpu of a {name}", value=value, unit=unit, better="lower", samples=rounds)
        for name, value, unit in each
    ]
    ratio, name = min(opened.load) / min(closed.load), "requests, open to closed"
    return [*found, Result(name=name, value=ratio, unit="x", better="lower", samples=rounds, goal=MOST_SHARE)]
