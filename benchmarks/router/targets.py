"""Targets of `benchmarks router`: this project's scheduler or another router, each in front of made-up workers.

Starts and ends the processes; knows nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from benchmarks.child import ChildFailed, child_environment, end_group, last_lines
from benchmarks.router.spec import TEXT, MadeUpWorker, WorkersSpec
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.cluster.members.credentials import credentials_of
from pd_cluster.cluster.members.place import find_place
from pd_cluster.cluster.processes.launch import Launch
from pd_cluster.cluster.processes.launcher import Member, plan_cluster
from pd_cluster.cluster.processes.ports import free_port_row, free_ports
from pd_cluster.cluster.routing.timeline import MAX_REQUESTS
from pd_cluster.settings.engine import SHIPPED_MODEL
from pd_cluster.settings.processes import KeyFiles
from pd_cluster.text.tokenizer import Tokenizer
from pd_cluster.types import Role

NUM_PREFILL = NUM_DECODE = 2
MODEL_NAME = "made-up"
START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0
POLL_S = 0.05
SAMPLED = "benchmarks.peers.sampled"
SGLANG_ROUTER = "sglang-router"  # also its environment's name


@dataclass(frozen=True, slots=True)
class Target:
    """A running router. `pid` is its process; `times_file` exists after its workers have ended.

    `admin_url`: the address that reports its addition to the last requests' TTFT; "" if there is none.
    """

    port: int
    pid: int
    times_file: Path
    admin_url: str = ""
    workers_pid: int = 0
    others: tuple[tuple[int, int], ...] = ()  # ports and pids of further schedulers

    def added_ttft_ms(self, num_requests: int) -> list[float]:
        """Returns the additions of at most this many of the last requests, by time stamps inside the router."""
        if not self.admin_url:
            return []
        answer = httpx.get(
            f"{self.admin_url}/requests?limit={min(num_requests, MAX_REQUESTS)}", timeout=10, trust_env=False
        ).json()
        return [request["added_ttft_ms"] for request in answer["requests"] if request["status"] == "finished"]

    def times_s(self) -> dict[int, tuple[float, float]]:
        """Returns a request's seed -> when a worker read its prompt, and when its first token was sent."""
        return msgspec.json.decode(self.times_file.read_bytes(), type=dict[int, tuple[float, float]])


@dataclass(frozen=True, slots=True)
class Pace:
    """Each made-up worker's speed, by the clock."""

    prefill_tokens_per_s: float
    max_num_seqs: int


def made_up_launch(num_schedulers: int = 1) -> Launch:
    """Returns the usual launch: only its schedulers are started."""
    return Launch(
        num_prefill=NUM_PREFILL,
        num_decode=NUM_DECODE,
        num_schedulers=num_schedulers,
        port=free_port_row(2 * num_schedulers),
        served_model_names=[MODEL_NAME],
    )


@contextlib.contextmanager
def own_scheduler(
    folder: Path,
    step_s: float,
    launch: Launch | None = None,
    pace: Pace | None = None,
    profile: Path | None = None,
    checkout: Path | None = None,
) -> Iterator[Target]:
    """Starts `pd-cluster serve` as the launcher does. Raises ChildFailed.

    `profile`: the file that its CPU time by place is written to. `checkout`: another version, whose scheduler it is.
    """
    launch = launch or made_up_launch()
    plan = plan_cluster(launch, folder)
    members = [member for member in plan if not member.is_scheduler]
    scheduler, *others = [member for member in plan if member.is_scheduler]
    place = find_place(scheduler.env)
    checkpoint = Checkpoint.open(str(SHIPPED_MODEL))
    workers = [
        MadeUpWorker(
            name=member.name,
            role=_role(member.name),
            port=member.port,
            device_ids=[device.device_id for device in server.device],
        )
        for member, server in zip(members, place.table.instances, strict=True)
    ]
    spec = WorkersSpec(
        workers=workers,
        times_file=str(folder / "times.json"),
        step_s=step_s,
        token_ids=Tokenizer(checkpoint.path).encode(TEXT, add_special_tokens=False),
        text=TEXT,
        model_path=str(SHIPPED_MODEL),
        credentials=msgspec.structs.replace(credentials_of(place, KeyFiles()), key=b""),
        model_identity=checkpoint.identity,
        max_model_len=checkpoint.max_model_len(None),
    )
    if pace is not None:
        spec = msgspec.structs.replace(
            spec,
            prefill_tokens_per_s=pace.prefill_tokens_per_s,
            max_num_seqs=pace.max_num_seqs,
            prefill_step_s=step_s / 2,
        )
    command = list(scheduler.command)
    if profile is not None:
        command[command.index("-m") + 1 : command.index("serve")] = [SAMPLED, str(profile)]
    with (
        _made_up_workers("router_workers" if pace is None else "paced_workers", spec, folder) as workers_pid,
        _process(command, scheduler.env, folder / "scheduler.log", checkout) as process,
        contextlib.ExitStack() as running,
    ):
        pids = []
        for other, url in zip(others, launch.urls[1:], strict=True):
            log = folder / f"{other.name}.log"
            pids.append((other.port, _start_beside(running, other, log, checkout, url).pid))
        _await_answer(f"{launch.url}/health", process, folder / "scheduler.log", all_ok=True)
        yield Target(launch.port, process.pid, Path(spec.times_file), launch.admin_url, workers_pid, tuple(pids))


def _start_beside(
    running: contextlib.ExitStack, member: Member, log: Path, checkout: Path | None, url: str
) -> subprocess.Popen[bytes]:
    """Starts a further scheduler, and waits until it serves."""
    process = running.enter_context(_process(member.command, member.env, log, checkout))
    _await_answer(f"{url}/health", process, log, all_ok=True)
    return process


@contextlib.contextmanager
def sglang_router(folder: Path, step_s: float, python: Path) -> Iterator[Target]:
    """Starts sglang-router between HTTP workers, prefill and decode apart. Raises ChildFailed."""
    port, metrics_port, *ports = free_ports(2 + NUM_PREFILL + NUM_DECODE)
    names = [f"prefill-{i}" for i in range(NUM_PREFILL)] + [f"decode-{i}" for i in range(NUM_DECODE)]
    workers = [
        MadeUpWorker(name=name, role=_role(name), port=each, device_ids=[])
        for name, each in zip(names, ports, strict=True)
    ]
    spec = WorkersSpec(
        workers=workers,
        times_file=str(folder / "times.json"),
        step_s=step_s,
        token_ids=[],
        text=TEXT,
        model_path=str(SHIPPED_MODEL),
    )
    command = [str(python), "-m", "sglang_router.launch_router", "--pd-disaggregation", "--policy", "round_robin"]
    for worker in workers:
        command += [f"--{worker.role}", f"http://127.0.0.1:{worker.port}"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    command += ["--max-concurrent-requests", "-1", "--log-level", "warn"]
    with (
        _made_up_workers("sglang_workers", spec, folder),
        _process(command, {}, folder / "sglang-router.log") as process,
    ):
        _await_answer(f"http://127.0.0.1:{port}/readiness", process, folder / "sglang-router.log")
        yield Target(port, process.pid, Path(spec.times_file))


def _role(name: str) -> Role:
    return "prefill" if name.startswith("prefill") else "decode"


@contextlib.contextmanager
def _made_up_workers(module: str, spec: WorkersSpec, folder: Path) -> Iterator[int]:
    """Yields their process's id. It ends with its standard input, and so with this process."""
    spec_file = folder / f"{module}.spec.json"
    spec_file.touch(mode=0o600)
    spec_file.write_bytes(msgspec.json.encode(spec))
    command = [sys.executable, "-m", f"benchmarks.peers.{module}", str(spec_file)]
    with _process(command, {}, folder / f"{module}.log") as process:
        yield process.pid
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"{module} did not end within {END_TIMEOUT_S:g} s") from None


@contextlib.contextmanager
def _process(
    command: Sequence[str], env: Mapping[str, str], log: Path, folder: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`folder`: where Python looks for modules first."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**child_environment(1), **env},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end_group(process)
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()


def _await_answer(url: str, process: subprocess.Popen[bytes], log: Path, all_ok: bool = False) -> None:
    """Waits for an answer with 200, with `all_ok` as {"status": "ok"}. Raises ChildFailed."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    with httpx.Client(timeout=5, trust_env=False) as client:
        while process.poll() is None and time.monotonic() < deadline_s:
            with contextlib.suppress(httpx.HTTPError):
                answer = client.get(url)
                if answer.status_code == 200 and (not all_ok or answer.json()["status"] == "ok"):
                    return
            time.sleep(POLL_S)
    how = f"ended with code {process.returncode}" if process.returncode is not None else "did not get ready"
    raise ChildFailed(f"{os.path.basename(str(log))}: {how}; its last lines:\n{last_lines(log)}")
