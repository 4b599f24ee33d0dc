"""`python -m benchmarks engine`: compares the engine to generate(), and its steps to the machine's limits.

Makes a Llama of 125 million random weights in a temporary folder, and runs each engine in a separate process. It does
so in rounds, so that a ratio compares runs that are close in time. End-of-sequence tokens are ignored, and prefixes are
not cached, except in the step that measures the prefix cache.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import workloads
from benchmarks.child_process import ChildFailed, make_model, run_peer, sigterm_raises
from benchmarks.engine_messages import PeerResult, Spec
from benchmarks.figures import begin, finish, names_of, result
from benchmarks.model_shapes import QUICK_SHAPE, ModelShape
from pd_cluster.result_tables import Report, Result

REQUESTS = {"uniform": 2.0, "mixed": 3.0}  # workload -> goal, as a multiple of generate()'s speed
STEPS = "steps"
OURS, REFERENCE, FLOORS = "ours", "generate", "floors"
DEADLINE_S = 900.0
UNITS = {"_ms": "ms", "_gb_per_s": "GB/s", "_tokens": "tokens"}

Figures = Mapping[str, float]
Round = Mapping[str, PeerResult]
STEP_GOALS: list[tuple[str, float, str, Callable[[Figures], float]]] = [
    ("step of 1 sequence ÷ time to read the weights", 1.4, "x", lambda f: f["decode_1_ms"] / f["read_weights_ms"]),
    ("step of 32 sequences ÷ its linear layers alone", 1.25, "x", lambda f: f["decode_32_ms"] / f["linears_32_ms"]),
    ("1,024-token prefill ÷ its linears", 1.25, "x", lambda f: f["prefill_1024_ms"] / f["linears_1024_ms"]),
    ("bookkeeping of a step of 32", 0.5, "ms", lambda f: f["bookkeeping_32_ms"]),
    ("greedy sampling of 32", 3.0, "ms", lambda f: f["greedy_32_ms"]),
    ("top-k/top-p sampling of 32, % of the step", 10.0, "%", lambda f: 100 * f["drawn_32_ms"] / f["drawn_step_32_ms"]),
    ("TTFT of 64 after a cached prefix ÷ of 64 alone", 1.2, "x", lambda f: f["prefix_ttft_ms"] / f["alone_ttft_ms"]),
]


def run(workload: str, rounds: int, threads: int, quick: bool, json: str) -> None:
    """Measures and reports. Raises PdClusterError if an engine fails, or for an unknown name."""
    names = names_of("--workload", workload, [*REQUESTS, STEPS])
    rounds = 1 if quick else rounds
    begin(json)
    started_s = time.monotonic()
    with sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        shape = QUICK_SHAPE if quick else ModelShape()
        model = make_model(Path(folder), shape, threads)
        spec = spec_of(model, shape, threads, names, quick)
        measured = [measure(spec, names, Path(folder), f"round {at + 1} of {rounds}") for at in range(rounds)]
    asked = f"--workload {','.join(names)} --rounds {rounds} --threads {threads}{' --quick' * quick}"
    report = Report(f"python -m benchmarks engine {asked}", [*results(measured)])
    finish(report, f"{rounds} rounds, {threads} threads, {time.monotonic() - started_s:.0f} s", json, quick)


def run_shape(
    shape: str, measure: Callable[[int, bool], Iterator[Result]], rounds: int, threads: int, quick: bool, json: str
) -> None:
    """Measures models of the given shape, in this process."""
    import torch

    begin(json)
    torch.set_num_threads(threads)
    started_s = time.monotonic()
    asked = f"--shape {shape} --rounds {rounds} --threads {threads}{' --quick' * quick}"
    report = Report(f"python -m benchmarks engine {asked}", [*measure(rounds, quick)])
    finish(report, f"{rounds} rounds, {threads} threads, {time.monotonic() - started_s:.0f} s", json, quick)


def spec_of(model: Path, shape: ModelShape, threads: int, names: Sequence[str], quick: bool) -> Spec:
    vocab = shape.vocab_size
    if quick:
        every = [workloads.uniform(vocab, 4, 16, 4), workloads.mixed(vocab, 6, (4, 40), (2, 8))]
        warmup = workloads.warmup(vocab, 4, 8, 2)
    else:
        every, warmup = [workloads.uniform(vocab), workloads.mixed(vocab)], workloads.warmup(vocab)
    chosen = [each for each in every if each.name in names]
    return Spec(model=str(model), shape=shape, num_threads=threads, warmup=warmup, workloads=chosen, quick=quick)


def measure(spec: Spec, names: Sequence[str], folder: Path, label: str) -> Round:
    """Runs each engine once. Raises ChildFailed, also if a request gets a wrong number of tokens."""
    found = {}
    engines = (FLOORS, STEPS) * (STEPS in names) + (OURS, REFERENCE) * bool(spec.workloads)
    for name in engines:
        started_s = time.monotonic()
        found[name] = run_peer(name, spec, folder, DEADLINE_S)
        print(f"{label}: {name} ({time.monotonic() - started_s:.0f} s)", flush=True)
        for each in spec.workloads if found[name].runs else ():
            lens = [len(output) for output in found[name].runs[each.name].outputs]
            if lens != each.output_lens:
                raise ChildFailed(f"{each.name}: {sum(lens)} output tokens instead of {each.num_output_tokens}")
    return found


def results(rounds: Sequence[Round]) -> Iterator[Result]:
    for name, goal in REQUESTS.items():
        if name not in rounds[0].get(OURS, PeerResult()).runs:
            continue
        rates = {engine: [rate(each[engine], name) for each in rounds] for engine in (OURS, REFERENCE)}
        for engine, values in rates.items():
            yield result(f"{name}, {engine}", values, "tokens/s", "higher")
        ratios = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]
        yield result(f"{name}: tokens/s ÷ those of generate()", ratios, "x", "higher", goal)
        ours, theirs = (rounds[0][engine].runs[name].outputs for engine in (OURS, REFERENCE))
        yield result(f"{name}: tokens equal to generate()'s", [100 * equal_share(ours, theirs)], "%", "higher")
    if STEPS in rounds[0]:
        figures = [{**each[FLOORS].figures, **each[STEPS].figures} for each in rounds]
        for name in figures[0]:
            unit = next(unit for ending, unit in UNITS.items() if name.endswith(ending))
            yield result(name, [each[name] for each in figures], unit, "lower" if unit == "ms" else "higher")
        for name, most, unit, value_of in STEP_GOALS:
            yield result(name, [value_of(each) for each in figures], unit, "lower", most)


def rate(found: PeerResult, workload: str) -> float:
    run = found.runs[workload]
    return sum(map(len, run.outputs)) / run.took_s


def equal_share(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    pairs = [(a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)
