"""The guard of tests on a GPU, around a device that fails when a test asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gpu_guard import STICKY_EXIT, share_of_memory

ROOT = Path(__file__).parents[2]
CONFTEST = """
import pytest
from tests.support.gpu_guard import GpuGuard

class Device:
    fails = 0  # so often
    def synchronize(self):
        if self.fails:
            self.fails -= 1
            raise RuntimeError("CUDA error: an illegal memory access")

device = Device()

@pytest.fixture
def fake():
    return device

def pytest_configure(config):
    config.addinivalue_line("markers", "alone: last")
    config.pluginmanager.register(GpuGuard(device.synchronize, lambda: None))
"""
TESTS = """
import pytest
@pytest.mark.alone
def test_alone(): pass
def test_before(): pass
def test_breaks(fake): fake.fails = {fails}
def test_after(fake): assert not fake.fails
"""


def run(folder: Path, fails: int, *arguments: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS.format(fails=fails))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-v", "-rA", "-p", "xdist", "-p", "no:cacheprovider", "-c", "/dev/null"]
    done = subprocess.run(
        [*command, *arguments, "--rootdir", str(folder), str(folder / "test_it.py")],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_worker_ends_after_a_sticky_error_and_another_runs_the_rest(tmp_path: Path) -> None:
    code, output = run(tmp_path, 1000, "-n", "1")
    assert code == 1, output
    assert "the device failed during this test: CUDA error: an illegal memory access" in output
    assert "replacing crashed worker gw0" in output
    for name in ("test_before", "test_after", "test_alone"):
        assert f"PASSED test_it.py::{name}" in output, output


def test_an_error_that_does_not_stay_fails_its_test_only(tmp_path: Path) -> None:
    code, output = run(tmp_path, 1, "-n", "0")
    assert code == 1, output
    assert "ERROR test_it.py::test_breaks" in output
    assert output.index("::test_after PASSED") < output.index("::test_alone PASSED"), "which is last"


def test_without_workers_a_sticky_error_ends_the_run(tmp_path: Path) -> None:
    code, output = run(tmp_path, 1000, "-n", "0")
    assert code == STICKY_EXIT, output
    assert "the device does not recover: CUDA error" in output
    assert "test_after PASSED" not in output


def test_workers_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "8")
    assert share_of_memory() == pytest.approx(0.9 / 8)
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT")
    assert share_of_memory() is None
