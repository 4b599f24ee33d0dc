"""Runs a whole cluster on one host: rank tables, ports, and one `pd-cluster serve` process for each instance.

Starts the processes exactly as scripts/start_servers.sh does. If a worker dies, its death is reported and, by default,
the worker is restarted. If a process cannot start, the whole cluster ends with its error. If a member of a unit dies,
the other members end too, and each is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pd_cluster import extra_table, host
from pd_cluster.cluster.members.rank_table_place import TABLE_VARIABLES
from pd_cluster.cluster.processes.launch_preloader import DIE_WITH_PARENT, LaunchPreloader
from pd_cluster.cluster.processes.launch_settings import Launch, role_of
from pd_cluster.cluster.processes.port_reservations import Reservations, free_ports
from pd_cluster.cluster.processes.running_clusters import recorded
from pd_cluster.devices.device import num_threads_for
from pd_cluster.errors import ConfigError, listening_fault
from pd_cluster.settings.http_settings import KEYS_VARIABLE, METRICS_KEY_VARIABLE
from pd_cluster.settings.log_files import LogFile, folder_of
from pd_cluster.settings.serve_options import without_keys
from ranktable_tools import generate, write
from ranktable_tools.cluster_keys import ADMIN_TOKEN_FILE, write_keys
from ranktable_tools.host_addresses import bracketed
from ranktable_tools.table_files import PRIVATE

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.5, 5.0  # the delay before the second start in a row, and the longest delay
MOST_KILLED_FOR_MEMORY = 3  # a process that was killed this often in a row is not restarted
LONG_LIFE_S = 30.0  # after a life of this length, a death counts as the first in a row
READY_POLL_S = 0.03
STOP_TIMEOUT_S = 3600.0  # each process has its own --drain-timeout; a second Ctrl-C ends the wait
MAX_LINE_NBYTES = 1 << 20
STDOUT = 1
LEASE_FOLDER = "scheduler.lease"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Member:
    """One process to run."""

    name: str
    command: list[str]
    env: dict[str, str]
    port: int
    is_scheduler: bool = False


def plan_cluster(launch: Launch, folder: Path, reservations: Reservations | None = None) -> list[Member]:
    """Writes the rank tables and their secrets into `folder`; returns the processes, schedulers last.

    Encoders are in no table: they register at a port of the scheduler. Hybrid instances register as decode instances,
    and then there is neither a prefill instance nor a table. Existing secrets are kept, so that running processes
    recognize a restarted process. `reservations` hold the workers' ports. Raises ConfigError.
    """
    if launch.num_hybrid:
        return _plan_hybrids(launch, folder, reservations)
    num_workers = launch.num_prefill + launch.num_decode
    names = launch.worker_names
    tp_sizes = [launch.tp_size_of(name) for name in names]
    starts = [0, *itertools.accumulate(tp_sizes)]
    slots = [list(range(start, start + size)) for start, size in zip(starts, tp_sizes, strict=False)]
    generated = generate(
        prefill=slots[: launch.num_prefill],
        decode=slots[launch.num_prefill :],
        api_server=True,
        server_ip="127.0.0.1",
        device_kind="cpu",
        device_ips=None,
    )
    write(generated, folder)
    secret, key, token = write_keys(folder, PRIVATE)
    join_port, *free = free_ports(1 + num_workers + launch.num_encode, reservations)
    ports = free[:num_workers]
    everywhere = {"PYTHONUNBUFFERED": "1", DIE_WITH_PARENT: str(os.getpid())}
    common = {
        **everywhere,
        "GLOBAL_RANK_TABLE_FILE_PATH": str(folder / generated.global_name),
        "NODE_PORTS": ",".join(map(str, ports)),
        "USE_OPENAI": "1" if launch.openai else "0",
    }
    members = []
    *tables, host_table = generated.locals  # in the order of the instances, the scheduler's table last
    for table, name, port in zip(tables, names, ports, strict=True):
        env = {**common, "RANK_TABLE_FILE_PATH": str(folder / table)}
        own = [f"--secret-file={secret}"]
        if (size := launch.unit_sizes.get(role_of(name), 1)) > 1:
            own.append(f"--data-parallel-size={size}")
        members.append(Member(name, _command(launch, "127.0.0.1", port, *own), env, port))
    join = launch.join_port or str(join_port)
    members += _joining(launch, "encode", free[num_workers:], join, everywhere, f"--secret-file={secret}")
    env = {**common, "RANK_TABLE_FILE_PATH": str(folder / host_table), **_scheduler_variables(launch)}
    files = [f"--secret-file={secret}", f"--scheduler-key-file={key}", f"--admin-token-file={token}"]
    for index, name in enumerate(launch.scheduler_names):
        port, own = launch.port_of(index), list(files)
        if launch.num_encode and not launch.join_port:
            own.append(f"--join-port={join}")
        if launch.num_schedulers > 1:
            own += [f"--scheduler-lease={folder / LEASE_FOLDER}", f"--scheduler-index={index}"]
        members.append(Member(name, _command(launch, launch.host, port, *own), env, port, is_scheduler=True))
    return members


def _scheduler_variables(launch: Launch) -> dict[str, str]:
    keys = {KEYS_VARIABLE: " ".join(launch.api_keys), METRICS_KEY_VARIABLE: launch.metrics_key}
    return {**launch.scheduler_variables, **{name: value for name, value in keys.items() if value}}


def _plan_hybrids(launch: Launch, folder: Path, reservations: Reservations | None) -> list[Member]:
    secret, key, token = write_keys(folder, PRIVATE)
    join, *ports = free_ports(1 + launch.num_hybrid, reservations)
    everywhere = {"PYTHONUNBUFFERED": "1", DIE_WITH_PARENT: str(os.getpid())}
    members = _joining(launch, "hybrid", ports, str(join), everywhere, f"--secret-file={secret}")
    for index, member in enumerate(members):
        member.command.append(f"--tensor-parallel-size={launch.tp_size_of(member.name)}")
        member.env.update(_own_devices(launch, index, os.environ))
    files = [f"--secret-file={secret}", f"--scheduler-key-file={key}", f"--admin-token-file={token}"]
    own = [*files, "--role=scheduler", f"--join-port={join}"]
    openai = {"USE_OPENAI": "1" if launch.openai else "0"}
    env = {**everywhere, **dict.fromkeys(TABLE_VARIABLES, ""), **openai, **_scheduler_variables(launch)}
    command = _command(launch, launch.host, launch.port, *own)
    return [*members, Member(launch.scheduler_names[0], command, env, launch.port, is_scheduler=True)]


def _own_devices(launch: Launch, index: int, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that restrict an instance to its own devices, since no table lists them.

    Raises ConfigError if `env` allows too few devices.
    """
    size, num = launch.tp_size_of(launch.worker_names[index]), launch.num_ranks
    found = {}
    for variable in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        seen = env[variable].split(",") if env.get(variable) else list(map(str, range(num)))
        if len(seen) < launch.num_ranks:
            raise ConfigError(
                f"{variable}={env[variable]}: {launch.instances} instances need {launch.num_ranks} devices"
            )
        found[variable] = ",".join(seen[index * size : (index + 1) * size])
    return found


def _joining(
    launch: Launch, kind: str, ports: Sequence[int], join: str, env: Mapping[str, str], secret: str
) -> list[Member]:
    """Returns instances that register with the scheduler at the port `join`. `kind`: encode or hybrid."""
    address = "127.0.0.1" if launch.host in ("0.0.0.0", "") else launch.host
    role = "decode" if kind == "hybrid" else kind
    own = [secret, f"--role={role}", f"--join={bracketed(address)}:{join}", "--advertise-host=127.0.0.1"]
    threads = os.environ.get("OMP_NUM_THREADS") or str(num_threads_for(launch.num_ranks))
    env = {**env, **dict.fromkeys(TABLE_VARIABLES, ""), "OMP_NUM_THREADS": threads}
    names = launch.worker_names if kind == "hybrid" else launch.encoder_names
    return [
        Member(name, _command(launch, "127.0.0.1", port, *own, f"--instance-name={name}"), dict(env), port)
        for name, port in zip(names, ports, strict=True)
    ]


def _command(launch: Launch, address: str, port: int, *own: str) -> list[str]:
    names = [f"--served-model-name={name}" for name in launch.served_model_names]
    flags = [f"--host={address}", f"--port={port}", *own, f"--model={launch.model_folder}", *names, *launch.arguments]
    return [sys.executable, "-m", "pd_cluster", "serve", *flags]


class Cluster:
    """The processes of one launch, on an event loop. `say` receives lines for the user."""

    def __init__(self, launch: Launch, say: Say) -> None:
        if launch.num_schedulers > 1 and launch.admin_port:
            raise ConfigError(
                "--admin-port: cannot be combined with --schedulers: each scheduler's admin port is its public port + 1"
            )
        if launch.num_encode:
            extra_table.load("encoders", "--encode")
        if launch.num_schedulers > 1 and launch.num_encode:
            raise ConfigError(
                "--encode: cannot be combined with --schedulers, because encoders do not report each scheduler's "
                "share of their work"
            )
        if launch.num_schedulers > 1 and launch.uds:
            raise ConfigError("--uds: cannot be combined with --schedulers, which would all listen at that path")
        if launch.lease_flag:
            raise ConfigError(
                f"{launch.lease_flag}: cannot be combined with `up`, which sets it for each of --schedulers N"
            )
        if launch.restart not in ("on-failure", "no"):
            raise ConfigError(f"--restart {launch.restart!r}: expected on-failure or no")
        self.launch = launch
        self._say = say
        self._folder = Path(tempfile.mkdtemp(prefix="pd-cluster-"))  # mode 0700
        self.admin_token_file = self._folder / ADMIN_TOKEN_FILE
        self._ports = Reservations()
        self._preloader: LaunchPreloader | None = None
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._was_ready = False
        self._num_killed = host.num_killed_for_memory()  # so that each kill explains at most one death
        self._encoder_urls: list[str] = []

    async def start(self) -> None:
        """Starts every process. Raises ConfigError if a port is in use."""
        for port in range(self.launch.port + bool(self.launch.uds), self.launch.port_of(self.launch.num_schedulers)):
            _check_free(self.launch.host, port)
        self._preloader = LaunchPreloader(self.launch)
        members = plan_cluster(self.launch, self._folder, self._ports)
        encoders = self.launch.encoder_names
        self._encoder_urls = [f"http://127.0.0.1:{each.port}" for each in members if each.name in encoders]
        for member in members:
            process = await self._spawn(member)
            self._tasks.append(asyncio.create_task(self._supervise(member, process)))

    async def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Waits until every instance and link serves. Raises ConfigError if a process ends first."""
        import httpx  # not at module level, where every child process would import it, too

        deadline_s = time.monotonic() + timeout_s
        # No verification: the certificate names the host that clients use, not this address; requests carry no secret.
        way = httpx.AsyncHTTPTransport(uds=self.launch.uds or None, verify=False, trust_env=False)
        encoders = httpx.AsyncClient(timeout=5, trust_env=False, verify=False)
        async with httpx.AsyncClient(timeout=5, transport=way) as schedulers, encoders:
            while time.monotonic() < deadline_s:
                self.raise_failure()
                with contextlib.suppress(httpx.HTTPError, ValueError):
                    answers = [await schedulers.get(f"{url}/health") for url in self.launch.urls]
                    answers += [await encoders.get(f"{url}/health") for url in self._encoder_urls]
                    have_joined = len(answers[0].json().get("instances", ())) >= self.launch.num_hybrid
                    if have_joined and all(answer.json()["status"] in ("ok", "ready") for answer in answers):
                        self._was_ready = True
                        return
                await asyncio.sleep(READY_POLL_S)
        raise ConfigError(f"the cluster was not ready within {timeout_s:g} s; see the lines above")

    async def dashboard_link(self) -> str:
        """Returns a link that works once within a minute, and how to get another one; "" if there is no dashboard."""
        import httpx

        again = f"`pd-cluster dashboard --admin {self.launch.admin_url}`"
        headers = {"Authorization": f"Bearer {self.admin_token_file.read_text().strip()}"}
        async with httpx.AsyncClient(timeout=5, trust_env=False, verify=False, headers=headers) as client:
            try:
                answer = await client.post(f"{self.launch.admin_url}/dashboard/codes")
                if answer.status_code == httpx.codes.NOT_FOUND:
                    return ""
                made = answer.json()
                return f"{self.launch.admin_url}{made['path']} (once, within a minute; again: {again})"
            except (httpx.HTTPError, ValueError, KeyError):
                return again

    def recorded(self) -> contextlib.AbstractContextManager[None]:
        """Records the cluster while the context lasts, so that this user's commands find it."""
        launch, url = self.launch, "" if self.launch.uds else self.launch.url
        return recorded(os.environ, launch.admin_url, url, str(self.admin_token_file), launch.model_name)

    @property
    def has_served(self) -> bool:
        """Whether the cluster was ever ready; if not, it has no requests to finish."""
        return self._was_ready

    @property
    def preloader_pid(self) -> int:
        """The preloader's pid; 0 if it does not belong to this process."""
        return self._preloader.pid if self._preloader is not None else 0

    def pid_of(self, name: str) -> int:
        """Returns the pid of the process last started under this name."""
        return self._processes[name].pid

    async def wait_failure(self) -> None:
        """Waits until a process that is not restarted ends; raises its error."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        self.raise_failure()

    def raise_failure(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self, kill: bool = False) -> None:
        """Stops the schedulers first, so that running requests can finish, then the workers. Removes the rank
        tables.
        """
        self._stopping.set()
        if self._preloader is not None:  # first: a preloader that hangs may keep a worker's files open
            self._preloader.close()
        schedulers = [name for name in self.launch.scheduler_names if name in self._processes]
        for group in (schedulers, [name for name in self._processes if name not in schedulers]):
            await asyncio.gather(*(self._end(self._processes[name], kill) for name in group))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._ports.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _spawn(self, member: Member) -> asyncio.subprocess.Process:
        assert self._preloader is not None
        env, files = ({}, ()) if member.is_scheduler else self._preloader.for_worker()
        inherited = os.environ if member.is_scheduler else without_keys(os.environ)
        process = await asyncio.create_subprocess_exec(
            *member.command,
            env={**inherited, **member.env, **env},
            pass_fds=files,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=MAX_LINE_NBYTES,
            start_new_session=True,  # Ctrl-C goes to this process, which then ends its children in order
        )
        self._processes[member.name] = process
        return process

    async def _supervise(self, member: Member, process: asyncio.subprocess.Process) -> None:
        """Prints a process's lines; reports its death, and restarts it."""
        backoff_s, num_for_memory = 0.0, 0
        while True:
            started_s = time.monotonic()
            last = await self._copy_lines(member.name, process)
            code = await process.wait()
            if self._stopping.is_set():
                return
            is_for_memory = self._was_killed_for_memory()
            why = f", and the kernel killed a process for lack of memory: {host.memory()} are free" * is_for_memory
            if not self._was_ready:
                raise ConfigError(f"{member.name} could not start (exit code {code}): {last}{why}")
            self._say(f"{member.name} (pid {process.pid}) died with exit code {code}{why}; the cluster is degraded")
            num_for_memory = num_for_memory + 1 if is_for_memory else 0
            if num_for_memory == MOST_KILLED_FOR_MEMORY:
                self._say(
                    f"{member.name} is not restarted: it was killed for lack of memory {num_for_memory} times in a "
                    f"row. Give more memory, fewer instances or a smaller KV pool (--kv-cache-memory, --max-model-len)"
                )
            if self.launch.restart == "no" or num_for_memory == MOST_KILLED_FOR_MEMORY:
                if member.is_scheduler and not self._has_scheduler:
                    raise ConfigError("the scheduler died")
                return
            if time.monotonic() - started_s > LONG_LIFE_S:
                backoff_s = 0.0
            await asyncio.sleep(backoff_s)
            backoff_s = min(max(FIRST_BACKOFF_S, 2 * backoff_s), LAST_BACKOFF_S)
            if self._stopping.is_set():
                return
            process = await self._spawn(member)
            self._say(f"{member.name} was restarted (pid {process.pid})")

    def _was_killed_for_memory(self) -> bool:
        """Whether the kernel has killed a process for lack of memory since the last death: if so, probably the one that
        died.
        """
        before, self._num_killed = self._num_killed, host.num_killed_for_memory()
        return self._num_killed > before

    @property
    def _has_scheduler(self) -> bool:
        return any(self._processes[name].returncode is None for name in self.launch.scheduler_names)

    async def _copy_lines(self, name: str, process: asyncio.subprocess.Process) -> str:
        last = ""
        assert process.stdout is not None
        with contextlib.closing(LogFile(folder_of(self._folder), name)) as kept:
            while raw := await _read_line(process.stdout):
                line = raw.decode(errors="replace").rstrip()
                last = line or last
                kept.write(line)
                self._say(f"{name:<10}| {line}")
        return last.removeprefix("pd-cluster: ")

    async def _end(self, process: asyncio.subprocess.Process, kill: bool) -> None:
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """Returns a line. Drops a line that is longer than MAX_LINE_NBYTES."""
    try:
        return await stream.readline()
    except ValueError:
        return b"(a line that was too long)\n"


def _check_free(address: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port: cannot listen at {address}:{port}: {listening_fault(error)}") from None


Watch = Callable[[Cluster], Awaitable[None]]


def tell(line: str) -> None:
    """Prints to stdout, unbuffered. A full disk or a broken pipe only loses these lines."""
    with contextlib.suppress(OSError):
        os.write(STDOUT, f"{line}\n".encode(errors="replace"))


async def run_until_signal(launch: Launch, say: Say = tell, watch: Watch | None = None) -> int:
    """Runs `pd-cluster up`: starts the cluster, serves until SIGINT or SIGTERM, and stops it.

    `say` receives the lines. `watch` runs while the cluster is ready. Returns the exit code.
    """
    started_s = time.monotonic()
    cluster = Cluster(launch, say)
    signals = asyncio.Event()
    second = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: second.set() if signals.is_set() else signals.set())
    stopping = asyncio.ensure_future(signals.wait())
    record = contextlib.ExitStack()
    try:
        await cluster.start()
        record.enter_context(cluster.recorded())
        ready = asyncio.ensure_future(cluster.wait_ready())
        await asyncio.wait({ready, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            gc.enable()
            took_s = time.monotonic() - started_s
            _announce(say, cluster, took_s, await cluster.dashboard_link())
            watching = asyncio.ensure_future(watch(cluster)) if watch is not None else None
            failing = asyncio.ensure_future(cluster.wait_failure())
            await asyncio.wait({failing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            if failing.done():
                failing.result()
            failing.cancel()
        ready.cancel()
        say("stopping")
        return 0
    finally:
        record.close()
        ending = asyncio.ensure_future(cluster.stop(kill=not cluster.has_served))
        impatient = asyncio.ensure_future(second.wait())
        await asyncio.wait({ending, impatient}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            await cluster.stop(kill=True)
        await ending
        for task in (stopping, impatient):
            task.cancel()


def _announce(say: Say, cluster: Cluster, took_s: float, link: str) -> None:
    launch = cluster.launch
    route, asked = "chat/completions", '"messages": [{"role": "user", "content": "What is 3 + 4?"}]'
    if not launch.has_chat_template:
        route, asked = "completions", '"prompt": "One, two, three,"'
    body = f'{{{asked}, "temperature": 0, "max_tokens": 32'
    body += f', "model": "{launch.model_name}"}}' if launch.model or launch.served_model_names else "}"
    key = " -H 'Authorization: Bearer KEY'" if launch.has_keys else ""
    pids = " ".join(str(cluster.pid_of(name)) for name in launch.scheduler_names)
    again = f"to reread {launch.key_file}: kill -HUP {pids}\n" if launch.key_file else ""
    others = f"other schedulers: {', '.join(launch.urls[1:])}; each one's admin port is its public port + 1\n" * (
        launch.num_schedulers > 1
    )
    address, asking = f"{launch.url}/v1", f"curl {launch.url}"
    if launch.uds:
        address, asking = (
            f"the Unix socket {launch.uds}",
            f"curl --unix-socket {launch.uds} {launch.scheme}://localhost",
        )
    shown = f"dashboard: {link}\n" * bool(link)
    say(
        f"ready after {took_s:.1f} s: {f'{launch.num_encode} encode, ' * (launch.num_encode > 0)}"
        f"{launch.instances}, "
        f"OpenAI API at {address}, admin at {launch.admin_url}\n"
        f"{others}admin token: {cluster.admin_token_file}\n{again}"
        f"{shown}try: {asking}/v1/{route} -H 'Content-Type: application/json'{key} -d '{body}'"
    )
