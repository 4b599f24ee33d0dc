"""The README's Python runs unchanged, except that the shipped model replaces the path."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pd_cluster.settings.engine import SHIPPED_MODEL

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text("utf-8")
SERVED = "base_url="  # in a client's block, which tests/cluster/test_guided.py runs
BLOCKS = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if SERVED not in block]


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_runs(block: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(block.replace("/path/to/model", str(SHIPPED_MODEL)))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 5
