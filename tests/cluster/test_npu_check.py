"""scripts/npu_check.sh on simulated NPUs: every stage with real processes, and its output."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support import npu_wheel

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "npu_check.sh"
STAGES = ("machine", "operators", "graphs", "pairs", "guide", "figures")


def check(out: Path, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(out), "FOLDER": str(out.parent), "WHEELS": ""}
    command = ["sh", str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s)


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    """Refuses wrong arguments, and a machine without NPUs."""
    for arguments, message in (
        (("--cards", "3"), "npu_check: --cards 3: at least two are needed"),
        (("--fast",), "npu_check: unknown option --fast; see --help"),
        (("pair",), "unknown stage pair; there are machine, operators, graphs, pairs, guide and figures"),
        (("machine",), "finds no NPU device; PYTHON=/path/to/python names another"),
    ):
        done = check(tmp_path / "out", *arguments)
        assert done.returncode == 1
        assert message in done.stderr
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_machine_and_its_network(tmp_path: Path) -> None:
    """Makes tables from the cards' answers, and sends KV blocks between cards."""
    npu_wheel.environment()  # skips without the wheel
    done = check(tmp_path / "out", "--simulate", "--cards", "4,5,6,7", "machine", timeout_s=110)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as archive:
        network = archive.extractfile("logs/check--network.txt")
        assert network is not None
        lines = network.read().decode().splitlines()
    assert any(line.startswith("ok") and "prefill-0 -> decode-0: " in line and " over ipc" in line for line in lines)
    assert any("ping: NPU 4, NPU 5, NPU 6, NPU 7: 3 cards answer" in line for line in lines)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}, "files are left"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_stage_is_green(tmp_path: Path) -> None:
    npu_wheel.environment()
    done = check(tmp_path / "out", "--simulate", timeout_s=1400)
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert done.returncode == 0, summary + done.stderr
    assert [line[3:] for line in summary.splitlines() if line.startswith("== ")] == list(STAGES)
    assert not [line for line in summary.splitlines() if ": passed (" not in line and not line.startswith("== ")]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("summary.txt", "logs.tar.gz", "report.json", "README.md")
    }
