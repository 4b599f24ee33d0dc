"""If an engine's step does not return, its process ends, whatever the cause."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pd_cluster.engine.ranks import hang_watchdog

DEADLINE_S = 60

HANGS = """
import ctypes
from pd_cluster.engine.ranks.hang_watchdog import ends_when_hung
on_round = ends_when_hung({limit_s})
for _ in range(3):
    on_round()
def a_step_that_hangs():
    ctypes.PyDLL(None).usleep(ctypes.c_uint({sleep_us}))  # with the interpreter's lock, as a driver might
a_step_that_hangs()
print("came back")
"""


def run(limit_s: float, sleep_us: int, first: str = "") -> subprocess.CompletedProcess[str]:
    script = first + HANGS.format(limit_s=limit_s, sleep_us=sleep_us)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S)


def test_the_process_ends_and_tells_where_it_was() -> None:
    ended = run(limit_s=0.2, sleep_us=(DEADLINE_S - 1) * 1_000_000)
    assert ended.returncode == 1
    assert "a_step_that_hangs" in ended.stderr
    assert "came back" not in ended.stdout


def test_who_waits_for_a_lost_rank_ends() -> None:
    """A process that waits for a lost rank ends even without a limit on steps."""
    first = "from pd_cluster.engine.ranks.hang_watchdog import end_within\nend_within(0.2)\n"
    ended = run(0, (DEADLINE_S - 1) * 1_000_000, first)
    assert (ended.returncode, ended.stdout) == (1, "")


@pytest.mark.parametrize("limit_s", [0.0, 3600.0])
def test_a_step_that_comes_back_in_time_is_left_alone(limit_s: float) -> None:
    ended = run(limit_s, sleep_us=10_000)
    assert (ended.returncode, ended.stdout) == (0, "came back\n")


def test_the_deadline_is_put_off_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[float, bool]] = []
    monkeypatch.setattr(hang_watchdog, "alarm", hang_watchdog.Alarm())
    monkeypatch.setattr(hang_watchdog.faulthandler, "dump_traceback_later", lambda s, exit: calls.append((s, exit)))
    now_s = 50.0
    on_round = hang_watchdog.ends_when_hung(600.0, lambda: now_s)
    for _ in range(40):
        on_round()
        now_s += 0.25
    assert calls == [(600.0, True)] * 10
