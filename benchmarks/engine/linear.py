"""`linear`: linear layers with weights of 16, 8 and 4 bits, against float32 and the memory's speed.

Forms take turns in one process, and a time is the least of many, because only ratios outlive a shared machine's noise.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks import child
from benchmarks.engine.linear_spec import LinearSpec, LinearTimes
from benchmarks.tiny_model import ModelShape
from pd_cluster.errors import ConfigError
from pd_cluster.tables import Better, Report, Result, check_writable

DEADLINE_S = 1800.0
ROWS = [1, 8, 16, 32, 128, 512]
ONE_BILLION = ModelShape(  # as Llama 3.2 1B; three of its 16 layers are no longer in a cache
    hidden_size=2048,
    num_layers=3,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=8192,
    vocab_size=128_256,
)
QUICK = ModelShape(hidden_size=128, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64, intermediate_size=256)
SHAPES = {"125M": ModelShape(), "1B": ONE_BILLION}
GOALS = {  # times the speed of float32
    ("bfloat16", 512): 2.5,
    ("int8", 1): 1.8,
    **{(f"{bits} weights", rows): 1.0 for bits in ("int8", "fp8", "int4") for rows in (1, 8, 16, 32)},
    **{(f"{bits} weights", rows): 0.97 for bits in ("int8", "fp8", "int4") for rows in (128, 512)},
}


def run(rounds: int, threads: int, quick: bool, json: str) -> None:
    """Runs the bench. Raises ConfigError, ChildFailed."""
    check_writable(json)
    shapes, rows = ({"tiny": QUICK}, [1, 8]) if quick else (SHAPES, ROWS)
    results: list[Result] = []
    with child.sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-linear-") as place:
        for name, shape in shapes.items():
            spec = LinearSpec(shape=shape, rows=rows, rounds=rounds, num_threads=threads)
            times = _times(spec, Path(place))
            if len(times.products_s) == 1:
                raise ConfigError("the C kernels cannot run here, so there is nothing to compare with float32")
            results += _results(name, times, rounds * shape.num_layers, judged=not quick)
    report = Report(
        f"python -m benchmarks linear --rounds {rounds} --threads {threads}{' --quick' if quick else ''}", results
    )
    report.show(f"A layer's products; bfloat16 by {times.bf16_way}")
    if json:
        report.write(json)


def _times(spec: LinearSpec, folder: Path) -> LinearTimes:
    result = folder / "times.json"
    command = [sys.executable, "-m", "benchmarks.peers.linear", msgspec.json.encode(spec).decode(), str(result)]
    child.run_child(command, folder / "linear.log", DEADLINE_S, spec.num_threads)
    return msgspec.json.decode(result.read_bytes(), type=LinearTimes)


def _results(model: str, times: LinearTimes, samples: int, judged: bool) -> list[Result]:
    def result(name: str, value: float, unit: str, better: Better, goal: float | None = None) -> Result:
        return Result(name=f"{model}{name}", value=value, unit=unit, better=better, samples=samples, goal=goal)

    plain = times.products_s["float32"]
    found = [result(": read bandwidth", times.read_bytes_per_s / 1e9, "GB/s", "higher")]
    for rows in plain:
        found.append(result(f", rows {rows}: float32", plain[rows] * 1e3, "ms", "lower"))
        for form, took_s in times.products_s.items():
            if form != "float32":
                goal = GOALS.get((form, rows)) if judged else None
                name = f", rows {rows}: {form}, times float32's speed"
                found.append(result(name, plain[rows] / took_s[rows], "×", "higher", goal))
    for form, took_s in times.products_s.items():
        floor_s = times.nbytes[form] / times.read_bytes_per_s
        for rows in (1, 16):
            if rows in took_s:
                name = f", rows {rows}: {form}, times reading its bytes"
                found.append(result(name, took_s[rows] / floor_s, "×", "lower"))
    return found
