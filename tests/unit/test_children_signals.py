"""A server's child processes ignore its signals: a drain or a SIGHUP to the group does not end their checks."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pd_cluster.devices.device_streams import poll

START_S = 60.0
LEFT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignored(pid: int) -> int:
    """Returns the mask of the signals that a process ignores."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn:")]
    return int(line.split()[1], 16)


@pytest.mark.parametrize("module", ["guides.guide_child", "prompts.template_child"])
def test_a_child_that_checks_ignores_what_reaches_all(module: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", f"pd_cluster.service.{module}", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.DEVNULL,
        )
        try:
            wanted = sum(1 << (number - 1) for number in LEFT)
            assert poll(lambda: process.poll() is not None or ignored(process.pid) & wanted == wanted, START_S)
            assert process.poll() is None
            for number in LEFT:
                process.send_signal(number)
            theirs.close()
            ours.shutdown(socket.SHUT_WR)
            process.wait(START_S)
            assert process.returncode > 0, "expected an exit for missing settings, not by a signal"
        finally:
            process.kill()
            process.wait()
