"""`pd-cluster bench context`: whole steps at a long context, over KV pools of 32, 16, 8 and 4 bits, on CPU.

Pools take turns in one process, and a time is the least of many, because only ratios outlive a shared machine's noise.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec

from pd_cluster.lab import child
from pd_cluster.lab.engine.context_spec import ContextSpec, ContextTimes
from pd_cluster.lab.tiny_model import QUICK_SHAPE, ModelShape
from pd_cluster.tables import Better, Report, Result, check_writable

DEADLINE_S = 1800.0
PLAIN = "float32"
DTYPES = [PLAIN, "bfloat16", "int8", "fp8_e4m3", "int4"]
GROUPED = ModelShape(  # queries share keys, as in later models; few and narrow layers, so that attention shows
    hidden_size=1024, num_layers=6, num_heads=16, num_kv_heads=4, head_dim=128, intermediate_size=2048
)
SHAPES = {"125M": ModelShape(), "grouped": GROUPED}
GOALS = {("125M", "int8", 8): 1.4, ("125M", "int8", 1): 1.1}  # times the speed of float32


def run(context: int, rounds: int, threads: int, quick: bool, json: str) -> None:
    """Runs the bench. Raises ConfigError, ChildFailed."""
    check_writable(json)
    shapes, batches = ({"tiny": QUICK_SHAPE}, [1, 2]) if quick else (SHAPES, [1, 8])
    results: list[Result] = []
    with child.sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-context-") as place:
        for name, shape in shapes.items():
            folder = Path(place) / name
            folder.mkdir()
            model = child.make_model(folder, shape, threads)
            spec = ContextSpec(
                model=str(model),
                dtypes=DTYPES,
                batches=batches,
                context=context,
                prompt=min(512, context),
                rounds=rounds,
            )
            results += _results(name, spec, _times(spec, folder, threads), judged=not quick)
    asked = f"--context {context} --rounds {rounds} --threads {threads}{' --quick' if quick else ''}"
    report = Report(f"pd-cluster bench context {asked}", results)
    report.show(f"Steps over KV pools of several dtypes, {context} tokens before them")
    if json:
        report.write(json)


def _times(spec: ContextSpec, folder: Path, threads: int) -> ContextTimes:
    result = folder / "times.json"
    command = [sys.executable, "-m", "pd_cluster.lab.peers.context", msgspec.json.encode(spec).decode(), str(result)]
    child.run_child(command, folder / "context.log", DEADLINE_S, threads)
    return msgspec.json.decode(result.read_bytes(), type=ContextTimes)


def _results(model: str, spec: ContextSpec, times: ContextTimes, judged: bool) -> list[Result]:
    def result(name: str, value: float, unit: str, better: Better, goal: float | None = None) -> Result:
        return Result(name=f"{model}, {name}", value=value, unit=unit, better=better, samples=spec.rounds, goal=goal)

    found = []
    for batch in spec.batches:
        plain_s = times.steps_s[PLAIN][batch]
        found.append(result(f"batch {batch}: {PLAIN}", plain_s * 1e3, "ms", "lower"))
        for dtype in spec.dtypes[1:]:
            goal = GOALS.get((model, dtype, batch)) if judged else None
            name = f"batch {batch}: {dtype}, times float32's speed"
            found.append(result(name, plain_s / times.steps_s[dtype][batch], "×", "higher", goal))
    found.append(result(f"prompt of {spec.prompt}: {PLAIN}", times.prompt_s[PLAIN] * 1e3, "ms", "lower"))
    for dtype in spec.dtypes[1:]:
        ratio = times.prompt_s[PLAIN] / times.prompt_s[dtype]
        found.append(result(f"prompt of {spec.prompt}: {dtype}, times float32's speed", ratio, "×", "higher"))
    sizes = [
        result(f"a token's KV: {dtype}", times.token_nbytes[dtype] / 1024, "KiB", "lower") for dtype in spec.dtypes
    ]
    return found + sizes
