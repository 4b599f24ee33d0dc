"""`pd-cluster bench rows`: the cost of padding rows in a decode step of one sequence.

Wide products of fewer than four rows are computed as four, so that a request gets the same numbers alone and among
others (model/layers/linear.py). Steps with and without padding alternate in one engine; a ratio compares neighbours.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median

import msgspec

from pd_cluster.lab.child import make_model, run_child, sigterm_raises
from pd_cluster.lab.engine.rows_spec import Times
from pd_cluster.lab.tiny_model import QUICK_SHAPE, ModelShape
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
SHAPES = {"125M": (ModelShape(), 1.03), "2,048 wide": (WIDE_SHAPE, 1.10)}  # with their goals, at most


def run(rounds: int, steps: int, threads: int, quick: bool, json: str) -> None:
    """Runs the bench. Raises ConfigError, ChildFailed."""
    check_writable(json)
    shapes = {"tiny": (QUICK_SHAPE, 0.0)} if quick else SHAPES
    results = []
    with sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-rows-") as place:
        for name, (shape, goal) in shapes.items():
            folder = Path(place) / f"{shape.hidden_size}"
            folder.mkdir()
            model = make_model(folder, shape, threads)
            found = [_times(model, folder, steps, threads) for _ in range(rounds)]
            ratios = [median(b / a for a, b in zip(t.unpadded_s, t.padded_s, strict=True)) for t in found]
            plain_ms = [median(each.unpadded_s) * 1e3 for each in found]
            results += [
                _result(f"{name}: a step without padding", plain_ms, "ms"),
                _result(f"{name}: with padding, in times of that", ratios, "×", goal or None),
            ]
    asked = f"--rounds {rounds} --steps {steps} --threads {threads}{' --quick' if quick else ''}"
    report = Report(f"pd-cluster bench rows {asked}", results)
    report.show("Decode steps of one sequence")
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


def _times(model: Path, folder: Path, steps: int, threads: int) -> Times:
    result = folder / "times.json"
    command = [sys.executable, "-m", "pd_cluster.lab.peers.rows", str(model), str(result), str(steps)]
    run_child(command, folder / "rows.log", DEADLINE_S, threads)
    return msgspec.json.decode(result.read_bytes(), type=Times)
