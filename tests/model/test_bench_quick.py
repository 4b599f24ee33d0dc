"""`pd-cluster bench engine --quick` from the command line to its report."""

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
