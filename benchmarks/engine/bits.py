"""`python -m benchmarks engine --dtype … --quantization …`: weights of fewer bits, beside vLLM's and llama.cpp's.

Each combination of the flags is one form of the model. In every round each engine runs each form, in a process of its
own, so that a ratio compares runs close in time. The forms of others: vLLM has the same dtype, and reads what
`pd-cluster quantize` wrote; llama.cpp has BF16, Q8_0 or Q4_0, and the same type as ours, or float32, for the output
layer. Its KV cache is float16 where a form is not plain float32.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.child import ChildFailed, make_model, run_child, run_peer, sigterm_raises
from benchmarks.engine import workloads
from benchmarks.engine.bench import DEADLINE_S, PEERS, Peer, absent_peers, run_engine, spec_with
from benchmarks.engine.bench import EngineBench as Setup
from benchmarks.engine.bench import make_bench as make_setup
from benchmarks.engine.gguf import convert
from benchmarks.engine.goals import FLOORS, OURS
from benchmarks.engine.variants import ONE_BILLION
from benchmarks.engine.variants_spec import Variant
from benchmarks.spec import PeerResult, Spec, Workload
from benchmarks.tiny_model import QUICK_SHAPE, ModelShape
from pd_cluster.errors import ConfigError
from pd_cluster.tables import Better, Report, Result, check_writable, spread

DTYPES = ("float32", "bfloat16")
SCHEMES = {
    "none": None,
    "int8": "w8a8",
    "int8_wo": "w8a16",
    "int4_wo": "w4a16",
    "w4a8": "w4a8",
}  # ours -> of `pd-cluster quantize`
GGML = {"none": "", "int8": "Q8_0", "int8_wo": "Q8_0", "int4_wo": "Q4_0", "w4a8": "Q4_0"}
GGML_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
BITS = {"none": 0.0, "int8": 8.0, "int8_wo": 8.0, "int4_wo": 4.25, "w4a8": 4.25}  # 0: the dtype's
DTYPE_BITS = {"float32": 32.0, "bfloat16": 16.0}
SHAPES = {"125M": ModelShape(), "1B": ONE_BILLION}
OTHERS = ("vllm", "llama.cpp")
ONE, SIXTEEN, UNIFORM = "one", "sixteen", "uniform"
GOALS: Mapping[tuple[str, str, str], tuple[str, float]] = {  # (dtype, quantization, workload) -> (other, times it)
    ("bfloat16", "none", ONE): ("vllm", 1.2),
    ("bfloat16", "none", UNIFORM): ("vllm", 1.2),
    ("bfloat16", "int4_wo", ONE): ("llama.cpp", 1.0),
    ("bfloat16", "int4_wo", SIXTEEN): ("llama.cpp", 2.0),
    ("bfloat16", "w4a8", ONE): ("llama.cpp", 1.0),  # which rounds activations to int8, too
    ("bfloat16", "w4a8", SIXTEEN): ("llama.cpp", 2.0),
}
PREPARE_DEADLINE_S = 1800.0


@dataclass(frozen=True, slots=True)
class Form:
    """One form of a model: what our flags ask for. `head` is the scheme of the output layer, "none" for the dtype."""

    dtype: str
    quantization: str
    head: str

    def __str__(self) -> str:
        words = [self.dtype, *([self.quantization] if self.quantization != "none" else [])]
        return " ".join([*words, *([f"head {self.head}"] if self.head != "none" else [])])

    @property
    def variant(self) -> Variant:
        scheme, head = (None if name == "none" else name for name in (self.quantization, self.head))
        return Variant(dtype=self.dtype, quantization=scheme, quantize_head=head)

    @property
    def gguf_types(self) -> tuple[str, str]:
        """Returns ggml's types of the layers and of the output layer; empty for plain float32."""
        plain = GGML_DTYPES[self.dtype]
        types = (GGML[self.quantization] or plain, GGML[self.head] or plain)
        return ("", "") if types == ("F32", "F32") else types

    def read_nbytes(self, shape: ModelShape) -> float:
        """Bytes of weights that a token of a batch of one reads."""
        layers = sum(out * into for out, into in shape.layer_linears()) * shape.num_layers
        bits = (BITS[name] or DTYPE_BITS[self.dtype] for name in (self.quantization, self.head))
        return sum(num * each / 8 for num, each in zip((layers, shape.head[0] * shape.head[1]), bits, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class BitsBench:
    """The command's parameters."""

    forms: tuple[Form, ...]
    shapes: Mapping[str, ModelShape]
    setup: Setup
    command: str

    def workloads(self, vocab_size: int) -> list[Workload]:
        sizes = ((1, 4, 3), (2, 4, 3), (3, 8, 2)) if self.setup.quick else ((1, 32, 96), (16, 32, 64), (32, 128, 64))
        return [
            workload_named(name, workloads.uniform(vocab_size, *size))
            for name, size in zip((ONE, SIXTEEN, UNIFORM), sizes, strict=True)
        ]

    def warmup(self, vocab_size: int) -> Workload:
        size = (3, 8, 2) if self.setup.quick else (32, 128, 4)
        return workloads.warmup(vocab_size, *size)


def workload_named(name: str, workload: Workload) -> Workload:
    return Workload(name=name, prompts=workload.prompts, output_lens=workload.output_lens)


def make_bench(dtypes: str, quantization: str, head: str, shapes: str, setup: Setup) -> BitsBench:
    """Builds the bench from the command line: names with commas, empty for the default. Raises ConfigError."""
    asked = {
        "--dtype": (names(dtypes) or ("float32",), DTYPES),
        "--quantization": (names(quantization) or ("none",), SCHEMES),
        "--quantize-head": (names(head) or ("none",), SCHEMES),
        "--shape": (names(shapes) or ("125M",), SHAPES),
    }
    for flag, (given, known) in asked.items():
        if unknown := [name for name in given if name not in known]:
            raise ConfigError(f"{flag} {unknown[0]}: expected some of {','.join(known)}")
    forms = (asked[flag][0] for flag in ("--dtype", "--quantization", "--quantize-head"))
    flags = [f"{flag} {','.join(given)}" for flag, (given, _) in asked.items()]
    flags += [f"--peers {','.join(setup.peers)}", f"--rounds {setup.rounds}", f"--threads {setup.num_threads}"]
    return BitsBench(
        forms=tuple(Form(*each) for each in itertools.product(*forms)),
        shapes={"tiny": QUICK_SHAPE} if setup.quick else {name: SHAPES[name] for name in asked["--shape"][0]},
        setup=setup,
        command=f"python -m benchmarks engine {' '.join(flags)}{' --quick' if setup.quick else ''}",
    )


def setup_of(peers: str, workload: str, rounds: int, threads: int, peers_dir: str, quick: bool) -> Setup:
    """Returns where other engines are and how often each runs. Raises ConfigError."""
    if workload:
        raise ConfigError(f"--workload {workload}: not together with --dtype, --quantization, --quantize-head, --shape")
    chosen = names(peers) or (() if quick else OTHERS)
    if unknown := [name for name in chosen if name not in OTHERS]:
        raise ConfigError(f"--peers {unknown[0]}: expected some of {','.join(OTHERS)} with --dtype or --quantization")
    setup = make_setup(",".join(chosen), "", rounds, threads, peers_dir, quick, full=False)
    return dataclasses.replace(setup, peers=chosen)


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@dataclass(slots=True)
class Figures:
    """tokens/s by (form, workload, engine), a value a round; and why an engine is missing: (form, engine) -> reason."""

    rates: dict[tuple[Form, str, str], list[float]] = field(default_factory=dict)
    missing: dict[tuple[Form, str], str] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)
    read_bytes_per_s: float = 0.0

    def add(self, form: Form, engine: str, result: PeerResult, every: list[Workload]) -> None:
        self.engines[engine] = f"{result.version}; {result.settings}"
        for each in every:
            rate = each.num_output_tokens / result.runs[each.name].took_s
            self.rates.setdefault((form, each.name, engine), []).append(rate)


def run(bench: BitsBench, json_path: str = "") -> None:
    """Measures, prints, writes. Raises PdClusterError: our own engine failed."""
    check_writable(json_path)
    results: list[Result] = []
    absent = dict(absent_peers(bench.setup))
    for reason in absent.values():
        print(f"note: {reason}", flush=True)
    for name, shape in bench.shapes.items():
        with sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-bits-") as folder:
            found = _measure(bench, name, shape, Path(folder), set(absent))
        results += list(_results(bench, name, shape, found))
        for engine, said in found.engines.items():
            print(f"{engine}: {said}")
        for (form, engine), reason in found.missing.items():
            print(f"note: {engine} with {form}: {reason}")
    report = Report(bench.command, results)
    report.show(f"Weights of fewer bits, {bench.setup.rounds} rounds, {bench.setup.num_threads} threads")
    if bench.setup.quick:
        print("note: --quick tells whether everything runs; its figures mean nothing")
    if json_path:
        report.write(json_path)


def _measure(bench: BitsBench, name: str, shape: ModelShape, folder: Path, absent: set[str]) -> Figures:
    setup, found = bench.setup, Figures()
    model = make_model(folder, shape, setup.num_threads)
    every = bench.workloads(shape.vocab_size)
    spec = Spec(
        model=str(model), num_threads=setup.num_threads, warmup=bench.warmup(shape.vocab_size), quick=setup.quick
    )
    if "llama.cpp" in setup.peers and "llama.cpp" not in absent:
        convert(model, folder / "model.gguf")
    found.read_bytes_per_s = run_peer(FLOORS, spec, folder, DEADLINE_S).figures["read_gb_per_s"] * 1e9
    for number in range(setup.rounds):
        for form in bench.forms:
            label = f"{name}, round {number + 1} of {setup.rounds}, {form}"
            own = spec_with(
                spec,
                workloads=every,
                dtype=form.dtype,
                quantization=form.variant.quantization,
                quantize_head=form.variant.quantize_head,
            )
            found.add(form, OURS, run_engine(Peer("ours"), own, folder, f"{label}: {OURS}"), every)
            for engine in (each for each in setup.peers if each not in absent and (form, each) not in found.missing):
                try:
                    theirs = _spec_of(engine, form, own, folder, setup)
                    found.add(form, engine, run_engine(PEERS[engine], theirs, folder, f"{label}: {engine}"), every)
                except ChildFailed as error:
                    found.missing[form, engine] = str(error).splitlines()[0]
                    print(f"{label}: {engine}: {error}", flush=True)
    return found


def _spec_of(engine: str, form: Form, own: Spec, folder: Path, setup: Setup) -> Spec:
    """Returns the task of another engine, whose files are made first. Raises ChildFailed."""
    spec = spec_with(own, python=PEERS[engine].python(setup.peers_dir), quantization=None, quantize_head=None)
    if engine == "llama.cpp":
        kind, head = form.gguf_types
        return spec_with(spec, gguf=str(folder / "model.gguf"), gguf_type=kind, gguf_head_type=head)
    scheme = SCHEMES[form.quantization]
    if scheme is None:
        return spec
    out = folder / f"model-{scheme}"
    if not out.exists():
        command = [sys.executable, "-m", "pd_cluster", "quantize", own.model, str(out), "--scheme", scheme]
        command += ["--method", "rtn", "--no-evaluate"]
        run_child(command, folder / "quantize.log", PREPARE_DEADLINE_S, own.num_threads)
    return spec_with(spec, model=str(out))


def _results(bench: BitsBench, model: str, shape: ModelShape, found: Figures) -> Iterator[Result]:
    for form in bench.forms:
        for workload in (ONE, SIXTEEN, UNIFORM):
            rates = {engine: found.rates[form, workload, engine] for engine in _engines(found, form, workload)}
            for engine, values in rates.items():
                yield _result(f"{model}, {form}, {workload}: {engine}", values, "tokens/s")
            for engine in rates.keys() - {OURS}:
                other, goal = GOALS.get((form.dtype, form.quantization, workload), ("", None))
                yield _result(
                    f"{model}, {form}, {workload}: ours, times {engine}",
                    [ours / theirs for ours, theirs in zip(rates[OURS], rates[engine], strict=False)],
                    "×",
                    goal=goal if engine == other and not bench.setup.quick else None,
                )
        floor_s = form.read_nbytes(shape) / found.read_bytes_per_s
        own = median(found.rates[form, ONE, OURS])
        yield _result(f"{model}, {form}, {ONE}: ours, times reading its bytes", [1 / own / floor_s], "×", "lower")


def _engines(found: Figures, form: Form, workload: str) -> list[str]:
    return [engine for each, name, engine in found.rates if (each, name) == (form, workload)]


def _result(name: str, values: list[float], unit: str, better: Better = "higher", goal: float | None = None) -> Result:
    return Result(
        name=name,
        value=median(values),
        unit=unit,
        better=better,
        samples=len(values),
        spread=spread(values),
        goal=goal,
    )
