"""`bench multimodal --quick` from the command line on: every figure is there, and nothing is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_quick(tmp_path: Path) -> None:
    file = tmp_path / "multimodal.json"
    command = [sys.executable, "-m", "pd_cluster", "bench", "multimodal", "--quick", f"--json={file}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text())["results"]
    assert len(results) == 15
    for result in results:
        assert result["value"] > 0, result
        assert result["goal"] is None


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_encoders_against_none(tmp_path: Path) -> None:
    file = tmp_path / "encoders.json"
    command = [sys.executable, "-m", "pd_cluster", "bench", "multimodal", "--quick", "--encode=1", f"--json={file}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    results = {result["name"]: result["value"] for result in json.loads(file.read_text())["results"]}
    assert results["images from encoders"] == 3, "the warm-up's, and two of the prompt"
    assert results["images that encoders failed to deliver"] == 0
    assert results["features moved"] > 0
