"""`python -m benchmarks engine`: this engine and others, on the same prompts, threads and model, one after the other.

Makes a 125-million-parameter Llama of random weights in a temporary folder, and runs every engine in a process of its
own, in rounds, so that each ratio compares runs close in time and has a spread. An engine that is absent or fails does
not stop the others. End-of-sequence tokens are ignored everywhere, and prefixes are not cached, except in the step that
measures the prefix cache.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.child import ChildFailed, make_model, run_peer, sigterm_raises
from benchmarks.engine import workloads as workloads
from benchmarks.engine.gguf import convert
from benchmarks.engine.goals import OURS, PARTS, REFERENCE, Round
from benchmarks.engine.report import make_report, show
from benchmarks.spec import PeerResult, Spec, Workload
from benchmarks.tiny_model import QUICK_SHAPE, ModelShape
from pd_cluster.errors import ConfigError
from pd_cluster.tables import check_writable

WORKLOADS = ("uniform", "mixed", *PARTS)
DEFAULT_PEERS_DIR = Path(__file__).parents[3] / ".venv-peers"
DEADLINE_S = 900.0
BUSY_LOAD = 0.7  # by other processes: engines with spinning threads suffer more than their share


@dataclass(frozen=True, slots=True)
class Peer:
    """How an engine is run: `module` of peers/; `environment`, its own, holds `package`."""

    module: str
    environment: str = ""
    package: str = ""
    standalone: bool = False

    def python(self, peers_dir: Path) -> str:
        return str(peers_dir / self.environment / "bin" / "python")

    def is_there(self, peers_dir: Path) -> bool:
        found = (peers_dir / self.environment).glob(f"lib/python*/site-packages/{self.package}")
        return not self.environment or any(found)


PEERS = {
    REFERENCE: Peer("generate"),
    "continuous": Peer("continuous"),
    "llama.cpp": Peer("llamacpp", "llama", "llama_cpp", standalone=True),
    "vllm": Peer("vllm_server", "vllm", "vllm"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBench:
    """The command's parameters. `full` runs every engine's mixed workload in every round."""

    peers: tuple[str, ...] = tuple(PEERS)
    workloads: tuple[str, ...] = WORKLOADS
    rounds: int = 3
    num_threads: int = 2
    peers_dir: Path = DEFAULT_PEERS_DIR
    quick: bool = False
    full: bool = False

    def __post_init__(self) -> None:
        for flag, given, known in (("--peers", self.peers, PEERS), ("--workload", self.workloads, WORKLOADS)):
            if unknown := [name for name in given if name not in known]:
                raise ConfigError(f"{flag} {unknown[0]}: expected some of {','.join(known)}")

    @property
    def shape(self) -> ModelShape:
        return QUICK_SHAPE if self.quick else ModelShape()

    @property
    def command(self) -> str:
        flags = [f"--rounds {self.rounds}", f"--threads {self.num_threads}"]
        flags += [f"--{name}" for name, given in (("quick", self.quick), ("full", self.full)) if given]
        return f"python -m benchmarks engine --peers {','.join(self.peers)} --workload {','.join(self.workloads)} " + (
            " ".join(flags)
        )

    @property
    def setup_command(self) -> str:
        folder = "" if self.peers_dir == DEFAULT_PEERS_DIR else f" {self.peers_dir}"
        return f"sh scripts/setup_bench_peers.sh{folder}"

    def specs(self, model: Path) -> tuple[Spec, list[Workload]]:
        """Returns the specification for every engine, and the workloads."""
        vocab = self.shape.vocab_size
        if self.quick:
            every = [workloads.uniform(vocab, 4, 16, 4), workloads.mixed(vocab, 6, (4, 40), (2, 8))]
            warmup = workloads.warmup(vocab, 4, 8, 2)
        else:
            every = [workloads.uniform(vocab), workloads.mixed(vocab)]
            warmup = workloads.warmup(vocab)
        spec = Spec(model=str(model), num_threads=self.num_threads, warmup=warmup, quick=self.quick)
        return spec, [each for each in every if each.name in self.workloads]


@dataclass(slots=True)
class Measured:
    """The rounds, and why engines could not be measured: engine -> reason."""

    rounds: list[dict[str, PeerResult]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def as_rounds(self) -> list[Round]:
        return list(self.rounds)


def make_bench(
    peers: str, workload: str, rounds: int, threads: int, peers_dir: str, quick: bool, full: bool
) -> EngineBench:
    """Builds the bench from the command line, where empty means all. Raises ConfigError."""
    return EngineBench(
        peers=_names(peers) or ((REFERENCE,) if quick else tuple(PEERS)),
        workloads=_names(workload) or WORKLOADS,
        rounds=1 if quick else rounds,
        num_threads=threads,
        peers_dir=Path(peers_dir).expanduser().absolute() if peers_dir else DEFAULT_PEERS_DIR,
        quick=quick,
        full=full,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def run(bench: EngineBench, json_path: str = "") -> None:
    """Measures, prints, writes. Raises PdClusterError: our own engine failed, or a flag has an unknown name."""
    check_writable(json_path)
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        print(f"note: this machine is busy already (load {load:.1f}); expect low figures and a wide spread", flush=True)
    started_s = time.monotonic()
    with sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        measured = Measured(missing=dict(absent_peers(bench)))
        for reason in measured.missing.values():
            print(f"note: {reason}", flush=True)
        spec, every = prepare(bench, Path(folder), measured)
        for number in range(bench.rounds):
            measured.rounds.append({})
            run_round(bench, spec, every, Path(folder), measured, number)
    report = make_report(bench.command, measured.as_rounds(), bench.peers, measured.missing)
    show(report, f"{bench.rounds} rounds, {bench.num_threads} threads, {time.monotonic() - started_s:.0f} s")
    if bench.quick:
        print("note: --quick tells whether everything runs; its figures mean nothing")
    if json_path:
        report.write(json_path)


def absent_peers(bench: EngineBench) -> Iterator[tuple[str, str]]:
    """Yields engine -> why it is missing and what installs it."""
    for name in bench.peers:
        if not PEERS[name].is_there(bench.peers_dir):
            yield name, f"peer absent: {name} is not in {bench.peers_dir}; set it up with: {bench.setup_command}"


def prepare(bench: EngineBench, folder: Path, measured: Measured) -> tuple[Spec, list[Workload]]:
    """Makes the model, and its GGUF form if an engine needs it."""
    model = make_model(folder, bench.shape, bench.num_threads)
    spec, every = bench.specs(model)
    if "llama.cpp" in bench.peers and "llama.cpp" not in measured.missing:
        gguf = folder / "model.gguf"
        convert(model, gguf)
        spec = spec_with(spec, gguf=str(gguf))
    return spec, every


def run_round(
    bench: EngineBench, spec: Spec, every: list[Workload], folder: Path, measured: Measured, number: int
) -> None:
    """Runs each engine once. Raises ChildFailed if our own fails."""
    found = measured.rounds[-1]
    label = f"round {number + 1} of {bench.rounds}"
    for workload, modules in PARTS.items():
        for module in modules if workload in bench.workloads else ():
            started_s = time.monotonic()
            found[module] = run_peer(module, spec, folder, DEADLINE_S)
            print(f"{label}: {module} ({time.monotonic() - started_s:.0f} s)", flush=True)
    if not every:
        return
    found[OURS] = run_engine(Peer("ours"), spec_with(spec, workloads=every), folder, f"{label}: {OURS}")
    for name in bench.peers:
        if name in measured.missing:
            continue
        peer = PEERS[name]
        once = number > 0 and not bench.full and len(every) > 1  # a padded batch takes minutes
        own = spec_with(spec, workloads=every[:1] if once else every, python=peer.python(bench.peers_dir))
        try:
            found[name] = run_engine(peer, own, folder, f"{label}: {name}")
        except ChildFailed as error:
            measured.missing[name] = f"{name} failed: {str(error).splitlines()[0]}"
            print(f"{label}: {name}: {error}", flush=True)


def run_engine(peer: Peer, spec: Spec, folder: Path, label: str) -> PeerResult:
    started_s = time.monotonic()
    result = run_peer(peer.module, spec, folder, DEADLINE_S, peer.standalone)
    rates = [
        f"{each.name} {each.num_output_tokens / result.runs[each.name].took_s:.1f} tokens/s" for each in spec.workloads
    ]
    print(f"{label}: {', '.join(rates)} ({time.monotonic() - started_s:.0f} s)", flush=True)
    check_lengths(spec, result)
    return result


def check_lengths(spec: Spec, result: PeerResult) -> None:
    """Checks that every engine produced the requested number of tokens. Raises ChildFailed."""
    for each in spec.workloads:
        lens = [len(output) for output in result.runs[each.name].outputs]
        if lens != each.output_lens:
            raise ChildFailed(f"{each.name}: {sum(lens)} output tokens instead of {each.num_output_tokens}")


def spec_with(spec: Spec, **changes: object) -> Spec:
    return msgspec.structs.replace(spec, **changes)
