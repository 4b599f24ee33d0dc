"""Compares the figures of `benchmarks gpu` with the floor of a decode step, the device's rates, and each other.

Pure: figures in, results out. A figure that could not be measured has no value; a goal without a value is not met.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.gpu.spec import Figure, GpuShape
from benchmarks.gpu.workloads import QUICK_RAGGED, RAGGED, decode_batches
from pd_cluster.tables import Better, Result

COPY, READ, PRODUCTS = "device-to-device copy, read + written", "read alone, by a sum", "bf16 products, the best"
HANDOVER = "handover over {transport}, with checksums"
TTFT, TPOT = "{mode}: TTFT of {num:,} tokens", "{mode}: TPOT of streams under long prompts, p99"
GAP = "{mode}: time between tokens under long prompts, p99"

STARTUP_S, FLOOR_SHARE, OVERHEAD_PERCENT, PREFILL_SHARE = 20.0, 0.85, 5.0, 0.65
OF_TRANSFORMERS, HANDOVER_SHARE, ADDED_TTFT_PERCENT = 3.0, 0.8, 5.0

Figures = Mapping[str, Figure]


def judged(figures: Figures, shapes: Sequence[GpuShape], long_len: int, transport: str, quick: bool) -> list[Result]:
    """Judges the first shape against goals; a quick run has none. Plain figures follow."""
    main, *others = shapes
    found = [*of_model(figures, main, quick, not quick)]
    found += of_handover(figures, transport, not quick)
    found += of_cluster(figures, long_len, not quick)
    for shape in others:
        found += of_model(figures, shape, quick, False)
    return found + [as_result(each) for each in figures.values()]


def of_model(figures: Figures, shape: GpuShape, quick: bool, has_goals: bool) -> list[Result]:
    name = shape.name
    startup = value_of(figures, f"{name} start-up: process to engine ready")
    found = [result(f"{name}: start-up from page cache", startup, "s", "lower", STARTUP_S if has_goals else None)]
    for batch in decode_batches(quick):
        found += of_decode(figures, shape, batch, has_goals)
    found.append(of_ragged(figures, shape, 1 + (QUICK_RAGGED if quick else RAGGED)[0][0]))
    rate, products = value_of(figures, f"{name} prefill: model FLOPs"), value_of(figures, PRODUCTS)
    share = PREFILL_SHARE if has_goals else None
    found.append(result(f"{name}: prefill, share of the best product", ratio(rate, products), "x", "higher", share))
    ours, theirs = (value_of(figures, f"{name} mixed workload, {who}, second run") for who in ("ours", "transformers"))
    times = OF_TRANSFORMERS if has_goals else None
    found.append(result(f"{name}: mixed workload, ours / transformers", ratio(ours, theirs), "x", "higher", times))
    return found


def of_decode(figures: Figures, shape: GpuShape, batch: int, has_goals: bool) -> list[Result]:
    """Compares with the floor: the bytes that a step must read, over a copy's bandwidth, which counts a byte twice."""
    what = f"{shape.name}: decode {batch}"
    step_ms = value_of(figures, f"{shape.name} decode {batch}: step")
    context = value_of(figures, f"{shape.name} decode {batch}: context")
    gb = None if context is None else shape.decode_read_nbytes(batch, context) / 1e9
    floor_ms, read_ms = (times(1e3, ratio(gb, value_of(figures, rate))) for rate in (COPY, READ))
    overhead = value_of(figures, f"{shape.name} decode {batch}: host overhead")
    share, percent = (FLOOR_SHARE, OVERHEAD_PERCENT) if has_goals else (None, None)
    return [
        result(f"{what}, floor at the copy's bandwidth", floor_ms, "ms", "lower"),
        result(f"{what}, share of the floor", ratio(floor_ms, step_ms), "x", "higher", share),
        result(f"{what}, share of a floor at the bandwidth of reading", ratio(read_ms, step_ms), "x", "higher"),
        result(f"{what}, host overhead", overhead, "%", "lower", percent),
    ]


def of_ragged(figures: Figures, shape: GpuShape, batch: int) -> Result:
    """Compares with the bytes of all contexts, of which one is long."""
    step_ms = value_of(figures, f"{shape.name} decode of long among short: step")
    context = value_of(figures, f"{shape.name} decode of long among short: context")
    gb = None if context is None else shape.decode_read_nbytes(batch, context) / 1e9
    share = ratio(times(1e3, ratio(gb, value_of(figures, COPY))), step_ms)
    return result(f"{shape.name}: decode of long among short, share of the floor", share, "x", "higher")


def of_handover(figures: Figures, transport: str, has_goals: bool) -> list[Result]:
    """Compares with the copy: like it, a handover reads and writes each byte, and the copy's rate counts both."""
    rate = times(2, value_of(figures, HANDOVER.format(transport=transport)))
    share, goal = ratio(rate, value_of(figures, COPY)), HANDOVER_SHARE if has_goals else None
    return [result(f"handover over {transport}, share of the copy", share, "x", "higher", goal)]


def of_cluster(figures: Figures, long_len: int, has_goals: bool) -> list[Result]:
    def of_both(name: str) -> float | None:
        split, colocated = (value_of(figures, name.format(mode=m, num=long_len)) for m in ("split", "colocated"))
        return ratio(split, colocated)

    ttft = of_both(TTFT)
    added = None if ttft is None else 100 * (ttft - 1)
    goal = ADDED_TTFT_PERCENT if has_goals else None
    return [
        result(f"TTFT of {long_len:,} tokens, added by the split", added, "%", "lower", goal),
        result("p99 TPOT under long prompts, split / colocated", of_both(TPOT), "x", "lower"),
        result("p99 time between tokens under long prompts, split / colocated", of_both(GAP), "x", "lower"),
    ]


def value_of(figures: Figures, name: str) -> float | None:
    return figures[name].value if name in figures else None


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def result(name: str, value: float | None, unit: str, better: Better, goal: float | None = None) -> Result:
    return Result(name=name, value=value, unit=unit, better=better, goal=goal)


def as_result(figure: Figure) -> Result:
    return Result(
        name=figure.name,
        value=figure.value,
        unit=figure.unit,
        better=figure.better,
        samples=figure.samples,
        spread=figure.spread,
    )
