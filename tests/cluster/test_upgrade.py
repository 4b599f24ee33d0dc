"""The upgrade of docs/operations.md, step by step, during streams: no answer is lost, changed or cut.

`PD_CLUSTER_PREVIOUS=FOLDER` names an installed checkout of an earlier version with the same protocol; without it, the
steps run with the same version.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from pd_cluster.cluster.processes.port_reservations import free_port_pair, free_ports
from pd_cluster.settings.engine_config import SHIPPED_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
OWN = Path(__file__).parents[2]
PREVIOUS = Path(os.environ.get("PD_CLUSTER_PREVIOUS", OWN))
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
TABLES = {
    name: f"local_ranktable_127.0.0.1_{at}.json"
    for name, at in zip((*WORKERS, "scheduler"), (*range(4), "host"), strict=True)
}
GEN = (
    "gen --prefill-server-list 0 1 --decode-server-list 2 3 --api-server --server-ip 127.0.0.1 --device cpu "
    "--save-dir ranktables"
)
PATIENT = ("--max-model-len=1024", "--dead-after=30")  # so that a busy machine is not taken for a death
WAIT_S = 240.0
NUM_CLIENTS = 2
QUESTION = {"prompt": "A long story about a bear and a bee:", "max_tokens": 100, "temperature": 0, "ignore_eos": True}


class Clients:
    """Clients that repeat one request until stopped; `ends`: each answer's status and text."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(NUM_CLIENTS)]
        self.ends: list[tuple[int, str]] = []
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _run(self) -> None:
        with client_of(self._url) as client:
            while not self._over.is_set():
                self.ends.append(answer(client))


def client_of(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False)


def answer(client: httpx.Client) -> tuple[int, str]:
    """Returns (status, text); status 0 without a listener, -1 for a cut or failed stream."""
    text, is_begun = "", False
    body = {**QUESTION, "model": str(SHIPPED_MODEL), "stream": True}
    try:
        with client.stream("POST", "/v1/completions", json=body) as found:
            if found.status_code != 200:
                return found.status_code, ""
            is_begun = True
            for line in found.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return -1, str(event["error"])
                    text += "".join(choice["text"] for choice in event["choices"])
    except httpx.HTTPError as error:
        return (-1 if is_begun else 0), repr(error)
    return 200, text


class Servers:
    """A table's instances, each started by a checkout's `start_servers.sh`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        public = free_port_pair()
        self.url, self.admin = (f"http://127.0.0.1:{port}" for port in (public, public + 1))
        self.ports = dict(zip(TABLES, [*free_ports(len(WORKERS)), public], strict=True))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._client = client_of(self.admin)
        self.command(PREVIOUS, "pd-ranktable", *GEN.split())

    def command(self, checkout: Path, program: str, *arguments: str) -> None:
        env = {
            **os.environ,
            "PD_CLUSTER_ADMIN_TOKEN_FILE": "ranktables/admin.token",
            "PD_CLUSTER_INSTANCES_ADMIN": self.admin,
        }
        done = subprocess.run(
            [checkout / ".venv" / "bin" / program, *arguments],
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self, checkout: Path, name: str) -> None:
        env = {
            **os.environ,
            "GLOBAL_RANK_TABLE_FILE_PATH": "ranktables/global_ranktable_127.0.0.1.json",
            "RANK_TABLE_FILE_PATH": f"ranktables/{TABLES[name]}",
            "NODE_PORTS": ",".join(str(self.ports[worker]) for worker in WORKERS),
            "USE_OPENAI": "1",
        }
        flags = [f"--model={SHIPPED_MODEL}", "--host=127.0.0.1", f"--port={self.ports[name]}", *PATIENT]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                ["sh", checkout / "scripts" / "start_servers.sh", *flags],
                cwd=self.folder,
                env=env,
                stdout=log,
                stderr=log,
            )

    def end(self, name: str) -> None:
        process = self.processes.pop(name)
        process.terminate()
        assert process.wait(WAIT_S) == 0, self.log(name)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-3000:]

    def state(self, name: str) -> tuple[str, int]:
        """Returns an instance's (state, pid), or ("", 0) without an answer."""
        try:
            found = self._client.get("/instances").json()["instances"]
        except (httpx.HTTPError, ValueError):
            return "", 0
        return next((each["state"], each["pid"] or 0) for each in found if each["instance_id"] == name)

    def await_states(self, *wanted: str) -> None:
        for name in WORKERS:
            self.wait(lambda name=name: self.state(name)[0] in wanted, f"{name} to be {wanted}")

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < deadline_s, f"waited for {what}:\n" + "\n".join(map(self.log, self.processes))
            time.sleep(0.1)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    found = Servers(tmp_path)
    try:
        for name in TABLES:
            found.start(PREVIOUS, name)
        found.await_states("ready")
        yield found
    finally:
        for process in found.processes.values():
            process.terminate()
        for process in found.processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def test_workers_one_after_the_other_then_the_scheduler(servers: Servers) -> None:
    with client_of(servers.url) as client:
        wanted = answer(client)
    assert wanted[0] == 200
    clients = Clients(servers.url)
    for name in reversed(WORKERS):
        servers.command(OWN, "pd-cluster", "instances", "drain", name)
        servers.wait(lambda name=name: servers.state(name)[0] == "drained", f"{name} to be drained")
        before = servers.state(name)[1]
        servers.end(name)
        servers.start(OWN, name)
        servers.wait(
            lambda name=name, before=before: servers.state(name)[1] not in (0, before), f"{name} in another process"
        )
        servers.command(OWN, "pd-cluster", "instances", "drain", "--undo", name)
        servers.await_states("ready")
    clients.stop()
    assert Counter(clients.ends) == {wanted: len(clients.ends)}
    assert len(clients.ends) > len(WORKERS)

    clients = Clients(servers.url)
    servers.wait(lambda: len(clients.ends) > 0, "an answer")
    servers.end("scheduler")
    servers.start(OWN, "scheduler")
    servers.await_states("ready")
    num_before = clients.ends.count(wanted)
    servers.wait(lambda: clients.ends.count(wanted) > num_before, "an answer by way of the new scheduler")
    clients.stop()
    print(f"figure: statuses while the scheduler changed: {dict(Counter(status for status, _ in clients.ends))}")
    assert {status for status, _ in clients.ends} <= {200, 503, 0}, "no stream was cut"
    assert {each for each in clients.ends if each[0] == 200} == {wanted}
