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
    assert len(results) == 13
    for result in results:
        assert result["value"] > 0, result
        assert result["goal"] is None
