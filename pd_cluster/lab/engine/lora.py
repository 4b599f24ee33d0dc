"""`pd-cluster bench lora`: decode steps on CPU with many adapters, against the same without, and PEFT."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

import msgspec

from pd_cluster.lab import child
from pd_cluster.lab.engine.lora_spec import LoraSpec, LoraTimes
from pd_cluster.lab.tiny_model import QUICK_SHAPE, ModelShape
from pd_cluster.tables import Better, Report, Result, check_writable

DEADLINE_S = 1800.0
BARE = "times the speed without --enable-lora"
GOALS = {0: 0.99, 8: 0.85, 32: 0.6}  # by the number of adapters in a batch of 32
MOST_DELAY = 1.2


def run(rounds: int, threads: int, quick: bool, json: str) -> None:
    """Runs the bench. Raises ConfigError, ChildFailed."""
    check_writable(json)
    shape = QUICK_SHAPE if quick else ModelShape()
    with child.sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-lora-") as place:
        folder = Path(place)
        spec = LoraSpec(
            model=str(child.make_model(folder, shape, threads)),
            folder=str(folder / "adapters"),
            batch=4 if quick else 32,
            context=64,
            rank=16,
            distinct=[1, 2] if quick else [1, 8, 32],
            drawn=[3] if quick else [8, 64, 256],
            rounds=rounds,
            has_peft=importlib.util.find_spec("peft") is not None,
        )
        times = _times(spec, folder, threads)
    asked = f"--rounds {rounds} --threads {threads}{' --quick' if quick else ''}"
    report = Report(f"pd-cluster bench lora {asked}", _results(spec, times, {} if quick else GOALS))
    report.show(f"Decode steps of {spec.batch} sequences with LoRA adapters of rank {spec.rank} on all linear layers")
    if json:
        report.write(json)


def _times(spec: LoraSpec, folder: Path, threads: int) -> LoraTimes:
    result = folder / "times.json"
    command = [sys.executable, "-m", "pd_cluster.lab.peers.lora", msgspec.json.encode(spec).decode(), str(result)]
    child.run_child(command, folder / "lora.log", DEADLINE_S, threads)
    return msgspec.json.decode(result.read_bytes(), type=LoraTimes)


def _results(spec: LoraSpec, times: LoraTimes, goals: dict[int, float]) -> list[Result]:
    def result(name: str, value: float, unit: str, better: Better, goal: float | None = None) -> Result:
        return Result(name=name, value=value, unit=unit, better=better, samples=spec.rounds, goal=goal)

    bare_s = times.bare_s
    found = [
        result("a step without --enable-lora", bare_s * 1e3, "ms", "lower"),
        result(f"no sequence has an adapter, {BARE}", bare_s / times.none_s, "×", "higher", goals.get(0)),
    ]
    for num, took_s in times.distinct_s.items():
        name = f"{num} adapter{'s' if num > 1 else ''} in the batch, {BARE}"
        found.append(result(name, bare_s / took_s, "×", "higher", goals.get(num)))
    for num, took_s in times.drawn_s.items():
        name = f"drawn from {num} by Zipf's law ({times.num_drawn[num]} in the batch), {BARE}"
        found.append(result(name, bare_s / took_s, "×", "higher"))
    few = max(num for num in times.distinct_s if num <= 8)
    if times.peft_s is not None:
        name = f"{few} adapters in the batch, times the speed of transformers with PEFT"
        found.append(result(name, times.peft_s / times.distinct_s[few], "×", "higher"))
    delay = times.loading_p99_s / times.quiet_p99_s
    return [
        *found,
        result("loading an adapter beside steps", times.load_s * 1e3, "ms", "lower"),
        result(
            "p99 of steps while adapters are loaded one after another, times without",
            delay,
            "×",
            "lower",
            MOST_DELAY if goals else None,
        ),
    ]
