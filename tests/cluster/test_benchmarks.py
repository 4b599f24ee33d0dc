"""Runs each benchmark's command line once in its quickest form: it succeeds and every figure has a value."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = ("kv --quick --transports=shm --rounds=1",)
SLOW = (
    "engine --quick --threads=1",
    "engine --parts=unit --quick",
    "engine --shape=hybrid-1B --quick --threads=1 --rounds=1",
    "engine --shape=mla-1B --quick --threads=1 --rounds=1",
    "engine --shape=moe-1B --quick --threads=1 --rounds=1",
    "faults --quick",
    "faults --quick --faults=resets,aborts,slow-readers",
    "hog --seconds=2 --attacks=guides",
    "lora --quick --rounds=1 --threads=1",
    "overload --quick --shapes=decode",
    "router --quick --streams=20",
    "routing --users=4 --turns=2",
    "soak --quick --kv-transport=dist --seed=4",
    "speculative --quick",
    "speculative --quick --rows",
    "start --rounds=1",
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("arguments", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_it_runs(arguments: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks", *arguments.split(), f"--json={file}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(file.read_text())
    assert f" {arguments.split()[0]} " in written["command"]
    missing = [each["name"] for each in written["results"] if each["value"] is None]
    assert [name for name in missing if "refusal" not in name] == []  # a few seconds of overload may cause no refusal


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gpu_runs_on_a_cpu_and_adds_to_its_report(tmp_path: Path) -> None:
    for parts in ("ceilings,states", "engine,handover"):
        flags = ["--device=cpu", "--quick", f"--parts={parts}", f"--out={tmp_path}", "--resume"]
        command = [sys.executable, "-m", "benchmarks", "gpu", *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert {part["name"]: part["state"] for part in report["parts"]} == dict.fromkeys(
        ("ceilings", "states", "model", "engine", "handover"), "done"
    )
    assert {
        "states of Nemotron-H, 80 tokens, in C",
        "read alone, by a sum",
        "decode 3: step",
        "handover, with checksums",
    } <= {each["name"] for each in report["figures"]}
