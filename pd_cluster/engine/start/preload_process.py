"""Preloader: `python -m pd_cluster.engine.start.preload_process FD MODEL`. Imports what ranks need, and forks them.

This process has one thread, no model and no device. A forked rank receives its configuration from its parent, as if it
had been started by command line. The preloader ends when all other ends of FD are closed or the process that started it
ends.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from pd_cluster.checkpoints.json_files import read_json
from pd_cluster.engine.start.preloader import (
    MAX_NBYTES,
    Answer,
    ForkEnded,
    ForkReady,
    ForkRefused,
    ForkRequest,
    ForkStarted,
    die_with_lifeline,
    essential,
    surroundings,
)
from pd_cluster.engine.start.rank_main import die_with_parent, end, import_engine, run
from pd_cluster.errors import ConfigError

MOST_FILES = 64
LIFELINE, STDOUT, STDERR = range(3)  # positions in a request's files; the files of `numbers` follow
REQUEST_TIMEOUT_S = 5.0  # how long to wait for a request after its sender was invited
READAHEAD_NBYTES = 4 << 30


def main(fd: int, model: str) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    environment = dict(os.environ)  # a copy, because imports add variables
    compiling = _compile_kernels(fd)
    _read_ahead(model)
    gc.disable()
    import_engine(light=True)
    _import_model(model)
    gc.freeze()  # so that all ranks share the memory of imported objects
    if compiling:
        os.waitpid(compiling, 0)
    _Forks(socket.socket(fileno=fd), environment).run()


def _compile_kernels(fd: int) -> int:
    """Compiles kernels in a child process during the imports. Returns its pid; 0 if no kernels are needed.

    Errors are ignored here, because ranks report them.
    """
    from pd_cluster.native import build

    if not build.are_wanted():
        return 0
    pid = os.fork()
    if not pid:
        die_with_parent()
        os.close(fd)
        with contextlib.suppress(build.KernelsUnavailable, OSError):
            build.build(build.FLAGS)
        os._exit(0)
    return pid


def _read_ahead(model: str) -> None:
    """Makes the kernel read the weights into its cache during Python's imports."""
    left = READAHEAD_NBYTES
    with contextlib.suppress(OSError, ConfigError):
        for file in sorted(Path(model).expanduser().glob("*.safetensors")):
            with file.open("rb") as weights:
                size = min(os.fstat(weights.fileno()).st_size, left)
                os.posix_fadvise(weights.fileno(), 0, size, os.POSIX_FADV_WILLNEED)
                left -= size


def _import_model(model: str) -> None:
    """Imports the modules of the model's architecture.

    Ignores a folder that cannot be read: ranks download or report it.
    """
    from pd_cluster.model.loading.light_transformers import import_architecture

    with contextlib.suppress(OSError, ConfigError):
        import_architecture(str(read_json(Path(model).expanduser() / "config.json").get("model_type", "")))


class _Forks:
    """Answers each request on the request's own socket: first when the rank runs, and again when it has ended."""

    def __init__(self, channel: socket.socket, environment: dict[str, str]) -> None:
        self._channel = channel
        self._environment = essential(environment)
        self._added = {k: v for k, v in os.environ.items() if k not in environment}
        self._answers: dict[int, socket.socket] = {}  # pid -> socket, of running ranks
        self._woken, wake = socket.socketpair()
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wake = wake

    def run(self) -> None:
        """Serves requests until all processes have closed the other end of the channel."""
        poll = select.poll()
        for each in (self._channel, self._woken):
            poll.register(each, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._woken.fileno():
                    self._woken.recv(4096)
                    self._reap()
                elif not self._serve():
                    return

    def _serve(self) -> bool:
        """Serves one request. Returns False at the end of file."""
        data, sockets, _, _ = socket.recv_fds(self._channel, MAX_NBYTES, 1)
        if not data:
            return False
        if not sockets:  # there was no free descriptor; the requester reads the end of file
            return True
        answers = socket.socket(fileno=sockets[0])
        files: list[int] = []
        try:
            _tell(answers, ForkReady())
            answers.settimeout(REQUEST_TIMEOUT_S)
            data, files, _, _ = socket.recv_fds(answers, MAX_NBYTES, MOST_FILES)
            request = msgspec.json.decode(data, type=ForkRequest)
            if reason := self._reason_against(request, files):
                _tell(answers, ForkRefused(reason))
                answers.close()
            else:
                self._fork(request, files, answers)
        except (msgspec.DecodeError, OSError) as error:
            _tell(answers, ForkRefused(f"the preloader could not fork: {error}"))
            answers.close()
        finally:
            for file in files:
                os.close(file)
        return True

    def _reason_against(self, request: ForkRequest, files: list[int]) -> str:
        if request.surroundings != (own := surroundings()):
            names = {name for name, _ in request.surroundings.items() ^ own.items()}
            return f"the rank and the preloader differ in {', '.join(sorted(names))}"
        names = {name for name, _ in essential(request.env).items() ^ self._environment.items()}
        if names:
            return f"the rank's and the preloader's environments differ in {', '.join(sorted(names)[:5])}"
        if (num_threads := len(os.listdir("/proc/self/task"))) != 1:
            return f"the preloader has {num_threads} threads"
        if len(files) != STDERR + 1 + len(request.numbers) or not request.numbers:
            return f"{len(files)} files came with {len(request.numbers)} numbers"
        return ""

    def _fork(self, request: ForkRequest, files: list[int], answers: socket.socket) -> None:
        pid = os.fork()
        if not pid:
            _run_as_rank(request, files, self._added)
        try:
            pidfd = os.pidfd_open(pid)  # not reaped yet, so the pid is still that of the rank
        except OSError:
            os.kill(pid, signal.SIGKILL)
            raise
        try:
            _tell(answers, ForkStarted(pid), pidfd)
            self._answers[pid] = answers
        finally:
            os.close(pidfd)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if (answers := self._answers.pop(pid, None)) is not None:
                with answers:
                    _tell(answers, ForkEnded(os.waitstatus_to_exitcode(status)))


def _tell(answers: socket.socket, answer: Answer, *files: int) -> None:
    """Sends an answer. Ignores that the requester may be gone."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    with contextlib.suppress(OSError):
        answers.sendmsg([msgspec.json.encode(answer)], ancillary, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


def _run_as_rank(request: ForkRequest, files: list[int], added: dict[str, str]) -> NoReturn:
    """Runs the rank; called in the forked process. `added`: environment variables that imports have set."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_lifeline(_take_files(request.numbers, files))
        os.sched_setaffinity(0, request.cpus)
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update(added | request.env)
        code = run(request.numbers[0])
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        end(code)


def _take_files(numbers: list[int], files: list[int]) -> int:
    """Gives each file the requested number and closes all others. Returns the lifeline's number."""
    wanted = {1: files[STDOUT], 2: files[STDERR], **dict(zip(numbers, files[STDERR + 1 :], strict=True))}
    lifeline = max([*numbers, *files, 2]) + 1
    wanted[lifeline] = files[LIFELINE]
    beyond = lifeline + 1
    moved = {number: fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, beyond) for number, file in wanted.items()}
    os.closerange(3, beyond)
    for number, file in moved.items():
        os.dup2(file, number, inheritable=number <= 2)
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= beyond:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(int(name))
    return lifeline


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
