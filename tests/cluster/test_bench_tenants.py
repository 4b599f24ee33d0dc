"""`pd-cluster bench tenants` from the command line on: the cost of separate caches, counted exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SYSTEM_LEN, QUESTION_LEN = 64, 16  # whole blocks
TENANTS, REQUESTS = 3, 4


@pytest.mark.slow
def test_separate_caches_compute_a_shared_prompt_once_a_tenant(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    command = [sys.executable, "-m", "pd_cluster", "bench", "tenants", f"--model={checkpoint('llama')}"]
    command += [f"--tenants={TENANTS}", f"--requests={REQUESTS}", f"--system-len={SYSTEM_LEN}", "--rounds=1"]
    command += [f"--question-len={QUESTION_LEN}", f"--json={file}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    values = {result["name"]: result["value"] for result in json.loads(file.read_text())["results"]}
    questions, asked = TENANTS * REQUESTS * QUESTION_LEN, TENANTS * REQUESTS * (SYSTEM_LEN + QUESTION_LEN)
    shared, apart = SYSTEM_LEN + questions, TENANTS * SYSTEM_LEN + questions
    assert values["shared: prompt tokens computed"] == pytest.approx(shared / asked, rel=1e-4)
    assert values["apart: prompt tokens computed"] == pytest.approx(apart / asked, rel=1e-4)
    assert values["prompt tokens computed, apart to shared"] == pytest.approx(apart / shared, rel=1e-4)
