"""Asks the preloader for rank processes. Never imports torch.

A preloader is a process that has imported what rank processes need (`engine/preload_process.py`) and forks them: a rank
is there within milliseconds, and ranks share the memory of what was imported. The process that starts one passes its
socket on to the workers that it starts; any of them may ask. docs/protocol.md says who ends when.
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

VARIABLE = "PD_CLUSTER_PRELOADER"  # the socket's number, in the processes that may ask
DEVICE_FILES = (  # their drivers' own; the last two are GPUs under WSL and on Jetson
    *("/dev/nvidiactl", "/dev/davinci_manager", "/dev/davinci0", "/dev/kfd", "/dev/dxg", "/dev/nvmap"),
)
KNOCK = b"fork"  # what is said on the channel, with a socket for answers
MAX_NBYTES = 1 << 17  # of a message: an environment, mostly
FORK_TIMEOUT_S = 120.0  # the first imports from a cold disk may take a minute
CODE_TIMEOUT_S = 1.0  # for the exit code, once the process has ended
END_TIMEOUT_S = 5.0
NAMESPACES = ("net", "mnt", "ipc", "pid", "user", "uts")
LIMITS = ("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_MEMLOCK", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_STACK", "RLIMIT_CORE")
# Variables that may differ between a preloader and a rank: neither Python nor torch reads them at start.
OWN_PREFIXES = ("PD_CLUSTER_",)
OWN_NAMES = {
    *("RANK_TABLE_FILE_PATH", "GLOBAL_RANK_TABLE_FILE_PATH", "NODE_PORTS", "NODE_PORTS_FILE", "USE_OPENAI"),
    *("VLLM_API_KEY", "PYTHONUNBUFFERED", "RES_OPTIONS", "PWD", "OLDPWD", "_", "SHLVL", "PYTEST_CURRENT_TEST"),
}


class NotForked(PdClusterError):
    """The preloader is gone, or cannot fork this rank as it would have been spawned: start it by command line."""


class ForkRequest(msgspec.Struct, frozen=True):
    """With it travel, in this order: the lifeline, stdout, stderr and what `numbers` are for."""

    env: dict[str, str]
    surroundings: dict[str, str]
    folder: str  # the working directory
    cpus: list[int]  # that it may run on
    numbers: list[int]  # which its files have in the rank; the first is its parent's channel


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The request may come: it is read at once, so that nothing of whoever asks waits in a queue."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """Its pidfd travels with it."""

    pid: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Negative: the signal that ended it."""

    code: int


Answer = Ready | Started | Refused | Ended


def forks_are_safe(device: str) -> bool:
    """Whether a rank of `--device` may be forked: drivers of accelerators forbid it.

    Needs pidfd_open, which Linux has since 5.3.
    """
    if not has_no_driver(device):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def has_no_driver(device: str) -> bool:
    """Whether a rank of `--device` has no driver in it: transformers imports torch_npu wherever it is installed."""
    if importlib.util.find_spec("torch_npu") is not None:
        return False
    return device == "cpu" or (device == "auto" and not any(map(os.path.exists, DEVICE_FILES)))


def essential(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that must be equal in a rank and its preloader, so that it equals a spawned rank."""
    return {k: v for k, v in env.items() if k not in OWN_NAMES and not k.startswith(OWN_PREFIXES)}


def surroundings() -> dict[str, str]:
    """Returns what a process inherits besides its environment: a fork inherits the preloader's."""
    found = {f"{name} namespace": os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}
    found["user"] = f"{os.getresuid()} {os.getresgid()} {sorted(os.getgroups())}"
    found["control group"] = Path("/proc/self/cgroup").read_text()
    found["niceness"] = str(os.getpriority(os.PRIO_PROCESS, 0))
    found["limits"] = str([resource.getrlimit(getattr(resource, name)) for name in LIMITS])
    return found


class Preloader:
    """The socket to a preloader; `start` makes one that belongs to this process, and ends with it."""

    def __init__(self, channel: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._channel = channel
        self._process = process
        self.is_silent = False  # it did not answer once: nobody waits for it again

    @classmethod
    def start(cls, env: Mapping[str, str], model: str = "") -> Preloader:
        """`env` is a rank's. What `model`, a folder, will need is read ahead."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "pd_cluster.engine.preload_process", str(theirs.fileno()), model],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=dict(env),
                start_new_session=True,  # Ctrl-C is for whoever started this process
            )
        return cls(ours, process)

    @classmethod
    def inherited(cls, env: Mapping[str, str]) -> Preloader | None:
        """Returns the preloader of the process that started this one, if it passed one on."""
        try:
            number = int(env[VARIABLE])
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                return None
            channel = socket.socket(fileno=os.dup(number))
        except (KeyError, ValueError, OSError):
            return None
        if (channel.family, channel.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            return cls(channel)
        channel.close()  # the file was not passed on, and its number is another's by now
        return None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs; False for a preloader of another process."""
        return self._process is not None and self._process.poll() is None

    def fileno(self) -> int:
        return self._channel.fileno()

    def close(self) -> None:
        """One that belongs to this process ends; ranks that it has forked go on."""
        self._channel.close()
        if self._process is None:
            return
        self._process.kill()  # it holds nothing that wants to be put away
        self._process.wait()

    def ask(self, env: Mapping[str, str], files: Sequence[int]) -> Fork:
        """A rank process that has `files` under the same numbers; the first is its parent's channel.

        Raises NotForked. This process must keep the Fork: when it is closed, or this process ends, so does the rank.
        """
        if self.is_silent:
            raise NotForked("the preloader has not answered before")
        try:
            wanted = ForkRequest(dict(env), surroundings(), os.getcwd(), sorted(os.sched_getaffinity(0)), list(files))
            request = msgspec.json.encode(wanted)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except (OSError, ValueError) as error:
            raise NotForked(f"what it needs cannot be told: {error}") from error
        fork = Fork(ours, request, files)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))]
        try:
            with theirs:
                self._channel.sendmsg([KNOCK], ancillary, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except OSError as error:
            fork.close()
            raise NotForked(f"the preloader is gone or has too much to do ({error.strerror})") from error
        return fork


class Fork:
    """A rank process that was asked of a preloader. Its end is seen by a pidfd; its code is what the preloader says.

    `held` is one end of a pipe. When all of its kind are closed the kernel kills the rank, even one that is stopped.
    """

    def __init__(self, answers: socket.socket, request: bytes, files: Sequence[int]) -> None:
        """`files` stay their owner's."""
        self._answers = answers
        self._request = request
        self._lifeline, self._held = os.pipe()
        self._files = [os.dup(file) for file in (1, 2, *files)]
        self._pidfd = -1
        self.pid = 0
        self.exit_code: int | None = None  # None, too, when nobody can tell
        self.has_ended = False

    def fileno(self) -> int:
        """Readable when `accept` has something to read; once the rank runs, when it has ended."""
        return self._answers.fileno() if self._pidfd < 0 else self._pidfd

    def accept(self) -> bool:
        """Reads an answer of the preloader, which is there. True when the rank runs. Raises NotForked."""
        try:
            answer, files = self._read()
            if isinstance(answer, Ready):
                socket.send_fds(self._answers, [self._request], [self._lifeline, *self._files])
                self._drop_files()
                return False
            if isinstance(answer, Started):
                (self._pidfd,), self.pid = files, answer.pid
                return True
        except (OSError, ValueError) as error:
            self.close()
            raise NotForked(f"the preloader's answer cannot be read: {error}") from error
        self.close()
        raise NotForked(answer.reason if isinstance(answer, Refused) else "the preloader has ended")

    def reap(self) -> None:
        """Once it has ended: learns how. A preloader that is gone, or stopped, can't say it."""
        if self.has_ended:
            return
        self.has_ended = True
        self._answers.settimeout(CODE_TIMEOUT_S)
        with contextlib.suppress(OSError):
            answer, _ = self._read()
            if isinstance(answer, Ended):
                self.exit_code = answer.code
        self.close()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Also one that has ended."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def wait(self, timeout_s: float) -> bool:
        """Until `fileno` is readable. False when it is not in time."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return bool(poll.poll(timeout_s * 1e3))

    def close(self) -> None:
        """The process, if there is one, is killed. Once is enough."""
        self._answers.close()
        self._drop_files()
        for fd in (self._pidfd, self._held):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self._held = -1

    def _drop_files(self) -> None:
        """Those that are the rank's by now, or nobody's."""
        for fd in (*self._files, *(fd for fd in [self._lifeline] if fd >= 0)):
            os.close(fd)
        self._files, self._lifeline = [], -1

    def _read(self) -> tuple[Answer | None, list[int]]:
        """None at the end of file. Raises OSError."""
        data, files, _, _ = socket.recv_fds(self._answers, MAX_NBYTES, 1)
        return (msgspec.json.decode(data, type=Answer) if data else None), files


def die_with_lifeline(lifeline: int) -> None:
    """The kernel kills this process when nobody holds the other end of the pipe any more, even while it is stopped."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, 0)
    if poll.poll(0):  # before the kernel was asked
        os._exit(1)
