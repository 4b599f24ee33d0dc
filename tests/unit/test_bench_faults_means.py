"""The faults of `bench faults` on small processes started here, so that each one is seen to work."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from benchmarks.faults import bench as faults
from benchmarks.faults import clock as faults_clock
from benchmarks.faults.clock import Clock
from benchmarks.faults.cut import between, check_can_cut, cut
from benchmarks.faults.disk import Disk
from benchmarks.faults.ground import ORDINARY, standing_on
from benchmarks.faults.list import ALL_FAULTS
from benchmarks.faults.means import no_more_descriptors
from benchmarks.faults.report import Run, is_right
from benchmarks.faults.terms import Seen
from benchmarks.load import Answer
from pd_cluster.client.streaming import Sample
from pd_cluster.errors import ConfigError, PdClusterError

WAIT_S = 60.0
CONNECTS = """
import socket, sys
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("there", flush=True)
print("end of file" if peer.recv(1) == b"" else "data", flush=True)
"""
OPENS = """
import sys
for line in sys.stdin:
    try:
        open("/dev/null").close()
        print("opened", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""
TELLS_TIME = """
import sys, threading, time
for line in sys.stdin:
    before_s = time.monotonic()
    threading.Event().wait(0.01)
    print(time.time(), time.monotonic(), time.monotonic() - before_s, flush=True)
"""


@contextmanager
def child(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert wait([process.stdout], WAIT_S), "it says nothing"
    return process.stdout.readline().strip()


def asked(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return line_of(process)


# ---- links


def test_a_cut_ends_the_connection_at_both_ends_and_no_other() -> None:
    check_can_cut()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        with child(CONNECTS, port) as one, child(CONNECTS, port) as other:
            accepted = [listener.accept()[0] for _ in range(2)]
            assert (line_of(one), line_of(other)) == ("there", "there")
            ends = between([one.pid], [os.getpid()])
            assert len(ends) == 1
            assert between([one.pid], [other.pid]) == []
            assert cut(ends) == 1
            assert line_of(one) == "end of file"
            ended = wait(list(accepted), WAIT_S)
            assert len(ended) == 1
            assert ended[0].recv(1) == b""
            assert between([one.pid], [os.getpid()]) == []
            assert len(between([other.pid], [os.getpid()])) == 1
            for each in accepted:
                each.close()


def test_a_connection_of_a_process_that_has_ended_is_left_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with child(CONNECTS, str(listener.getsockname()[1])) as process:
            accepted, _ = listener.accept()
            assert line_of(process) == "there"
            ends = between([process.pid], [os.getpid()])
        accepted.close()
        assert (len(ends), cut(ends)) == (1, 0)


# ---- descriptors


def test_descriptors_run_out_and_come_back() -> None:
    with child(OPENS) as process:
        assert asked(process) == "opened"
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        with no_more_descriptors([process.pid]):
            assert asked(process) == "Too many open files"
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == before
        assert asked(process) == "opened"


# ---- clocks


def test_clocks_move_for_all_or_for_one_and_waits_stay_as_long() -> None:
    clock = Clock()
    if clock.problem():
        pytest.skip(clock.problem())
    with standing_on(clock), child(TELLS_TIME) as one, child(TELLS_TIME) as other:

        def moved(process: subprocess.Popen[str]) -> tuple[int, int]:
            """Returns the offsets of the wall and the monotonic clock, in minutes, from this process's own."""
            wall_s, monotonic_s, waited_s = map(float, asked(process).split())
            assert waited_s < WAIT_S
            return round((wall_s - time.time()) / 60), round((monotonic_s - time.monotonic()) / 60)

        assert (moved(one), moved(other)) == ((0, 0), (0, 0))
        clock.move(-3600.0)
        assert (moved(one), moved(other)) == ((-60, 0), (-60, 0))
        clock.move(3600.0, 120.0)
        clock.move(0.0, 180.0, one.pid)
        assert (moved(one), moved(other)) == ((60, 5), (60, 2))
    assert "BENCH_CLOCK_FILE" not in os.environ


def test_a_compiler_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults_clock, "_compiler", lambda: "false")
    with pytest.raises(PdClusterError, match="the library that moves clocks cannot be compiled"), Clock().stand():
        pass


# ---- disks


def test_not_a_byte_more_fits_until_the_disk_is_freed(tmp_path: Path) -> None:
    """In a process of its own, which keeps the mount to itself."""
    disk = Disk()
    if disk.problem():
        pytest.skip(disk.problem())
    program = (
        "import errno, pathlib, tempfile\n"
        "from benchmarks.faults.disk import Disk\n"
        "from benchmarks.faults.ground import standing_on\n"
        "disk = Disk()\n"
        "with standing_on(disk):\n"
        "    disk.fill()\n"
        "    try:\n"
        "        (disk.folder / 'one').write_text('more')\n"
        "    except OSError as error:\n"
        "        print(errno.errorcode[error.errno])\n"
        "    disk.free()\n"
        "    print(tempfile.gettempdir() == str(disk.folder))\n"
        "print(disk.folder.exists())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    if "Operation not permitted" in done.stderr or "no mount namespace" in done.stderr:
        pytest.skip(f"nothing can be mounted here: {done.stderr.splitlines()[-1]}")
    assert done.stdout.split() == ["ENOSPC", "True", "False"], done.stderr


# ---- which faults share a cluster


def test_a_fault_with_a_ground_of_its_own_has_a_cluster_of_its_own() -> None:
    groups = faults.grouped(["terminate-all", "flap", "hog"])
    assert list(groups.values()) == [["flap", "hog"], ["terminate-all"]]
    assert next(iter(groups)) is ORDINARY


def test_a_ground_that_cannot_be_had_is_an_error_by_name_and_left_out_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Disk, "problem", lambda self: "no disk today")
    with pytest.raises(ConfigError, match="--faults disk-full: no disk today"):
        faults.grouped(["disk-full"])
    groups = faults.grouped(list(ALL_FAULTS))
    assert "disk-full" not in [key for keys in groups.values() for key in keys]
    assert "disk-full is left out: no disk today" in capsys.readouterr().out


# ---- what counts


def test_a_refusal_with_a_time_to_come_again_is_neither_complete_nor_failed() -> None:
    def refusal(retry_after: str | None) -> Answer:
        return Answer(0, 1.0, 2.0, Sample(status=429, retry_after=retry_after, error="HTTP 429: busy"))

    good = Answer(0, 1.0, 2.0, Sample(token_ids=(1,)))
    polite = Run("overload", "much", [good, refusal("1")], [(1,)])
    assert (len(polite.refused), polite.failed, is_right([polite])) == (1, [], True)
    rude = Run("overload", "much", [good, refusal(None)], [(1,)])
    assert (rude.refused, len(rude.failed), is_right([rude])) == ([], 1, False)


def test_what_was_under_way_at_the_end_must_end_with_a_word() -> None:
    whole = Answer(0, 1.0, 5.0, Sample(token_ids=(1,)))
    told = Answer(0, 1.0, 5.0, Sample(error="the server is shutting down", server_said_so=True))
    silent = Answer(0, 1.0, 5.0, Sample(error="the stream ended without [DONE]"))
    late = Answer(0, 4.0, 5.0, Sample(error="no connection"))
    seen = Seen(back_s=9.0, told_to_end_s=3.0)
    run = Run("terminate-all", "the end", [whole, told, late], [(1,)], seen=seen)
    assert (run.silent, is_right([run])) == ([], True)
    run = Run("terminate-all", "the end", [whole, told, silent, late], [(1,)], seen=seen)
    assert (run.silent, is_right([run])) == ([silent], False)
