"""`python -m benchmarks gpu`: compares the CUDA path to the device's limits, in one command of bounded length.

Parts run one after the other, the most important first, each in separate child processes. Parts beyond the budget are
listed as not run. A part that fails does not affect the others. The report is written again after each part. With
`--device cpu --quick`, everything runs in a tiny form, as a test.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child_process import ChildFailed, run_module, sigterm_raises
from benchmarks.figures import names_of
from benchmarks.gpu import gpu_handover
from benchmarks.gpu.gpu_messages import LLAMA_8B, QUICK_SHAPE, WHOLE_FILE, Failed, GpuSpec, Line, Writer, read_lines
from benchmarks.gpu.gpu_report import GpuReport, PartResult
from pd_cluster.devices.device import check_name
from pd_cluster.errors import ConfigError
from pd_cluster.settings.engine_config import PDL, PROMPT_GRAPHS, SKINNY_GATE

QUICK_SLOWER = 4  # multiple of the duration with an H100 that parts may take on a busy CPU
ROOM = 1.1  # required disk space, relative to the model's size
MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class Part:
    """`module`: the module in peers/; "" for the part that runs in this process. `stages`: the stages of
    scripts/gpu_check.sh that measure it.

    `least_s`: the part is not started with less time. `most_s`: the part is ended after this time. Both times
    are for an H100.
    """

    name: str
    stages: tuple[str, ...]
    module: str
    sections: tuple[str, ...]
    least_s: float
    most_s: float
    reads_model: bool = True


ENGINE = ("startup", "decode", "overhead", "prefill", "mixed", "drafts", "profile")
MODEL = Part("model", (), "gpu_model", (), 20, 120, False)
PARTS = (
    Part("ceilings", ("engine", "cluster"), "gpu_ceilings", (), 10, 60, False),
    Part("engine", ("engine",), "gpu_engine", ENGINE, 40, 180),
    Part("handover", ("cluster",), "", (gpu_handover.CHECKED, gpu_handover.UNCHECKED), 15, 45, False),
    Part("cluster", ("cluster",), "gpu_cluster", ("split", "colocated"), 50, 150),
    Part("sparse", ("engine",), "gpu_sparse", ("decode 1", "decode 32", "prefill"), 10, 40, False),
    Part("deterministic", ("engine",), "gpu_engine", ("deterministic",), 30, 120),
    Part("speedups", ("engine",), "gpu_engine", (PDL, SKINNY_GATE, PROMPT_GRAPHS), 30, 120),
    Part("states", ("engine",), "gpu_states", (), 15, 60, False),
)


def parts_of(parts: str, stage: str) -> tuple[str, ...]:
    """Returns the named parts; all if none is named. Raises ConfigError."""
    if stage and parts:
        raise ConfigError(f"--stage {stage} and --parts {parts}: give one of them")
    if parts == "models":
        return (MODEL.name,)
    found = tuple(part.name for part in PARTS if stage in part.stages)
    if stage and not found:
        raise ConfigError(f"--stage {stage}: expected engine or cluster")
    return found or names_of("--parts", parts, [part.name for part in PARTS])


@dataclass(frozen=True, slots=True)
class GpuBench:
    """The command's parameters. `models`: a folder that keeps the model; a complete model in it is used again.

    `resume`: adds to the report in `out`.
    """

    parts: tuple[str, ...]
    device: str
    quick: bool
    budget_s: float
    out: Path
    models: str
    resume: bool

    def __post_init__(self) -> None:
        check_name(self.device)
        if self.models and not Path(self.models).is_dir():
            raise ConfigError(f"--models {self.models}: no such folder")

    @property
    def command(self) -> str:
        flags = f"--device {self.device} --parts {','.join(self.parts)} --budget {self.budget_s:g}"
        return f"python -m benchmarks gpu {flags}{' --quick' * self.quick}"

    def spec(self, part: Part, folder: Path) -> GpuSpec:
        shape = QUICK_SHAPE if self.quick else LLAMA_8B
        return GpuSpec(
            device=self.device,
            dtype="float32" if self.device == "cpu" else "bfloat16",
            quick=self.quick,
            out=str(self.out),
            shape=shape,
            model=str(Path(self.models or folder) / "model-8B"),
            sections=part.sections,
        )


def run(bench: GpuBench) -> bool:
    """Measures, prints, writes. Returns whether all parts were done. Raises ConfigError before any measurement."""
    bench.out.mkdir(parents=True, exist_ok=True)
    if not os.access(bench.out, os.W_OK):
        raise ConfigError(f"--out {bench.out}: not a folder that can be written")
    report = GpuReport.read(bench.out) if bench.resume else GpuReport()
    report.command, report.quick, started_s = bench.command, bench.quick, time.monotonic()
    with sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        chosen = [part for part in PARTS if part.name in bench.parts]
        if MODEL.name in bench.parts or any(part.reads_model for part in chosen):
            chosen = [*([] if is_made(bench, Path(folder)) else [MODEL]), *chosen]
        for part in chosen:
            left_s = bench.budget_s - (time.monotonic() - started_s)
            became, lines = run_part(bench, part, Path(folder), left_s)
            print(f"{part.name}: {became.state} ({became.took_s:.0f} s) {became.why}", flush=True)
            report.take(became, lines)
            report.write(bench.out)
    report.show(f"{report.device}, {time.monotonic() - started_s:.0f} s")
    if bench.quick:
        print("note: --quick only checks that everything runs; its figures mean nothing")
    return all(part.state == "done" for part in report.parts)


def is_made(bench: GpuBench, folder: Path) -> bool:
    """Whether the folder for the model already contains it. Raises ConfigError if there is no space for it."""
    spec = bench.spec(MODEL, folder)
    if Path(spec.model, WHOLE_FILE).exists():
        return True
    wanted, place = 2 * spec.shape.num_parameters, Path(spec.model).parent
    if (free := shutil.disk_usage(place).free) < ROOM * wanted:
        raise ConfigError(
            f"--models {place}: the model takes {wanted / 1e9:.0f} GB and {free / 1e9:.0f} GB are free; name another "
            "folder, or fewer --parts"
        )
    return False


def run_part(bench: GpuBench, part: Part, folder: Path, left_s: float) -> tuple[PartResult, list[Line]]:
    """Returns the part's outcome and its lines. Never raises ChildFailed."""
    spec, started_s = bench.spec(part, folder), time.monotonic()
    if left_s < part.least_s:
        return PartResult(part.name, "not run", 0.0, f"{max(0.0, left_s):.0f} s of --budget were left"), []
    if part.reads_model and not Path(spec.model, WHOLE_FILE).exists():
        return PartResult(part.name, "not run", 0.0, "the model does not exist"), []
    print(f"{part.name} …", flush=True)
    deadline_s = min(part.most_s * (QUICK_SLOWER if bench.quick else 1), left_s)
    place = folder / part.name
    result_file, log = place.with_suffix(".result"), place.with_suffix(".log")
    why = ""
    try:
        if part.module:
            num_threads = 1 if bench.quick else min(MOST_THREADS, len(os.sched_getaffinity(0)))
            run_module(part.module, spec, place, deadline_s, num_threads)
        else:
            gpu_handover.run(spec, Writer(result_file), folder, deadline_s)
    except ChildFailed as error:
        why = str(error)
    if log.exists() and log.stat().st_size:
        shutil.copy(log, bench.out / log.name)
    lines = read_lines(result_file)
    why = why or "; ".join(f"{line.section}: {line.why}" for line in lines if isinstance(line, Failed))
    return PartResult(part.name, "failed" if why else "done", time.monotonic() - started_s, why), lines
