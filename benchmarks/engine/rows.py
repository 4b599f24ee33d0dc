"""`python -m benchmarks rows`: decode steps in float32 whose products are oneDNN's, and those of own kernels.

Both have the same bits (model/layers/linear.py). Steps of both kinds alternate in one engine; a ratio compares
neighbours.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.child import make_model, run_child, sigterm_raises
from benchmarks.engine.rows_spec import Times
from benchmarks.tiny_model import QUICK_SHAPE, ModelShape
from pd_cluster.tables import Report, Result, check_writable, spread

DEADLINE_S = 600.0
WIDE_SHAPE = ModelShape(
    hidden_size=2048,
    num_layers=8,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=5632,
    vocab_size=32000,
)
SHAPES = {"125M": ModelShape(), "2,048 wide": WIDE_SHAPE}
GOALS = {1: 1.0, 16: 0.85, 32: 0.95}  # by sequences, at most


def run(rounds: int, steps: int, threads: int, quick: bool, json: str) -> None:
    """Runs the bench. Raises ConfigError, ChildFailed."""
    check_writable(json)
    shapes = {"tiny": QUICK_SHAPE} if quick else SHAPES
    results = []
    with sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-rows-") as place:
        for name, shape in shapes.items():
            folder = Path(place) / f"{shape.hidden_size}"
            folder.mkdir()
            model = make_model(folder, shape, threads)
            for sequences, goal in GOALS.items():
                found = [_times(model, folder, steps, threads, sequences) for _ in range(rounds)]
                named = f"{name}, {sequences} at a time"
                results.append(_result(f"{named}: a step by oneDNN", [median(t.onednn_s) * 1e3 for t in found], "ms"))
                ratios = [median(b / a for a, b in zip(t.onednn_s, t.own_s, strict=True)) for t in found if t.own_s]
                if ratios:
                    judged = None if quick else goal
                    results.append(_result(f"{named}: by own kernels, in times of that", ratios, "×", judged))
    asked = f"--rounds {rounds} --steps {steps} --threads {threads}{' --quick' if quick else ''}"
    report = Report(f"python -m benchmarks rows {asked}", results)
    report.show("Decode steps in float32")
    if json:
        report.write(json)


def _result(name: str, values: list[float], unit: str, goal: float | None = None) -> Result:
    return Result(
        name=name,
        value=median(values),
        unit=unit,
        better="lower",
        samples=len(values),
        spread=spread(values),
        goal=goal,
    )


def _times(model: Path, folder: Path, steps: int, threads: int, sequences: int) -> Times:
    result = folder / "times.json"
    command = [sys.executable, "-m", "benchmarks.peers.rows", str(model), str(result), str(steps), str(sequences)]
    run_child(command, folder / "rows.log", DEADLINE_S, threads)
    return msgspec.json.decode(result.read_bytes(), type=Times)
