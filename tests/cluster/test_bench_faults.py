"""`pd-cluster bench faults --quick` from the command line to its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_quick_kills_a_pair_and_the_scheduler(tmp_path: Path) -> None:
    """Every request is answered as without a fault; those of a scheduler that died are told apart."""
    file = tmp_path / "faults.json"
    command = [sys.executable, "-m", "pd_cluster.cli", "bench", "faults", "--quick", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    results = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    for fault in ("kill-both", "kill-scheduler"):
        assert results[f"{fault} complete"]["value"] == results[f"{fault} exact"]["value"] == 100
        assert results[f"{fault} held"]["value"] == 0
    assert results["kill-both seen after"]["met"]
    assert results["kill-scheduler served after"]["value"] > 0
    assert "one of each at once" in done.stdout
