"""Runs `pd-cluster bench compare`: two servers in turn, and SIGTERM, which ends everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pd_cluster.bench.load.guidellm_process import INSTALL
from pd_cluster.bench.process_times import family

VARIABLE = "PD_CLUSTER_TEST_GUIDELLM"
GUIDELLM = os.environ.get(VARIABLE, "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not GUIDELLM, reason=f"{VARIABLE} names no guidellm: {INSTALL}"),
]
SPEC = """
rounds = 2
num_warmup_requests = 2
[goals]
ttft_idle = 100.0
tpot_idle = 100.0
[[workload]]
name = "fixed"
num_requests = 8
rate_per_s = 8.0
num_prompt_tokens = 24
num_output_tokens = 12
[[workload]]
name = "fixed"
num_requests = 2
rate_per_s = 2.0
num_prompt_tokens = 200
num_output_tokens = 2
[[server]]
name = "hybrid"
layout = "1H"
settings = { max_num_batched_tokens = 64 }
[[server]]
name = "split"
layout = "1P1D"
"""


def command(folder: Path, *more: str) -> list[str]:
    (folder / "spec.toml").write_text(SPEC)
    own = [str(folder / "spec.toml"), f"--guidellm={GUIDELLM}", *more]
    return [sys.executable, "-m", "pd_cluster", "bench", "compare", *own]


def test_two_servers_in_turn(tmp_path: Path) -> None:
    files = [f"--json={tmp_path}/out.json", f"--picture={tmp_path}/out.svg"]
    done = subprocess.run(command(tmp_path, *files), capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert [(run["round"], run["server"]) for run in written["runs"]] == [
        *((1, "hybrid"), (1, "split")),
        *((2, "split"), (2, "hybrid")),
    ]
    for run in written["runs"]:
        assert run["figures"]["errors"] == 0
        assert run["figures"]["ttft_p50"] > 0
        assert run["figures"]["itl_p99"] > 0
        assert run["constant_s"] > 0
    values = {each["name"]: each["value"] for each in written["results"]}
    assert values["split / hybrid: ttft_p50"] > 0
    assert written["slo"]["ttft_s"] > 0
    assert "constant work between the runs" in done.stdout
    assert (tmp_path / "out.svg").stat().st_size > 1000


def test_sigterm_ends_all_that_was_started(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        comparing = subprocess.Popen(command(tmp_path), stdout=out, stderr=out)
    try:
        until_s = time.monotonic() + 120
        while "ready after" not in (tmp_path / "out").read_text():
            assert comparing.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < until_s
            time.sleep(0.05)
        started = family(comparing.pid)
        assert len(started) > 3
        comparing.terminate()
        assert comparing.wait(60) == 1
    finally:
        comparing.kill()
        comparing.wait()
    until_s = time.monotonic() + 10
    while left := [pid for pid in started if _runs(pid)]:
        assert time.monotonic() < until_s, left
        time.sleep(0.05)
    shown = (tmp_path / "out").read_text()
    assert "ended by SIGTERM; nothing was measured" in shown
    assert "Traceback" not in shown


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
