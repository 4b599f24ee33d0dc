"""Starts and ends this project's scheduler in front of simulated workers. Knows nothing of the figures."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from benchmarks.child_process import ChildFailed, last_lines, running_child
from benchmarks.router.router_messages import TEXT, MadeUpWorker, WorkersSpec
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.cluster.members.cluster_credentials import credentials_of
from pd_cluster.cluster.members.rank_table_place import find_place
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.launcher import plan_cluster
from pd_cluster.cluster.processes.port_reservations import free_port_pair
from pd_cluster.cluster.records.request_timeline import MAX_REQUESTS
from pd_cluster.settings.engine_config import SHIPPED_MODEL
from pd_cluster.settings.process_settings import KeyFiles
from pd_cluster.text.tokenizer import Tokenizer

NUM_PREFILL = NUM_DECODE = 2
MODEL_NAME = "made-up"
START_TIMEOUT_S = 30.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Target:
    """A running scheduler, and the process of its workers."""

    port: int
    pid: int
    admin_url: str
    workers_pid: int

    def added_ttft_ms(self, num_requests: int) -> list[float]:
        """Returns the times added to at most this many last requests' TTFT, by time stamps in the scheduler."""
        limit = min(num_requests, MAX_REQUESTS)
        answer = httpx.get(f"{self.admin_url}/requests?limit={limit}", timeout=10, trust_env=False).json()
        return [request["added_ttft_ms"] for request in answer["requests"] if request["status"] == "finished"]


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """The speed of each simulated worker, by the clock."""

    prefill_tokens_per_s: float
    max_num_seqs: int


def made_up_launch(arguments: Sequence[str] = (), api_keys: Sequence[str] = ()) -> Launch:
    """Returns a launch, of which only the scheduler will be started."""
    return Launch(
        num_prefill=NUM_PREFILL,
        num_decode=NUM_DECODE,
        port=free_port_pair(),
        served_model_names=[MODEL_NAME],
        arguments=[*arguments],
        api_keys=[*api_keys],
    )


@contextlib.contextmanager
def own_scheduler(
    folder: Path,
    step_s: float,
    launch: Launch | None = None,
    pace: WorkerSpeed | None = None,
    checkout: Path | None = None,
) -> Iterator[Target]:
    """Starts `pd-cluster serve` as the launcher does. `checkout`: the folder of another version. Raises ChildFailed."""
    launch = launch or made_up_launch()
    plan = plan_cluster(launch, folder)
    (scheduler,) = (member for member in plan if member.is_scheduler)
    members = (member for member in plan if not member.is_scheduler)
    place = find_place(scheduler.env)
    checkpoint = Checkpoint.open(str(SHIPPED_MODEL))
    spec = WorkersSpec(
        workers=[
            MadeUpWorker(
                name=member.name,
                role="prefill" if member.name.startswith("prefill") else "decode",
                port=member.port,
                device_ids=[device.device_id for device in server.device],
            )
            for member, server in zip(members, place.table.instances, strict=True)
        ],
        step_s=step_s,
        token_ids=Tokenizer(checkpoint.path).encode(TEXT, add_special_tokens=False),
        credentials=msgspec.structs.replace(credentials_of(place, KeyFiles()), key=b""),
        model_identity=checkpoint.identity,
        max_model_len=checkpoint.max_model_len(None),
    )
    if pace is not None:
        speed = {"prefill_tokens_per_s": pace.prefill_tokens_per_s, "max_num_seqs": pace.max_num_seqs}
        spec = msgspec.structs.replace(spec, **speed, prefill_step_s=step_s / 2)
    spec_file, log = folder / "workers.spec.json", folder / "scheduler.log"
    spec_file.touch(mode=0o600)
    spec_file.write_bytes(msgspec.json.encode(spec))
    command = [sys.executable, "-m", "benchmarks.peers.router_workers", str(spec_file)]
    with (
        running_child(command, folder / "workers.log", 1) as workers,
        running_child(scheduler.command, log, 1, scheduler.env, checkout) as process,
    ):
        _await_ok(f"{launch.url}/health", process, log)
        yield Target(launch.port, process.pid, launch.admin_url, workers.pid)


def _await_ok(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until the answer is {"status": "ok"}. Raises ChildFailed."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    with httpx.Client(timeout=5, trust_env=False) as client:
        while process.poll() is None and time.monotonic() < deadline_s:
            with contextlib.suppress(httpx.HTTPError):
                answer = client.get(url)
                if answer.status_code == 200 and answer.json()["status"] == "ok":
                    return
            time.sleep(POLL_S)
    how = f"ended with code {process.returncode}" if process.returncode is not None else "did not get ready"
    raise ChildFailed(f"the scheduler {how}; its last lines:\n{last_lines(log)}")
