"""Requests rank processes from the preloader. Never imports torch.

A preloader is a process that has imported what rank processes need (`preload_process.py`) and forks them: a rank starts
within milliseconds, and ranks share the memory of the imports. The process that starts a preloader passes the
preloader's socket on to its workers, all of which may request forks. docs/protocol/membership.md says which process
ends when.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import importlib.util
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from pd_cluster.errors import PdClusterError

VARIABLE = "PD_CLUSTER_PRELOADER"  # holds the socket's number, for processes that may request forks
DEVICE_FILES = (  # drivers' files; the last two are for GPUs under WSL and on Jetson
    *("/dev/nvidiactl", "/dev/davinci_manager", "/dev/davinci0", "/dev/kfd", "/dev/dxg", "/dev/nvmap"),
)
KNOCK = b"fork"  # sent over the channel, with a socket for answers
MAX_NBYTES = 1 << 17  # the largest message, which is mostly an environment
FORK_TIMEOUT_S = 120.0  # the first imports from a cold disk may take a minute
CODE_TIMEOUT_S = 1.0  # how long to wait for the exit code of a process that has ended
END_TIMEOUT_S = 5.0
NAMESPACES = ("net", "mnt", "ipc", "pid", "user", "uts")
LIMITS = ("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_MEMLOCK", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_STACK", "RLIMIT_CORE")
# Variables that may differ between a preloader and a rank, because neither Python nor torch reads them at start.
OWN_PREFIXES = ("PD_CLUSTER_",)
OWN_NAMES = {
    *("RANK_TABLE_FILE_PATH", "GLOBAL_RANK_TABLE_FILE_PATH", "NODE_PORTS", "NODE_PORTS_FILE", "USE_OPENAI"),
    *("VLLM_API_KEY", "PYTHONUNBUFFERED", "RES_OPTIONS", "PWD", "OLDPWD", "_", "SHLVL", "PYTEST_CURRENT_TEST"),
}


class NotForked(PdClusterError):
    """The preloader is gone, or a fork would differ from a rank started by command line; start it by command line."""


class ForkRequest(msgspec.Struct, frozen=True):
    """Requests a fork. The message carries the lifeline, stdout, stderr and the files of `numbers`, in this order."""

    env: dict[str, str]
    surroundings: dict[str, str]
    folder: str  # the working directory
    cpus: list[int]  # CPUs that the rank may run on
    numbers: list[int]  # the numbers of its further files in the rank; the first is the channel to its parent


class ForkReady(msgspec.Struct, frozen=True, tag=True):
    """Invites the requester to send its request, which is then read at once, so that no file waits in a queue."""


class ForkStarted(msgspec.Struct, frozen=True, tag=True):
    """The rank runs. The same message carries its pidfd."""

    pid: int


class ForkRefused(msgspec.Struct, frozen=True, tag=True):
    reason: str


class ForkEnded(msgspec.Struct, frozen=True, tag=True):
    """The rank has ended with this exit code; a negative number is the signal that ended it."""

    code: int


Answer = ForkReady | ForkStarted | ForkRefused | ForkEnded


def forks_are_safe(device: str) -> bool:
    """Returns whether ranks of `--device` may be forked.

    Accelerators' drivers do not allow forks. Forks need pidfd_open (Linux 5.3).
    """
    if not has_no_driver(device):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def has_no_driver(device: str) -> bool:
    """Returns whether a rank of `--device` loads no driver. If torch_npu is installed, transformers imports it."""
    if importlib.util.find_spec("torch_npu") is not None:
        return False
    return device == "cpu" or (device == "auto" and not any(map(os.path.exists, DEVICE_FILES)))


def essential(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that must be equal for a rank and its preloader, so that a fork equals a spawned rank."""
    return {k: v for k, v in env.items() if k not in OWN_NAMES and not k.startswith(OWN_PREFIXES)}


def surroundings() -> dict[str, str]:
    """Returns what a process inherits besides its environment. A fork inherits it from the preloader."""
    found = {f"{name} namespace": os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}
    found["user"] = f"{os.getresuid()} {os.getresgid()} {sorted(os.getgroups())}"
    found["control group"] = Path("/proc/self/cgroup").read_text()
    found["niceness"] = str(os.getpriority(os.PRIO_PROCESS, 0))
    found["limits"] = str([resource.getrlimit(getattr(resource, name)) for name in LIMITS])
    return found


class Preloader:
    """The socket to a preloader. A preloader that `start` has created belongs to this process and ends with it."""

    def __init__(self, channel: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self.channel = channel
        self._process = process
        self.is_silent = False  # it has failed to answer, so this process does not wait for it again

    @classmethod
    def start(cls, env: Mapping[str, str], model: str = "") -> Preloader:
        """Starts a preloader, which reads ahead the files in the folder `model`. `env`: the environment of ranks."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo, theirs:
            undo.enter_context(ours)
            process = subprocess.Popen(
                [sys.executable, "-m", "pd_cluster.engine.start.preload_process", str(theirs.fileno()), model],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=dict(env),
                start_new_session=True,  # Ctrl-C must reach only this process's parent
            )
            undo.pop_all()
        return cls(ours, process)

    @classmethod
    def inherited(cls, env: Mapping[str, str]) -> Preloader | None:
        """Returns the preloader whose socket this process has inherited from the process that started it, if any."""
        try:
            number = int(env[VARIABLE])
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                return None
            channel = socket.socket(fileno=os.dup(number))
        except (KeyError, ValueError, OSError):
            return None
        if (channel.family, channel.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            return cls(channel)
        channel.close()  # the socket was not passed on, and another file has its number
        return None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the preloader runs; False if another process started it."""
        return self._process is not None and self._process.poll() is None

    def fileno(self) -> int:
        return self.channel.fileno()

    def close(self) -> None:
        """Ends the preloader if it belongs to this process. Ranks that it has forked continue."""
        self.channel.close()
        if self._process is None:
            return
        self._process.kill()  # it has no state to save
        self._process.wait()

    def ask(self, env: Mapping[str, str], files: Sequence[int]) -> Fork:
        """Requests a rank process that has `files` under the same numbers.

        The first file is the channel to its parent. Raises NotForked. The caller must keep the Fork: the rank ends when
        the Fork is closed or this process ends.
        """
        if self.is_silent:
            raise NotForked("the preloader did not answer an earlier request")
        try:
            wanted = ForkRequest(dict(env), surroundings(), os.getcwd(), sorted(os.sched_getaffinity(0)), list(files))
            request = msgspec.json.encode(wanted)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except (OSError, ValueError) as error:
            raise NotForked(f"this process's own surroundings cannot be read: {error}") from error
        fork = Fork(ours, request, files)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))]
        try:
            with theirs:
                self.channel.sendmsg([KNOCK], ancillary, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except OSError as error:
            fork.close()
            raise NotForked(f"the preloader is gone or too busy ({error.strerror})") from error
        return fork


class Fork:
    """A rank process that was requested from a preloader. A pidfd reports its end; the preloader reports its exit code.

    `held` is one end of a pipe. When all copies of this end are closed, the kernel kills the rank, even a stopped one.
    """

    def __init__(self, answers: socket.socket, request: bytes, files: Sequence[int]) -> None:
        """The caller keeps ownership of `files`."""
        self._answers = answers
        self._request = request
        self._lifeline, self.held = os.pipe()
        self._files = [os.dup(file) for file in (1, 2, *files)]
        self._pidfd = -1
        self.pid = 0
        self.exit_code: int | None = None  # also None if the process has ended and its code is unknown
        self.has_ended = False

    def fileno(self) -> int:
        """Returns a descriptor to wait for.

        Until the rank runs, it is readable when `accept` can read; after that, when the rank has ended.
        """
        return self._answers.fileno() if self._pidfd < 0 else self._pidfd

    def accept(self) -> bool:
        """Reads an answer that the preloader has sent. Returns True when the rank runs. Raises NotForked."""
        try:
            answer, files = self._read()
            if isinstance(answer, ForkReady):
                socket.send_fds(self._answers, [self._request], [self._lifeline, *self._files])
                self._drop_files()
                return False
            if isinstance(answer, ForkStarted):
                (self._pidfd,), self.pid = files, answer.pid
                return True
        except (OSError, ValueError) as error:
            self.close()
            raise NotForked(f"the preloader's answer cannot be read: {error}") from error
        self.close()
        raise NotForked(answer.reason if isinstance(answer, ForkRefused) else "the preloader has ended")

    def reap(self) -> None:
        """Reads the exit code of the ended process, unless the preloader is gone or stopped."""
        if self.has_ended:
            return
        self.has_ended = True
        self._answers.settimeout(CODE_TIMEOUT_S)
        with contextlib.suppress(OSError):
            answer, _ = self._read()
            if isinstance(answer, ForkEnded):
                self.exit_code = answer.code
        self.close()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal. Does nothing if the process has ended."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def wait(self, timeout_s: float) -> bool:
        """Waits until `fileno` is readable. Returns False after the timeout."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return bool(poll.poll(timeout_s * 1e3))

    def close(self) -> None:
        """Kills the process, if there is one. May be called again."""
        self._answers.close()
        self._drop_files()
        for fd in (self._pidfd, self.held):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self.held = -1

    def _drop_files(self) -> None:
        """Closes files that the rank has already received or no longer needs."""
        for fd in (*self._files, *(fd for fd in [self._lifeline] if fd >= 0)):
            os.close(fd)
        self._files, self._lifeline = [], -1

    def _read(self) -> tuple[Answer | None, list[int]]:
        """Reads an answer and its files; None at the end of file. Raises OSError."""
        data, files, _, _ = socket.recv_fds(self._answers, MAX_NBYTES, 1)
        return (msgspec.json.decode(data, type=Answer) if data else None), files


def die_with_lifeline(lifeline: int) -> None:
    """Makes the kernel kill this process once the other end of the pipe is closed, even if this process is stopped."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, 0)
    if poll.poll(0):  # it was closed before F_SETFL
        os._exit(1)
