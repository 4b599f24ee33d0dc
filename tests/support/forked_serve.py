"""Runs `pd-cluster serve` in forks of a process that has imported it, for a tenth of a command line's CPU time.

A fork has its own environment, working directory and files, and runs the command's own main(), so it ends as the
command does. The forking process is `python -m tests.support.forked_serve FD`; it ends with the test process.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pd_cluster.cluster.processes.launch_preloader import DIE_WITH_PARENT
from pd_cluster.engine.start.preloader import essential, surroundings

COMMAND = [sys.executable, "-m", "pd_cluster"]  # command lines that begin so can run in a fork
MODULES = (  # import everything that schedulers and workers' parents need at their start
    *("pd_cluster.commands.cli", "pd_cluster.commands.serve_command", "pd_cluster.api.scheduler_app"),
    *("pd_cluster.api.worker_app", "pd_cluster.extras.key_file.key_store", "pd_cluster.kv.open_stores", "uvloop"),
    *("pd_cluster.cluster.members.rank_table_reader", "pd_cluster.service.concurrency.interpreter_tuning"),
    *("pd_cluster.extras.dashboard.dashboard_extension", "pd_cluster.extras.dashboard.public_dashboard"),
    "httpcore",
)
MAX_NBYTES = 1 << 17
START_TIMEOUT_S = 120.0
POLL_S = 0.01


class ForkedServe:
    """One `pd-cluster serve`, with the part of subprocess.Popen's interface that tests use."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: int, files: Sequence[int]) -> None:
        """`files` keep their descriptor numbers in the process. Its output goes to the descriptor `log`."""
        self._command, self.returncode = command, None
        self._said = b""  # bytes received so far: its pid, later its exit code
        self._status, theirs = os.pipe()
        os.set_blocking(self._status, False)
        forker = _forker()
        if DIE_WITH_PARENT in env:
            env = {**env, DIE_WITH_PARENT: str(forker.pid)}
        wanted = {"words": command[len(COMMAND) :], "env": dict(env), "folder": os.getcwd(), "numbers": list(files)}
        wanted["cpus"] = list(os.sched_getaffinity(0))
        try:
            socket.send_fds(forker.channel, [json.dumps(wanted).encode()], [theirs, log, *files])
        finally:
            os.close(theirs)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while b"\n" not in self._said:
            if self._is_over() or time.monotonic() > deadline_s:
                raise AssertionError(f"no process was forked: {' '.join(command)}")
            select.select([self._status], [], [], 1.0)
        self.pid = int(self._said.partition(b"\n")[0])

    def _is_over(self) -> bool:
        """Whether the process has ended, or the forking process has ended without reporting."""
        try:
            while more := os.read(self._status, 100):
                self._said += more
        except BlockingIOError:
            return False
        return True

    def poll(self) -> int | None:
        if self.returncode is None and self._is_over():
            code = self._said.split(b"\n")[1]
            self.returncode = int(code) if code else -signal.SIGKILL
            os.close(self._status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline_s = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(list(self._command), timeout or 0.0)
            select.select([self._status], [], [], POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Forker:
    """The forking process, and the socket that takes this process's requests."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.support.forked_serve", str(theirs.fileno())]
            root = Path(__file__).parents[2]
            self._process = subprocess.Popen(command, cwd=root, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.pid = self._process.pid


def _forker() -> _Forker:
    """Returns the forking process for this process's current variables, limits and namespaces."""
    key = str((sorted(essential(os.environ).items()), sorted(surroundings().items())))
    if key not in _forkers:
        _forkers[key] = _Forker()
    return _forkers[key]


_forkers: dict[str, _Forker] = {}


def serve_forks(channel: socket.socket) -> list[str]:
    """Forks on request until the test process ends, then exits. In a fork, returns the words of its command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # so that it can still report how its forks end
    running: dict[int, tuple[int, int]] = {}  # pidfd -> pid, descriptor for its exit code
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in running:
                pid, status = running.pop(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.write(status, b"%d" % code)
                poll.unregister(fd)
                os.close(fd)
                os.close(status)
                continue
            data, files, _, _ = socket.recv_fds(channel, MAX_NBYTES, 64)
            if not data:
                sys.exit()
            request = json.loads(data)
            if not (pid := os.fork()):
                _become(request, files[1:])
                return [str(word) for word in request["words"]]
            status, *others = files
            os.write(status, b"%d\n" % pid)
            running[pidfd := os.pidfd_open(pid)] = pid, status
            poll.register(pidfd, select.POLLIN)
            for each in others:
                os.close(each)


def _become(request: dict[str, object], files: list[int]) -> None:
    """Sets up this fork as requested. `files`: its log, then the files whose numbers are kept."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log, *passed = files
    wanted = {1: log, 2: log, **dict(zip(request["numbers"], passed, strict=True))}
    beyond = max(*wanted, *map(int, os.listdir("/proc/self/fd"))) + 1
    moved = {number: fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, beyond) for number, file in wanted.items()}
    os.closerange(3, beyond)
    for number, file in moved.items():
        os.dup2(file, number)
        os.close(file)
    os.sched_setaffinity(0, request["cpus"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    gc.enable()


def main() -> None:
    for name in MODULES:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1
    gc.disable()
    gc.freeze()  # keeps this memory shared among the forks
    words = serve_forks(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = [str(Path(sys.modules["pd_cluster"].__file__ or "").with_name("__main__.py")), *words]
    sys.modules["pd_cluster.commands.cli"].main()


if __name__ == "__main__":
    main()
