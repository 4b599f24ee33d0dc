"""`offline`: the engine stepped directly, the offline service over it, and the same work split in two.

Each contender runs in a process of its own, one after the other and in another order each round, so that other load on
the machine affects all of them. End-of-sequence tokens are ignored, and prefixes are not cached.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child import make_model, run_peer, sigterm_raises
from benchmarks.engine import workloads as workloads
from benchmarks.engine.bench import BUSY_LOAD, check_lengths
from benchmarks.offline.figures import CONTENDERS, NAMES, Round, goals_for, results
from benchmarks.spec import PeerResult, Spec
from benchmarks.tiny_model import SMALL_SHAPE
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.settings.engine import SHIPPED_MODEL
from pd_cluster.tables import Report, check_writable

MOST_PROMPT_LEN, MOST_OUTPUT_LEN = 512, 128
DEADLINE_S = 600.0
WORKLOAD = "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineBench:
    """The command's parameters.

    Without a `model` one of random weights is made, large enough for its steps to matter.
    """

    model: str = ""
    num_requests: int = 256
    rounds: int = 5
    num_threads: int = 2
    quick: bool = False

    @property
    def command(self) -> str:
        flags = [f"--num-requests {self.num_requests}", f"--rounds {self.rounds}", f"--threads {self.num_threads}"]
        flags += [f"--model {self.model}"] if self.model else []
        return " ".join(["python -m benchmarks offline", *flags, *(["--quick"] if self.quick else [])])

    def spec(self, model: str) -> Spec:
        """Returns the specification for every contender. Raises ModelError."""
        checkpoint = Checkpoint.open(model)
        vocab, room = int(checkpoint.config["vocab_size"]), checkpoint.max_model_len(None)
        prompt_len = min(MOST_PROMPT_LEN, room // 2)
        output_len = min(MOST_OUTPUT_LEN, room // 2)
        mixed = workloads.mixed(
            vocab, self.num_requests, (min(16, prompt_len), prompt_len), (min(8, output_len), output_len)
        )
        warmup = workloads.warmup(vocab, min(32, self.num_requests), min(128, prompt_len), 8)
        return Spec(model=model, num_threads=self.num_threads, warmup=warmup, workloads=[mixed], quick=self.quick)


def make_bench(model: str, num_requests: int, rounds: int, threads: int, quick: bool) -> OfflineBench:
    """Builds the bench from the command line."""
    return OfflineBench(
        model=model,
        num_requests=min(num_requests, 16) if quick else num_requests,
        rounds=1 if quick else rounds,
        num_threads=threads,
        quick=quick,
    )


def run(bench: OfflineBench, json_path: str = "") -> None:
    """Measures, prints, writes. Raises PdClusterError."""
    check_writable(json_path)
    if (load := os.getloadavg()[0]) > BUSY_LOAD:
        print(f"note: this machine is busy already (load {load:.1f}); expect low figures and a wide spread", flush=True)
    started_s = time.monotonic()
    with sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        spec = bench.spec(_model(bench, Path(folder)))
        rounds = [
            _round(spec, Path(folder), number, f"round {number + 1} of {bench.rounds}")
            for number in range(bench.rounds)
        ]
    report = Report(bench.command, results(rounds, WORKLOAD, {} if bench.quick else goals_for(bench.num_threads)))
    (workload,) = spec.workloads
    report.show(
        f"{len(workload.prompts)} requests, {workload.num_prompt_tokens:,} prompt tokens and "
        f"{workload.num_output_tokens:,} output tokens, {bench.rounds} rounds, {bench.num_threads} threads, "
        f"{time.monotonic() - started_s:.0f} s"
    )
    if bench.quick:
        print("note: --quick tells whether everything runs; its figures mean nothing")
    elif bench.num_threads > 1:
        print("note: threads that wait for each other are busy, too; --threads 1 compares CPU time and judges it")
    if json_path:
        report.write(json_path)


def _model(bench: OfflineBench, folder: Path) -> str:
    """Makes the model. Raises ChildFailed."""
    made = "" if bench.model or bench.quick else make_model(folder, SMALL_SHAPE)
    return bench.model or str(made or SHIPPED_MODEL)


def in_order(number: int) -> list[str]:
    """Returns a round's order: each contender is first, in the middle and last equally often."""
    start = number % len(CONTENDERS)
    return [*CONTENDERS[start:], *CONTENDERS[:start]]


def _round(spec: Spec, folder: Path, number: int, label: str) -> Round:
    """Runs each contender once. Raises ChildFailed."""
    found: dict[str, PeerResult] = {}
    for name in in_order(number):
        started_s = time.monotonic()
        found[name] = run_peer(name, spec, folder, DEADLINE_S)
        check_lengths(spec, found[name])
        (workload,) = spec.workloads
        rate = workload.num_output_tokens / found[name].runs[workload.name].took_s
        print(f"{label}: {NAMES[name]}: {rate:,.0f} tokens/s ({time.monotonic() - started_s:.0f} s)", flush=True)
    return found
