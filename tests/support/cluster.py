"""A cluster of real processes for tests: starts, awaits, queries and kills them, and checks that nothing is held.

Starts the same processes as `pd-cluster up` (from the same plan), and restarts a process only when a test asks for it.
Every wait has a deadline and fails with the last lines of the processes' logs.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx

from pd_cluster.cluster.processes.launch_preloader import LaunchPreloader
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.launcher import Member, plan_cluster
from pd_cluster.cluster.processes.port_reservations import free_port_pair, free_port_row
from pd_cluster.cluster.processes.rank_process import environment
from pd_cluster.engine.start.preloader import Preloader, essential, surroundings
from pd_cluster.transport.transport_table import same_host_choice
from pd_cluster.types import LinkState
from ranktable_tools.cluster_keys import ADMIN_TOKEN_FILE
from tests.support.forked_serve import COMMAND, ForkedServe

START_TIMEOUT_S = float(os.environ.get("PD_CLUSTER_TEST_START_S", "150"))
SETTLE_TIMEOUT_S = 80.0
POLL_S = 0.05
DEVICE = os.environ.get("PD_CLUSTER_TEST_DEVICE", "")  # --device of every worker
SAME_HOST = same_host_choice(DEVICE or "cpu")  # the transport between two instances of one host
T = TypeVar("T")


def shared_preloader() -> Preloader:
    """Returns the preloader shared by all clusters of this test process, for ranks with one core each.

    Starts a new one if something that a fork inherits has changed: a namespace, a limit, an environment variable.
    """
    num_threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or 1
    env = environment(num_threads, os.environ)
    key = str((sorted(essential(env).items()), sorted(surroundings().items())))
    if key not in _preloaders:
        _preloaders[key] = Preloader.start(env, "")
    return _preloaders[key]


_preloaders: dict[str, Preloader] = {}


class LiveCluster:
    """`with LiveCluster(folder, model, …) as cluster:`; ready inside the block, always removed afterwards."""

    FORKS = True  # False: each process is started by its command line

    def __init__(
        self,
        folder: Path,
        model: Path,
        num_prefill: int = 1,
        num_decode: int = 1,
        arguments: Sequence[str] = (),
        openai: bool = True,
        served_model_names: Sequence[str] = ("tiny",),
        member_arguments: Mapping[str, Sequence[str]] | None = None,
        tp_sizes: Mapping[str, int] | None = None,
        num_schedulers: int = 1,
        num_encode: int = 0,
    ) -> None:
        port = free_port_pair() if num_schedulers == 1 else free_port_row(2 * num_schedulers)
        admin = [f"--admin-port={port + 1}"] if num_schedulers == 1 else []
        self.folder = folder
        self.launch = Launch(
            model=str(model),
            num_prefill=num_prefill,
            num_decode=num_decode,
            num_encode=num_encode,
            tp_sizes=tp_sizes or {},
            num_schedulers=num_schedulers,
            port=port,
            served_model_names=list(served_model_names),
            arguments=[
                *admin,
                *([f"--device={DEVICE}"] if DEVICE else []),
                *arguments,
            ],
            openai=openai,
        )
        self.url, self.admin_url = self.launch.url, self.launch.admin_url
        self.preloader = LaunchPreloader(self.launch, shared_preloader() if self.launch.forks else None)
        self.member_arguments = member_arguments or {}
        self.members: dict[str, Member] = {}
        self.processes: dict[str, subprocess.Popen[bytes] | ForkedServe] = {}
        self.client = httpx.Client(timeout=60, trust_env=False)

    def __enter__(self) -> Self:
        try:
            self.start()
            self.await_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---- processes

    def plan(self) -> list[Member]:
        return plan_cluster(self.launch, self.folder)

    def start(self) -> None:
        self.members = {member.name: member for member in self.plan()}
        for name in self.members:
            self.start_member(name)

    def start_member(self, name: str) -> None:
        member = self.members[name]
        own, files = self.preloader.for_worker() if not member.is_scheduler else ({}, ())
        command = [*member.command, *self.member_arguments.get(name, ())]
        env = {**os.environ, **member.env, **own}
        with self.log_file(name).open("ab") as log:
            if self.FORKS and command[: len(COMMAND)] == COMMAND:
                self.processes[name] = ForkedServe(command, env, log.fileno(), files)
                return
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            self.processes[name] = subprocess.Popen(command, env=env, pass_fds=files, **streams)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        self.processes[name].send_signal(number)

    def kill_rank(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to an instance's rank processes, but not to their parent."""
        for pid in self.rank_pids(name):
            os.kill(pid, number)

    def rank_pids(self, name: str) -> list[int]:
        """Returns the ranks' pids in order; the worker's parent process must respond."""
        answer = self.client.get(f"http://{self.address_of(name)}:{self.members[name].port}/instance")
        found: list[int] = answer.json()["rank_pids"]
        assert found
        return found

    def address_of(self, name: str) -> str:
        return "127.0.0.1"

    def await_exit(self, name: str, timeout_s: float = 20.0) -> int:
        return self.processes[name].wait(timeout_s)

    def restart(self, name: str) -> None:
        """Restarts a process that has ended or is about to end, and waits until the cluster is ready again."""
        self.await_exit(name)
        self.start_member(name)
        self.await_ready()

    def stop(self) -> None:
        """Ends all processes that this test started: sends SIGTERM, waits, then kills."""
        self.client.close()
        running = [process for process in self.processes.values() if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        deadline_s = time.monotonic() + 10
        for process in running:
            try:
                process.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)

    def log_file(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def logs(self) -> str:
        """Returns the last lines of every process."""
        parts = []
        for name in self.members:
            lines = self.log_file(name).read_text(errors="replace").splitlines()[-25:]
            parts.append(f"---- {name}\n" + "\n".join(lines))
        return "\n".join(parts)

    # ---- queries

    def health(self) -> tuple[int, dict[str, Any]]:
        """Returns (status, body), or (0, {}) if no scheduler answers."""
        try:
            answer = self.client.get(f"{self.url}/health")
        except httpx.HTTPError:
            return 0, {}
        return answer.status_code, answer.json()

    def instances(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.client.get(f"{self.admin_url}/instances").json()["instances"]
        return found

    def instance(self, name: str) -> dict[str, Any]:
        return next(i for i in self.instances() if i["instance_id"] == name)

    def await_received(self, *names: str) -> None:
        """Waits until heartbeats report received KV cache for each of these instances.

        One instance may get all requests of a batch, so it sends further batches.
        """

        def have_received() -> bool:
            return all(self.instance(name)["kv_received_nbytes"] > 0 for name in names)

        for seed in range(10):
            with suppress(AssertionError):
                self.wait_until(f"KV cache came to {names}", have_received, 2.0)
                return
            self.complete_together([[seed + 1, at + 1] * 20 for at in range(8)], 8)
        self.wait_until(f"KV cache came to {names}", have_received)

    def ask_admin(self, method: str, path: str, token: str | None = None, **fields: Any) -> httpx.Response:
        """Sends a request to the admin port, with its token unless another one is given."""
        token = (self.folder / ADMIN_TOKEN_FILE).read_text().strip() if token is None else token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return self.client.request(method, f"{self.admin_url}{path}", headers=headers, **fields)

    def order(self, path: str, **body: Any) -> Any:
        """Posts a command to the admin port; returns the response's JSON. Fails unless the status is 200."""
        answer = self.ask_admin("POST", path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def wait_until(self, what: str, condition: Callable[[], bool], timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise AssertionError(f"not within {timeout_s:g} s: {what}\n{self.logs()}")
            time.sleep(POLL_S)

    def await_ready(self) -> None:
        """Waits until all instances are ready and every link is up."""

        def ready() -> bool:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise AssertionError(f"{name} ended with code {process.returncode}\n{self.logs()}")
            return self.is_whole()

        self.wait_until("the cluster is ready", ready, START_TIMEOUT_S)

    def is_whole(self) -> bool:
        """Whether all instances are ready and linked, and each is the process that this test started last."""
        if not self._all_anew():  # checked first, so that the health below is not an earlier process's
            return False
        status, body = self.health()
        return status == 200 and body["status"] == "ok" and self._all_linked()

    def _all_anew(self) -> bool:
        """Whether each listed instance is its current process: the scheduler may not have noticed a death yet."""
        try:
            found = self.instances()
        except httpx.HTTPError:
            return False
        lives = [(self.processes[i["instance_id"]], i["pid"]) for i in found if i["instance_id"] in self.processes]
        return all(process.pid == pid and process.poll() is None for process, pid in lives)

    def _all_linked(self) -> bool:
        """Whether every prefill instance has its links to all others, including registered encoders."""
        found = self.instances()
        to_all = "--prefix-pull" in self.launch.arguments
        lives = {f"{i['instance_id']}@{i['epoch']}" for i in found if to_all or i["role"] != "prefill"}
        linked = [
            lives - {f"{i['instance_id']}@{i['epoch']}"}
            == {peer for peer, state in i["links"].items() if LinkState.parse(state).is_up}
            for i in found
            if i["role"] == "prefill"
        ]
        are_here = sum(1 for i in found if i["role"] == "encode") == self.launch.num_encode
        return are_here and all(linked)

    def assert_home(self) -> None:
        """Asserts that no instance holds, awaits or owes anything, and that every block is accounted for."""

        def home() -> bool:
            return all(
                i["num_held_blocks"] == 0
                and i["num_outstanding"] == 0
                and i["num_running"] == i["num_waiting"] == i["num_landing"] == i["num_exporting"] == 0
                and not any(group["num_held"] for group in i["groups"])
                and i["num_blocks"] == i["num_free_blocks"] + i["num_cached_blocks"] + i["num_held_blocks"]
                for i in self.instances()
                if i["state"] == "ready"
            )

        before = {i["instance_id"]: i["num_heartbeats"] for i in self.instances()}

        def refreshed() -> bool:
            return all(
                i["num_heartbeats"] >= before.get(i["instance_id"], 0) + 2 or i["state"] != "ready"
                for i in self.instances()
            )

        self.wait_until("two more heartbeats of each instance arrived", refreshed)
        self.wait_until("every block is released", home)

    # ---- requests

    @contextmanager
    def unfinished(self) -> Iterator[None]:
        """Keeps a request in flight by sending its body only at the end, so that a draining scheduler stays alive."""

        def load() -> int:
            return int(self.client.get(f"{self.url}/load").json()["server_load"])

        self.wait_until("nothing is in flight", lambda: load() == 0)
        with socket.create_connection(("127.0.0.1", self.launch.port), timeout=30) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
            self.wait_until("the request is in flight", lambda: load() == 1)
            yield
            connection.sendall(b"{}")
            assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """Returns the response's JSON. Fails unless the status is 200."""
        answer = self.client.post(f"{self.url}{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def complete(self, prompt: list[int] | str, max_tokens: int, **fields: Any) -> list[int]:
        """Returns the output tokens of one completion, greedy unless `fields` say otherwise."""
        return self.complete_choices(prompt, max_tokens, **fields)[0]

    def complete_together(
        self, prompts: Sequence[list[int]], max_tokens: int | Sequence[int], concurrency: int = 0, **fields: Any
    ) -> list[list[int]]:
        """Requests greedy completions concurrently; returns their output tokens in the prompts' order."""
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        asks = zip(prompts, limits, strict=True)
        return together([partial(self.complete, prompt, limit, **fields) for prompt, limit in asks], concurrency)

    def complete_choices(self, prompt: list[int] | str, max_tokens: int, **fields: Any) -> list[list[int]]:
        """Returns the output tokens of each choice."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **fields}
        choices = self.ask("/v1/completions", body)["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        return [choice["token_ids"] for choice in choices]


def children_of(pid: int) -> list[int]:
    """Returns the child processes that any of its threads started."""
    lists = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for children in lists for child in children.split()]


def together(jobs: Sequence[Callable[[], T]], concurrency: int = 0, timeout_s: float = 240.0) -> list[T]:
    """Runs jobs concurrently, at most `concurrency` if not 0; returns results in order. Fails with the jobs' errors."""
    found: dict[int, T] = {}

    def into(at: int) -> Callable[[], None]:
        return lambda: found.update({at: jobs[at]()})

    errors = in_parallel([into(at) for at in range(len(jobs))], concurrency or len(jobs), timeout_s)
    assert not errors, errors[0]
    return [found[at] for at in range(len(jobs))]


def in_parallel(jobs: Sequence[Callable[[], None]], concurrency: int, timeout_s: float = 240.0) -> list[BaseException]:
    """Runs the jobs on threads; returns their exceptions. Fails if they do not end within `timeout_s`."""
    waiting = list(reversed(jobs))
    errors: list[BaseException] = []

    def work() -> None:
        while waiting:
            try:
                job = waiting.pop()
            except IndexError:
                return
            try:
                job()
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "requests hang"
    return errors


class SpawnedCluster(LiveCluster):
    """A cluster whose processes are spawned by their command lines, as `up` does, instead of forked."""

    FORKS = False
