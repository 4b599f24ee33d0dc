"""The lines of `pd-cluster up` when nobody can read them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pd_cluster.cluster.processes.launch import LASTING_STREAMS, Launch
from pd_cluster.cluster.processes.launcher import plan_cluster

SAYS = (
    "from pd_cluster.cluster.processes.launcher import tell\nfor _ in range(3):\n    tell('a line – ' + 5000 * 'x')\n"
)


def test_a_full_disk_or_a_reader_that_has_gone_costs_the_lines_of_the_log_and_nothing_else() -> None:
    read, write = os.pipe()
    os.close(read)
    with Path("/dev/full").open("wb") as full, os.fdopen(write, "wb") as pipe:
        ended = [
            subprocess.run([sys.executable, "-c", SAYS], stdout=each, stderr=-1, timeout=60) for each in (full, pipe)
        ]
    for done in ended:
        assert (done.returncode, done.stderr) == (0, b"")


def test_lines_leave_at_once_and_whole() -> None:
    done = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == 3 * ("a line – " + 5000 * "x" + "\n")


def test_streams_outlive_their_scheduler_unless_the_operator_says_otherwise(tmp_path: Path) -> None:
    *workers, scheduler = plan_cluster(Launch().with_lasting_streams({}), tmp_path)
    assert scheduler.env.items() >= LASTING_STREAMS.items()
    assert not any(each.env.keys() & LASTING_STREAMS.keys() for each in workers)
    for launch, env in (
        (Launch(in_effect=["--resume-window=0"]), {}),
        (Launch(in_effect=["--resume-window", "60"]), {}),
        (Launch(openai=False), {}),
        (Launch(), {"PD_CLUSTER_SERVE_RESUME_WINDOW": "60"}),
    ):
        assert launch.with_lasting_streams(env) == launch
