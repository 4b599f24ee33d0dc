"""`python -m benchmarks lora`: compares decode steps on CPU with many adapters to the same steps without adapters."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks import child_process
from benchmarks.engine_messages import Spec
from benchmarks.figures import begin, finish, result
from benchmarks.model_shapes import QUICK_SHAPE, ModelShape
from pd_cluster.result_tables import Report, Result

DEADLINE_S = 1800.0
GOALS = {0: 0.99, 8: 0.85, 32: 0.6}  # adapters in a batch of 32 -> goal, times the speed without --enable-lora


def run(rounds: int, threads: int, quick: bool, json: str) -> None:
    """Raises PdClusterError."""
    begin(json)
    with child_process.sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-lora-") as folder:
        shape = QUICK_SHAPE if quick else ModelShape()
        model, size = str(child_process.make_model(Path(folder), shape, threads)), 4 if quick else 32
        spec = Spec(model=model, shape=shape, num_threads=threads, batch_size=size, rounds=rounds, quick=quick)
        times_ms = child_process.run_peer("lora", spec, Path(folder), DEADLINE_S).figures
    asked = f"--rounds {rounds} --threads {threads}{' --quick' * quick}"
    report = Report(f"python -m benchmarks lora {asked}", results(times_ms))
    finish(report, f"decode steps of {spec.batch_size} sequences, adapters of rank 16 on all layers", json, quick)


def results(times_ms: dict[str, float]) -> list[Result]:
    """Returns the results. `times_ms`: by the child's names."""
    bare_ms = times_ms["bare"]
    found = [result("a step without --enable-lora", [bare_ms], "ms")]
    distinct = {int(name.split()[0]): took for name, took in times_ms.items() if name.endswith(" adapters")}
    for num, took_ms in distinct.items():
        name = f"{num} adapters in the batch ÷ the speed without --enable-lora"
        found.append(Result(name=name, value=bare_ms / took_ms, unit="x", better="higher", goal=GOALS.get(num)))
    return found
