"""Rank processes forked by a preloader: what they inherit, what ends them, and how they run without it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pd_cluster.cluster.processes.rank_process import environment
from pd_cluster.engine.start import preloader as preloading
from pd_cluster.engine.start.preloader import Fork, NotForked, Preloader, forks_are_safe
from tests.support.cluster import children_of, shared_preloader

WAIT_S = 60.0  # includes the imports
POLL_S = 0.01

pytestmark = pytest.mark.skipif(not forks_are_safe("auto"), reason="ranks are spawned on this machine")


@pytest.fixture
def preloader() -> Preloader:
    return shared_preloader()


@pytest.fixture
def own() -> Iterator[Preloader]:
    """Yields a preloader that a test may kill."""
    made = Preloader.start(env(), "")
    yield made
    with contextlib.suppress(ProcessLookupError):
        os.kill(made.pid, signal.SIGCONT)
    made.close()


def env() -> dict[str, str]:
    return environment(int(os.environ.get("OMP_NUM_THREADS", 0)) or 1, os.environ)


class Rank:
    """A forked rank that waits for a configuration, which is never sent."""

    def __init__(self, preloader: Preloader, *files: int, **variables: str) -> None:
        self.channel, theirs = socket.socketpair()
        with theirs:
            self.number = theirs.fileno()
            self.fork: Fork = preloader.ask({**env(), **variables}, [self.number, *files])
        try:
            assert self.fork.wait(WAIT_S)
            while not self.fork.accept():
                assert self.fork.wait(WAIT_S)
            until(lambda: is_gone(self.fork.pid) or waits_for_its_configuration(self.fork.pid))
        except BaseException:
            self.close()
            raise

    def code(self) -> int | None:
        assert self.fork.wait(WAIT_S)
        self.fork.reap()
        assert self.fork.has_ended
        return self.fork.exit_code

    def close(self) -> None:
        self.channel.close()
        self.fork.close()

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(POLL_S)


def waits_for_its_configuration(pid: int) -> bool:
    return "State:\tS" in Path(f"/proc/{pid}/status").read_text()


def is_gone(pid: int) -> bool:
    """Whether the process has ended; a zombie counts as ended."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


# ---- what a rank has


def test_a_rank_has_its_own_files_one_thread_and_no_other(preloader: Preloader, tmp_path: Path) -> None:
    """It runs beside another rank, whose files it could have inherited."""
    with (tmp_path / "file").open("w") as file, Rank(preloader) as other, Rank(preloader, file.fileno()) as rank:
        pid = rank.fork.pid
        numbers = {int(each.name): os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
        lifeline = max(numbers)
        assert set(numbers) == {0, 1, 2, rank.number, file.fileno(), lifeline}
        assert numbers[file.fileno()] == str(tmp_path / "file")
        assert (numbers[0], numbers[1]) == ("/dev/null", os.readlink("/proc/self/fd/1"))
        assert numbers[rank.number].startswith("socket:")
        assert numbers[lifeline].startswith("pipe:")
        assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 1
        assert os.readlink(f"/proc/{pid}/cwd") == str(Path.cwd())
        assert os.sched_getaffinity(pid) == os.sched_getaffinity(0)
        assert other.fork.pid in children_of(preloader.pid)


# ---- what ends it


def test_the_kernel_ends_a_stopped_rank_with_its_parent(preloader: Preloader) -> None:
    with Rank(preloader) as rank:
        os.kill(rank.fork.pid, signal.SIGSTOP)
        os.close(rank.fork._held)  # as at this process's end
        rank.fork._held = -1
        assert rank.code() == -signal.SIGKILL
    until(lambda: rank.fork.pid not in children_of(preloader.pid))  # waits until it is reaped


def test_how_it_ended_is_told(preloader: Preloader) -> None:
    with Rank(preloader) as rank:
        rank.fork.kill(signal.SIGABRT)
        assert rank.code() == -signal.SIGABRT
        rank.fork.kill()  # it has ended already
    with Rank(preloader) as rank:
        rank.channel.close()  # closes its parent's end
        assert rank.code() == 1
    with Rank(preloader) as rank:
        rank.channel.sendall(b"no configuration\n")
        assert rank.code() == 1, "expected the same as for a rank started by command line"


STARTER = r"""
import os, signal, socket, time
from pd_cluster.cluster.processes.rank_process import environment
from pd_cluster.engine.start.preloader import Preloader
env = environment(1, os.environ)
preloader = Preloader.start(env, "")
ours, theirs = socket.socketpair()
fork = preloader.ask(env, [theirs.fileno()])
assert fork.wait(60)
while not fork.accept():
    assert fork.wait(60)
while "State:\tS" not in open(f"/proc/{fork.pid}/status").read():
    time.sleep(0.01)  # until it waits for its configuration
os.kill(fork.pid, signal.SIGSTOP)
print(preloader.pid, fork.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_outlives_a_killed_starter() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", STARTER], capture_output=True, text=True, timeout=WAIT_S, cwd=root)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    until(lambda: all(map(is_gone, pids)))


# ---- what the preloader refuses


def test_another_environment_is_refused_by_name(preloader: Preloader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differing variables and, for example, a differing network namespace are named."""
    with pytest.raises(NotForked, match="the preloader's environments differ in MALLOC_ARENA_MAX, OMP_NUM_THREADS"):
        Rank(preloader, MALLOC_ARENA_MAX="1", OMP_NUM_THREADS="17")
    with Rank(preloader, PD_CLUSTER_ANYTHING="1", NODE_PORTS="1,2"):
        pass
    num_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotForked, match="own surroundings cannot be read"):
        preloader.ask({"A": "\udcff"}, [0])
    assert len(os.listdir("/proc/self/fd")) == num_files
    found = preloading.surroundings()
    assert "net:" in found["net namespace"]
    monkeypatch.setattr(preloading, "surroundings", lambda: {**found, "net namespace": "net:[1]", "niceness": "-20"})
    with pytest.raises(NotForked, match="the rank and the preloader differ in net namespace, niceness"):
        Rank(preloader)


def test_bad_requests_are_refused_and_disturb_nobody(preloader: Preloader) -> None:
    empty = b'{"env": {}, "surroundings": {}, "folder": "", "cpus": [], "numbers": []}'
    preloader._channel.send(preloading.KNOCK)  # a request without a socket for the answer
    for request in (b"{", empty, b""):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            ours.settimeout(WAIT_S)
            socket.send_fds(preloader._channel, [preloading.KNOCK], [theirs.fileno()])
            theirs.close()
            assert b"Ready" in ours.recv(preloading.MAX_NBYTES)
            if not request:  # the client ends before it sends its request
                continue
            ours.send(request)
            assert b"Refused" in ours.recv(preloading.MAX_NBYTES)
    with Rank(preloader):
        pass


def test_one_that_nobody_waits_for_any_more_is_ended(preloader: Preloader) -> None:
    before = {*children_of(preloader.pid)}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        preloader.ask(env(), [theirs.fileno()]).close()
        with Rank(preloader) as rank:  # requests are served in order, so the earlier fork has been made
            until(lambda: {*children_of(preloader.pid)} <= before | {rank.fork.pid})


# ---- without it


def test_ranks_go_on_when_it_is_stopped_or_killed_and_others_must_be_spawned(
    own: Preloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the preloader stopped or killed, running ranks lose only their exit codes; new ranks are refused."""
    monkeypatch.setattr(preloading, "CODE_TIMEOUT_S", 0.05)
    ours, theirs = socket.socketpair()
    with Rank(own) as rank, Rank(own) as other, ours, theirs:
        os.kill(own.pid, signal.SIGSTOP)
        asked = own.ask(env(), [theirs.fileno()])
        assert not asked.wait(0)
        nothing_of_whoever_asks_waits_in(own)
        rank.fork.kill()
        assert rank.code() is None
        os.kill(own.pid, signal.SIGKILL)
        until(lambda: not own.is_alive)
        assert asked.wait(WAIT_S)
        with pytest.raises(NotForked, match="has ended"):
            asked.accept()
        assert not other.fork.wait(0)
        with pytest.raises(NotForked, match="the preloader is gone or too busy"):
            Rank(own)
        other.fork.kill()
        assert other.code() is None  # its exit code is unknown


def nothing_of_whoever_asks_waits_in(own: Preloader) -> None:
    """Asserts that no file sent to it stays queued, as it would stay open, and that a full socket refuses at once."""
    reader, writer = os.pipe()
    forks: list[Fork] = []

    def ask_until_it_is_full() -> None:
        while len(forks) < 100_000:
            forks.append(own.ask(env(), [writer]))

    with pytest.raises(NotForked, match="too busy"):
        ask_until_it_is_full()
    for fork in forks:
        fork.close()
    os.close(writer)
    os.set_blocking(reader, False)
    assert os.read(reader, 1) == b""  # end of file at once
    os.close(reader)


# ---- without a preloader


def test_drivers_and_old_kernels_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:  # descriptors that are not a preloader's
        for value in ("x", "100000", str(other.fileno())):
            assert Preloader.inherited({preloading.VARIABLE: value}) is None
    assert Preloader.inherited({}) is None
    for device, files, is_safe in (
        *(("cpu", ["/"], True), ("auto", [], True), ("auto", ["/"], False), ("cuda", [], False), ("npu", [], False)),
    ):
        monkeypatch.setattr(preloading, "DEVICE_FILES", files)
        assert forks_are_safe(device) == is_safe

    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert not forks_are_safe("cpu")
