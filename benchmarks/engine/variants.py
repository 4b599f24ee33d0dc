"""`context` and `weights`: whole steps on CPU with fewer bits in the KV pool, or in the weights.

Variants take turns in one process, and a time is the least of many, because only ratios outlive a shared machine's
noise. The first variant is what the others are compared with.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks import child
from benchmarks.engine.variants_spec import Variant, VariantsSpec, VariantTimes
from benchmarks.tiny_model import QUICK_SHAPE, ModelShape
from pd_cluster.tables import Better, Report, Result, check_writable

DEADLINE_S = 1800.0
PLAIN = "float32"
POOLS = {name: Variant(kv_cache_dtype=name) for name in (PLAIN, "bfloat16", "int8", "fp8_e4m3", "int4")} | {
    PLAIN: Variant()
}
WEIGHTS = {
    PLAIN: Variant(),
    "bfloat16": Variant(dtype="bfloat16"),
    **{scheme: Variant(quantization=scheme) for scheme in ("int8", "int8_wo", "int4_wo", "w4a8", "fp8")},
    "int8, head too": Variant(quantization="int8", quantize_head="int8"),
    "int4_wo, head too": Variant(quantization="int4_wo", quantize_head="int4_wo"),
}
GROUPED = ModelShape(  # queries share keys, as in later models; few and narrow layers, so that attention shows
    hidden_size=1024, num_layers=6, num_heads=16, num_kv_heads=4, head_dim=128, intermediate_size=2048
)
ONE_BILLION = ModelShape(  # as Llama 3.2 1B, with half of its layers
    hidden_size=2048, num_layers=8, num_heads=32, num_kv_heads=8, head_dim=64, intermediate_size=8192
)
Goals = Mapping[tuple[str, str, int], float]  # (model, variant, batch; 0: the prompt) -> times the speed of float32


@dataclass(frozen=True, slots=True)
class Bench:
    """`command`: as it was typed."""

    command: str
    title: str
    variants: Mapping[str, Variant]
    shapes: Mapping[str, ModelShape]
    batches: list[int]
    goals: Goals
    context: int
    rounds: int
    threads: int


def context_bench(context: int, rounds: int, threads: int, quick: bool) -> Bench:
    asked = f"--context {context} --rounds {rounds} --threads {threads}{' --quick' if quick else ''}"
    return Bench(
        f"python -m benchmarks context {asked}",
        f"Steps over KV pools of several dtypes, {context} tokens before them",
        POOLS,
        {"tiny": QUICK_SHAPE} if quick else {"125M": ModelShape(), "grouped": GROUPED},
        [1, 2] if quick else [1, 8],
        {} if quick else {("125M", "int8", 8): 1.4, ("125M", "int8", 1): 1.1},
        *(context, rounds, threads),
    )


def weights_bench(rounds: int, threads: int, quick: bool) -> Bench:
    return Bench(
        f"python -m benchmarks weights --rounds {rounds} --threads {threads}{' --quick' if quick else ''}",
        "Steps with several kinds of weights, 64 tokens before them",
        WEIGHTS,
        {"tiny": QUICK_SHAPE} if quick else {"125M": ModelShape(), "1B": ONE_BILLION},
        [1, 2] if quick else [1, 8, 16, 32],
        {} if quick else {("125M", "bfloat16", 0): 2.5, ("125M", "int8", 1): 1.8, ("125M", "int8, head too", 1): 2.5},
        *(64, rounds, threads),
    )


def run(bench: Bench, json: str) -> None:
    """Runs the bench. Raises ConfigError, ChildFailed."""
    check_writable(json)
    results: list[Result] = []
    with child.sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-variants-") as place:
        for name, shape in bench.shapes.items():
            folder = Path(place) / name
            folder.mkdir()
            spec = VariantsSpec(
                model=str(child.make_model(folder, shape, bench.threads)),
                variants=dict(bench.variants),
                batches=bench.batches,
                context=bench.context,
                prompt=512 if bench.goals else 40,
                rounds=bench.rounds,
            )
            results += _results(name, spec, _times(spec, folder, bench.threads), bench.goals)
    report = Report(bench.command, results)
    report.show(bench.title)
    if json:
        report.write(json)


def _times(spec: VariantsSpec, folder: Path, threads: int) -> VariantTimes:
    result = folder / "times.json"
    command = [sys.executable, "-m", "benchmarks.peers.variants", msgspec.json.encode(spec).decode(), str(result)]
    child.run_child(command, folder / "variants.log", DEADLINE_S, threads)
    return msgspec.json.decode(result.read_bytes(), type=VariantTimes)


def _results(model: str, spec: VariantsSpec, times: VariantTimes, goals: Goals) -> list[Result]:
    def result(name: str, value: float, unit: str, better: Better, goal: float | None = None) -> Result:
        return Result(name=f"{model}, {name}", value=value, unit=unit, better=better, samples=spec.rounds, goal=goal)

    def compared(what: str, batch: int, took_s: Mapping[str, float]) -> list[Result]:
        plain_s = took_s[PLAIN]
        return [result(f"{what}: {PLAIN}", plain_s * 1e3, "ms", "lower")] + [
            result(
                f"{what}: {name}, times {PLAIN}'s speed", plain_s / each, "×", "higher", goals.get((model, name, batch))
            )
            for name, each in took_s.items()
            if name != PLAIN
        ]

    found = []
    for batch in spec.batches:
        found += compared(f"batch {batch}", batch, {name: steps[batch] for name, steps in times.steps_s.items()})
    found += compared(f"prompt of {spec.prompt}", 0, times.prompt_s)
    sizes = {name: nbytes for name, nbytes in times.token_nbytes.items() if nbytes != times.token_nbytes[PLAIN]}
    return found + [result(f"a token's KV: {name}", nbytes / 1024, "KiB", "lower") for name, nbytes in sizes.items()]
