"""`pd-cluster bench faults --quick` and `bench soak --quick` from the command line to their reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_clients_that_leave_and_strangers_harm_nobody(tmp_path: Path) -> None:
    """With a few of each, no request is lost or different, no process ends, and nothing of theirs is left."""
    rows = ("resets", "aborts", "slow-readers", "frames")
    file = tmp_path / "faults.json"
    command = [
        sys.executable,
        "-m",
        "pd_cluster.commands.cli",
        "bench",
        "faults",
        "--quick",
        "--faults",
        ",".join(rows),
    ]
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    for row in rows:
        assert results[f"{row} complete"]["value"] == results[f"{row} exact"]["value"] == 100
        assert results[f"{row} held"]["value"] == results[f"{row} processes left"]["value"] == 0
        assert results[f"{row} descriptors left"]["met"]
    assert "80 connections reset: " in done.stdout
    assert "100 clients left: " in done.stdout
    assert "80 strangers at 10 ports: " in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_quick_kills_a_pair_and_the_scheduler(tmp_path: Path) -> None:
    """Every request is answered as without a fault; those of a scheduler that died are counted separately."""
    file = tmp_path / "faults.json"
    command = [sys.executable, "-m", "pd_cluster", "bench", "faults", "--quick", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    results = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    for fault in ("kill-both", "kill-scheduler"):
        assert results[f"{fault} complete"]["value"] == results[f"{fault} exact"]["value"] == 100
        assert results[f"{fault} held"]["value"] == 0
    assert results["kill-both seen after"]["met"]
    assert results["kill-scheduler served after"]["value"] > 0
    assert "one of each at once" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_soak_over_dist_loses_nothing_and_tells_what_grew(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    flags = ["--quick", "--kv-transport", "dist", "--seed", "4", "--json", str(file)]
    command = [sys.executable, "-m", "pd_cluster", "bench", "soak", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    results = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    assert results["complete"]["value"] == results["exact"]["value"] == 100
    assert results["requests"]["value"] > 0
    assert results["fault kill-parent"]["value"] >= 1
    assert results["held"]["value"] == results["processes left"]["value"] == 0
