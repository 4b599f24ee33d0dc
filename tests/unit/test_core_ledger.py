"""The ledger of cores with real processes: which ranks compute, and what happens when one ends or is stopped."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pd_cluster.devices.core_ledger import LENT_AFTER_S, CoreLedger, ledger_name

NUM_CORES = 8
RANK = """
import sys
from pathlib import Path
from pd_cluster.devices.core_ledger import CoreLedger

path, index, size = sys.argv[1:]
now_s = 0.0
ledger = CoreLedger(Path(path), int(index), int(size), 8, lambda: now_s)
ledger.open()
print("open", flush=True)
for line in sys.stdin:
    name, now = line.split()
    now_s = float(now)
    getattr(ledger, name)()
    print(ledger.num_threads(), flush=True)
"""


TIMES_S = itertools.count(100.0)  # default times of ranks' calls, 1 s apart, so that every pause is a long one


class Rank:
    """A rank in a separate process that executes the test's calls."""

    def __init__(self, path: Path, index: int, size: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(path), str(index), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "open"

    def ask(self, what: str, at_s: float | None = None) -> int:
        """Calls `begin`, `end` or `num_threads` in the process; returns the number of threads that it may use."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} {next(TIMES_S) if at_s is None else at_s}\n")
        self.process.stdin.flush()
        return int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def stand_still(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


Start = Callable[[int], Rank]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cores"


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    """Starts rank `index` of two."""
    with contextlib.ExitStack() as ending:

        def make(index: int) -> Rank:
            rank = Rank(path, index, 2)
            ending.callback(rank.kill)
            return rank

        yield make


def test_a_rank_that_rests_lends_its_cores_until_it_computes(start: Start) -> None:
    one = start(0)
    assert one.ask("begin") == NUM_CORES // 2, "cores of a rank that never started must not be lent"
    one.ask("end")
    other = start(1)
    assert one.ask("begin") == NUM_CORES
    assert other.ask("begin") == NUM_CORES // 2
    assert one.ask("num_threads") == NUM_CORES // 2
    assert one.ask("end") == NUM_CORES // 2  # the other rank computes
    assert other.ask("num_threads") == NUM_CORES
    one.stand_still()
    assert other.ask("begin") == NUM_CORES


def test_a_rank_that_pauses_between_steps_keeps_its_cores(start: Start) -> None:
    one, other = start(0), start(1)
    one.ask("begin", at_s=1.0)
    one.ask("end", at_s=2.0)
    assert other.ask("begin", at_s=2.0) == NUM_CORES // 2
    assert other.ask("num_threads", at_s=2.0 + 0.9 * LENT_AFTER_S) == NUM_CORES // 2
    assert other.ask("num_threads", at_s=2.0 + 1.1 * LENT_AFTER_S) == NUM_CORES
    assert one.ask("begin", at_s=2.5) == NUM_CORES // 2
    one.ask("end", at_s=2.6)
    assert other.ask("num_threads", at_s=2.6) == NUM_CORES // 2


@pytest.mark.parametrize("stands_still", [False, True])
def test_a_killed_rank_computes_no_more(start: Start, stands_still: bool) -> None:
    """The kernel releases a killed rank's lock, even if it was stopped. Its cores then belong to its successor."""
    one, other = start(0), start(1)
    one.ask("begin")
    assert other.ask("begin") == NUM_CORES // 2
    if stands_still:
        one.stand_still()
    one.kill()
    assert other.ask("num_threads") == NUM_CORES // 2
    successor = start(0)
    assert other.ask("num_threads") == NUM_CORES
    assert successor.ask("begin") == NUM_CORES // 2
    assert other.ask("num_threads") == NUM_CORES // 2


def test_a_rank_that_stands_still_in_a_step_keeps_its_share_and_no_more(start: Start) -> None:
    one, other = start(0), start(1)
    assert one.ask("begin") == NUM_CORES
    one.stand_still()
    assert other.ask("begin") == NUM_CORES // 2
    one.process.send_signal(signal.SIGCONT)
    assert one.ask("num_threads") == NUM_CORES // 2
    assert one.ask("end") == NUM_CORES // 2
    assert other.ask("num_threads") == NUM_CORES


@pytest.mark.parametrize("computes", [True, False])
def test_a_predecessor_that_has_not_ended_yet_hinders_nobody(start: Start, computes: bool) -> None:
    """A predecessor may still compute or rest; while its successor computes, no rank borrows the successor's cores."""
    before, other = start(0), start(1)
    if computes:
        before.ask("begin")
    successor = start(0)
    assert successor.ask("begin") == NUM_CORES
    assert other.ask("begin") == NUM_CORES // 2
    before.kill()
    assert other.ask("num_threads") == NUM_CORES // 2
    assert successor.ask("begin") == NUM_CORES // 2
    successor.ask("end")
    assert other.ask("num_threads") == NUM_CORES
    assert successor.ask("begin") == NUM_CORES // 2


@pytest.mark.parametrize("when", ["begin", "end", "num_threads"])
def test_a_ledger_that_fails_later_ends_the_lending_alone(
    path: Path, when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the lock fails later, as on a network file system, lending ends and the rank continues with its share."""
    ranks = [CoreLedger(path, index, 2, NUM_CORES, lambda: next(TIMES_S)) for index in range(2)]
    for rank in ranks:
        rank.open()
    if when == "end":
        ranks[0].begin()

    def fail(*_: object) -> bytes:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as broken:
        broken.setattr(fcntl, "fcntl", fail)
        getattr(ranks[0], when)()
    assert "keeps its own cores from now on" in caplog.text
    assert "No locks available" in caplog.text
    assert ranks[0].num_threads() == NUM_CORES // 2
    ranks[0].begin()
    ranks[0].end()
    assert ranks[1].num_threads() == NUM_CORES // 2
    ranks[1].close()


def test_random_orders_divide_the_cores(path: Path) -> None:
    """Each computing rank may use the cores divided by the number of computing ranks, but at least its share."""
    rng, size = random.Random(5), 9  # one rank more than cores
    ranks = [CoreLedger(path, index, size, NUM_CORES, lambda: next(TIMES_S)) for index in range(size)]
    for rank in ranks:
        rank.open()
    busy: set[int] = set()
    for _ in range(300):
        index = rng.randrange(size)
        if rng.random() < 0.5:
            ranks[index].begin()
            busy.add(index)
        else:
            ranks[index].end()
            busy.discard(index)
        for at, rank in enumerate(ranks):
            assert rank.num_threads() == max(1, NUM_CORES // len(busy | {at}))
    for rank in ranks:
        rank.close()
        rank.close()


def test_the_file_is_for_its_owner_alone_and_no_link_is_followed(path: Path) -> None:
    ledger = CoreLedger(path, 0, 2, NUM_CORES)
    ledger.open()
    assert path.stat().st_mode & 0o777 == 0o600
    link = path.with_name("link")
    link.symlink_to(path)
    refused = CoreLedger(link, 1, 2, NUM_CORES)
    with pytest.raises(OSError, match="symbolic links"):
        refused.open()
    assert refused.num_threads() == NUM_CORES // 2


def test_processes_that_may_use_other_cores_have_another_ledger() -> None:
    command = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    command += "from pd_cluster.devices.core_ledger import ledger_name; print(ledger_name())"
    other = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout.strip()
    assert (other == ledger_name()) == (len(os.sched_getaffinity(0)) == 1)
