"""The servers of a comparison. Each runs alone, on the same cores, and ends before the next one starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from pd_cluster.bench.compare.comparison_spec import ComparedServer, ComparisonSpec
from pd_cluster.bench.process_times import cpu_s
from pd_cluster.bench.serve_bench import running
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.port_reservations import free_port_pair
from pd_cluster.devices.core_affinity import as_list
from pd_cluster.errors import ConfigError, GenerationError, PdClusterError
from pd_cluster.settings.serve_options import without_keys

WAIT_POLICY, NUM_THREADS = "OMP_WAIT_POLICY", "OMP_NUM_THREADS"
VLLM_START_S, VLLM_STOP_S, VLLM_POLL_S = 600.0, 20.0, 0.5
VLLM_VERSION_S = 60.0
NUM_LOG_LINES = 20


@dataclass(frozen=True, slots=True)
class ReadyServer:
    """A ready server. `pids`: its processes, without their children; empty for a server given by address."""

    url: str
    pids: tuple[int, ...] = ()

    def cpu_s(self) -> float:
        """Returns the CPU time that its processes have used. Raises GenerationError if one has ended."""
        try:
            return cpu_s(*self.pids)
        except OSError:
            raise GenerationError(f"a process of the server at {self.url} has ended; its log says why") from None


@contextlib.contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Restricts processes that this thread starts in the block to these cores."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


@contextlib.asynccontextmanager
async def serving(spec: ComparisonSpec, contender: ComparedServer, log: Path) -> AsyncIterator[ReadyServer]:
    """Yields the ready server, and ends it. Its output goes to `log`. Raises PdClusterError."""
    if contender.url:
        yield ReadyServer(contender.url.rstrip("/").removesuffix("/v1"))
        return
    async with contextlib.AsyncExitStack() as stack:
        with on_cores(spec.core_set):
            start = _vllm if contender.vllm else _cluster
            served = await stack.enter_async_context(start(spec, contender, log))
        yield served


@contextlib.asynccontextmanager
async def _cluster(spec: ComparisonSpec, contender: ComparedServer, log: Path) -> AsyncIterator[ReadyServer]:
    prefill, decode, hybrid = contender.numbers
    launch = Launch(
        model=spec.model,
        num_prefill=prefill,
        num_decode=decode,
        num_hybrid=hybrid,
        port=free_port_pair(),
        arguments=contender.serve_flags,
        restart="no",  # figures of a cluster that has lost an instance would be wrong
    )
    with log.open("a", encoding="utf-8", errors="replace") as lines:

        def keep(line: str) -> None:
            print(line, file=lines, flush=True)

        async with running(launch, keep) as cluster:
            names = [*launch.worker_names, *launch.scheduler_names]
            pids = [cluster.preloader_pid, *map(cluster.pid_of, names)]
            yield ReadyServer(launch.url, tuple(pid for pid in pids if pid))


@contextlib.asynccontextmanager
async def _vllm(spec: ComparisonSpec, contender: ComparedServer, log: Path) -> AsyncIterator[ReadyServer]:
    port = free_port_pair()
    print(f"starting vLLM's server ({contender.name}) …", flush=True)
    started_s = time.monotonic()
    with log.open("ab") as output:
        server = await asyncio.create_subprocess_exec(
            *vllm_command(spec, contender, port),
            env=vllm_environment(spec, contender, os.environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # lets all of its processes be ended as a group
        )
    try:
        url = f"http://127.0.0.1:{port}"
        await _wait_healthy(url, lambda: server.returncode, log)
        print(f"ready after {time.monotonic() - started_s:.1f} s", flush=True)
        yield ReadyServer(url, (server.pid,))
    finally:
        await _end_group(server)


def vllm_command(spec: ComparisonSpec, contender: ComparedServer, port: int) -> list[str]:
    model = Launch(model=spec.model).model_folder
    own = ("--model", model, "--host", "127.0.0.1", "--port", str(port))
    return [contender.vllm, "-m", "vllm.entrypoints.openai.api_server", *own, *contender.flags]


def vllm_environment(spec: ComparisonSpec, contender: ComparedServer, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns variables that bind the server's compute threads to the comparison's cores, one thread each."""
    cores = sorted(spec.core_set)
    return {
        **without_keys(inherited),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        NUM_THREADS: str(len(cores)),
        "HF_HUB_OFFLINE": "1",
        **contender.env,
    }


def waits_of(contender: ComparedServer, env: Mapping[str, str]) -> str:
    """Describes how the server's compute threads wait for each other: spinning threads take cores from others."""
    if contender.url:
        return "unknown, and not bound to cores here"
    if contender.layout:
        fixed = f"; {NUM_THREADS}={env[NUM_THREADS]} for each instance" if env.get(NUM_THREADS) else ""
        return f"{WAIT_POLICY}={env.get(WAIT_POLICY, 'passive')}{fixed}"
    given = {**env, **contender.env}.get(WAIT_POLICY)
    return f"{WAIT_POLICY}={given}" if given else f"spin for a while, {WAIT_POLICY} is not set"


async def check_can_start(spec: ComparisonSpec) -> None:
    """Checks each address for a model and each Python for vLLM before anything starts. Raises ConfigError."""
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        for at, each in enumerate(spec.server):
            if each.url:
                try:
                    await client.get(each.url.rstrip("/").removesuffix("/v1") + "/v1/models")
                except (httpx.HTTPError, httpx.InvalidURL) as error:
                    why = str(error) or type(error).__name__
                    raise ConfigError(f"server[{at}].url: {each.url!r}: no server answers there: {why}") from None
            if each.vllm:
                await _check_vllm(each, at)


async def _check_vllm(contender: ComparedServer, at: int) -> None:
    code = "import importlib.metadata as m, sys; sys.stdout.write(m.version('vllm'))"
    way_out = "give a Python that has vLLM for CPUs"
    try:
        asked = await asyncio.to_thread(
            subprocess.run, [contender.vllm, "-c", code], capture_output=True, timeout=VLLM_VERSION_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"server[{at}].vllm: {contender.vllm!r}: cannot be run: {error}; {way_out}") from None
    if asked.returncode:
        raise ConfigError(f"server[{at}].vllm: {contender.vllm!r}: this Python has no vLLM; {way_out}")
    print(f"{contender.name}: vLLM {asked.stdout.decode(errors='replace')}", flush=True)


async def _wait_healthy(url: str, exit_code: Callable[[], int | None], log: Path) -> None:
    """Waits until the server is ready. Raises PdClusterError with the last lines of the log."""
    deadline_s = time.monotonic() + VLLM_START_S
    async with httpx.AsyncClient(trust_env=False, timeout=2) as client:
        while time.monotonic() < deadline_s:
            if (code := exit_code()) is not None:
                raise PdClusterError(f"vLLM's server ended with code {code}; its last lines:\n{last_lines(log)}")
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"{url}/health")).status_code == 200:
                    return
            await asyncio.sleep(VLLM_POLL_S)
    raise PdClusterError(f"vLLM's server was not ready within {VLLM_START_S:g} s; its last lines:\n{last_lines(log)}")


async def _end_group(leader: asyncio.subprocess.Process) -> None:
    """Ends the process and its group, first by SIGTERM, then by force."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(leader.wait(), VLLM_STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    await leader.wait()


def last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()
    return "\n".join(line[:300] for line in lines[-NUM_LOG_LINES:])


def where(cores: Collection[int]) -> str:
    return f"core{'s' if len(cores) > 1 else ''} {as_list(cores)}"
