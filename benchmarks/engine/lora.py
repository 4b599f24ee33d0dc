"""`python -m benchmarks lora`: decode steps on CPU with many adapters, against the same without, and PEFT."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks import child
from benchmarks.engine.bench import PEERS
from benchmarks.engine.lora_spec import LoraSpec, LoraTimes
from benchmarks.tiny_model import QUICK_SHAPE, ModelShape
from pd_cluster.errors import ConfigError
from pd_cluster.tables import Better, Report, Result, check_writable

DEADLINE_S = 1800.0
BARE = "times the speed without --enable-lora"
GOALS = {0: 0.99, 8: 0.85, 32: 0.6}  # by the number of adapters in a batch of 32
MOST_DELAY = 1.2
VLLM = "vllm"


class VllmTimes(msgspec.Struct):
    """Seconds of a decode step of vLLM for CPU, its sampling included."""

    version: str
    none: float
    adapters: float


def run(rounds: int, threads: int, quick: bool, json: str, peers_dir: str = "") -> None:
    """Runs the bench; vLLM takes part where `peers_dir` has it. Raises ConfigError, ChildFailed."""
    check_writable(json)
    peers = Path(peers_dir).expanduser().absolute() if peers_dir else None
    if quick and peers is not None:
        raise ConfigError(f"--peers-dir: not with --quick, whose model has heads that {VLLM} does not take")
    if peers is not None and not PEERS[VLLM].is_there(peers):
        raise ConfigError(
            f"--peers-dir: {VLLM} is not in {peers}; set it up with: sh scripts/setup_bench_peers.sh FOLDER"
        )
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
        theirs = _vllm_times(spec, folder, threads, peers) if peers is not None else None
    asked = f"--rounds {rounds} --threads {threads}{' --quick' if quick else ''}"
    found = _results(spec, times, {} if quick else GOALS)
    if theirs is not None:
        asked += f" --peers-dir {peers_dir}"
        found += _beside_vllm(spec, times, theirs)
    report = Report(f"python -m benchmarks lora {asked}", found)
    report.show(f"Decode steps of {spec.batch} sequences with LoRA adapters of rank {spec.rank} on all linear layers")
    if json:
        report.write(json)


def _times(spec: LoraSpec, folder: Path, threads: int) -> LoraTimes:
    result = folder / "times.json"
    command = [sys.executable, "-m", "benchmarks.peers.lora", msgspec.json.encode(spec).decode(), str(result)]
    child.run_child(command, folder / "lora.log", DEADLINE_S, threads)
    return msgspec.json.decode(result.read_bytes(), type=LoraTimes)


def _vllm_times(spec: LoraSpec, folder: Path, threads: int, peers: Path) -> VllmTimes:
    asked, result = folder / "vllm.json", folder / "vllm-times.json"
    folders = [str(Path(spec.folder) / str(at + 1)) for at in range(few_of(spec))]
    said = {name: getattr(spec, name) for name in ("model", "rank", "context", "batch", "rounds")}
    asked.write_bytes(msgspec.json.encode({**said, "folders": folders, "threads": threads}))
    command = [PEERS[VLLM].python(peers), "-P", str(child.PEERS_FOLDER / "vllm_lora.py"), str(asked), str(result)]
    child.run_child(command, folder / "vllm.log", DEADLINE_S, threads)
    return msgspec.json.decode(result.read_bytes(), type=VllmTimes)


def _beside_vllm(spec: LoraSpec, times: LoraTimes, theirs: VllmTimes) -> list[Result]:
    """Returns ratios beside vLLM, whose steps include sampling and scheduling; ours are the model's alone."""
    few = few_of(spec)
    ratios = {
        f"{few} adapters in the batch, times the speed of a step of vLLM {theirs.version}, which samples, too": (
            theirs.adapters / times.distinct_s[few]
        ),
        "no adapter, the same": theirs.none / times.none_s,
        f"vLLM: {few} adapters in the batch, times its own speed with none": theirs.none / theirs.adapters,
    }
    return [
        Result(name=name, value=value, unit="×", better="higher", samples=spec.rounds) for name, value in ratios.items()
    ]


def few_of(spec: LoraSpec) -> int:
    """Returns how many adapters a batch has where other engines are asked, too."""
    return max(num for num in spec.distinct if num <= 8)


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
    few = few_of(spec)
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
