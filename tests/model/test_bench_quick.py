"""`pd-cluster bench engine --quick`, `kv --quick` and `offline --quick` from the command line to their reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_quick_runs_our_engine_and_generate(tmp_path: Path) -> None:
    """Both in processes of their own, on a tiny model; their tokens agree."""
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "pd_cluster.cli", "bench", "engine", "--quick", "--json", str(file)]
    command += ["--workload", "uniform,mixed", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert {result["name"] for result in written["results"]} == {
        f"{workload} {name}" for workload in ("uniform", "mixed") for name in ("ours", "generate")
    }
    ours = next(each for each in written["engines"] if each["name"] == "ours")
    assert ours["equal"]["uniform"] == ours["equal"]["mixed"] == {"tokens": 1.0, "first_tokens": 1.0}
    assert "goals" in done.stdout


def test_quick_hands_over_between_two_processes(tmp_path: Path) -> None:
    """`bench kv --quick`: both transports, checks on and off, the content compared; nothing is judged."""
    file = tmp_path / "kv.json"
    command = [sys.executable, "-m", "pd_cluster.cli", "bench", "kv", "--quick", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    names = {result["name"] for result in written["results"]}
    rates = {"memcpy", "gloo", "shm off", "shm on", "dist off", "dist on"}
    assert {f"{name} 1 MiB" for name in rates} | {"block shm on_ms", "block dist off p95_ms"} <= names
    assert all(result["value"] > 0 for result in written["results"])
    assert written["goals"] == []


def test_quick_runs_the_engine_by_itself_in_the_service_and_split(tmp_path: Path) -> None:
    """`bench offline --quick`: each in processes of its own, with the same tokens."""
    file = tmp_path / "offline.json"
    command = [sys.executable, "-m", "pd_cluster.cli", "bench", "offline", "--quick", "--threads", "1"]
    command += ["--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    found = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    for name in ("one process", "split"):
        assert found[name]["value"] > 0
        assert found[f"{name}: tokens equal to the bare engine's"]["value"] == 100
    assert found["split: decode busy"]["value"] > 0
    assert all(each["goal"] is None for each in found.values())
