"""`python -m benchmarks gpu`: the CUDA path against the device's limits, in one call of bounded length.

Parts run one after the other, each in child processes of its own, the most important first; those beyond the budget are
listed as not run, and a part that fails does not affect the others. The report is written again after every part. With
`--device cpu --quick` everything runs in a tiny form, as a trial.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.child import sigterm_raises
from benchmarks.gpu import picture as gpu_picture
from benchmarks.gpu.goals import judged
from benchmarks.gpu.parts import PARTS, Part, name_of, parts_of, planned, run_part
from benchmarks.gpu.report import REPORT_FILE, GpuReport, PartResult, read_report, table
from benchmarks.gpu.spec import (
    INDEX_FILE,
    LLAMA_8B,
    QUICK_SHAPES,
    QWEN_06B,
    Device,
    Figure,
    GpuShape,
    GpuSpec,
    Line,
    Noted,
)
from pd_cluster.devices.device import check_name
from pd_cluster.errors import ConfigError
from pd_cluster.tables import Report
from pd_cluster.transport.table import same_host_choice

BUDGET_S = 540.0
LONG_LEN, QUICK_LONG_LEN = 4096, 128  # tokens of the clusters' long prompts
QUICK_SLOWER = 4  # than an H100's host: parts may take so much longer on a busy CPU
ROOM = 1.1  # on disk, relative to the models' size


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBench:
    """The command's parameters. `folder` holds the models temporarily; "" for the system's own.

    `models` is a folder that keeps them: whole ones in it are not made again. `resume`: adds to the report in `out`.
    """

    parts: tuple[str, ...] = tuple(part.kind for part in PARTS)
    device: str = "cuda"
    dtype: str = "bfloat16"
    quick: bool = False
    budget_s: float = BUDGET_S
    out: Path = Path("gpu-report")
    folder: str = ""
    models: str = ""
    resume: bool = False

    def __post_init__(self) -> None:
        check_name(self.device)
        known = [*(part.kind for part in PARTS), "models"]
        if unknown := [name for name in self.parts if name not in known]:
            raise ConfigError(f"--parts {unknown[0]}: expected some of {','.join(known)}")
        for flag, folder in (("--folder", self.folder), ("--models", self.models)):
            if folder and not Path(folder).is_dir():
                raise ConfigError(f"{flag} {folder}: not a folder that is there")

    @property
    def shapes(self) -> tuple[GpuShape, ...]:
        return QUICK_SHAPES if self.quick else (LLAMA_8B, QWEN_06B)

    @property
    def long_len(self) -> int:
        return QUICK_LONG_LEN if self.quick else LONG_LEN

    @property
    def transport(self) -> str:
        return same_host_choice(self.device)

    @property
    def command(self) -> str:
        flags = f"--device {self.device} --dtype {self.dtype} --parts {','.join(self.parts)} --budget {self.budget_s:g}"
        return f"python -m benchmarks gpu {flags}{' --quick' if self.quick else ''}"

    def spec(self, part: Part, folder: Path) -> GpuSpec:
        shape = self.shapes[part.model]
        return GpuSpec(
            device=self.device,
            dtype=self.dtype,
            quick=self.quick,
            out=str(self.out),
            shape=shape,
            model=str(Path(self.models or folder) / f"model-{shape.name}"),
            sections=[],
        )


def make_bench(
    parts: str,
    device: str,
    quick: bool,
    budget: float,
    out: str,
    folder: str,
    models: str = "",
    resume: bool = False,
    stage: str = "",
) -> GpuBench:
    """Builds the bench from the command line, where empty means the default. Raises ConfigError."""
    if stage and parts:
        raise ConfigError(f"--stage {stage} and --parts {parts}: give one of them")
    names = parts_of(stage) if stage else tuple(name.strip() for name in parts.split(",") if name.strip())
    return GpuBench(
        parts=names or tuple(part.kind for part in PARTS),
        device=device,
        dtype="float32" if device == "cpu" else "bfloat16",
        quick=quick,
        budget_s=budget,
        out=Path(out or "gpu-report").expanduser().absolute(),
        folder=folder,
        models=models,
        resume=resume,
    )


@dataclass(slots=True)
class Measured:
    """Results by the names of figures; the last measurement counts."""

    figures: dict[str, Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    parts: list[PartResult] = field(default_factory=list)
    device: str = ""

    def take(self, lines: list[Line]) -> None:
        for line in lines:
            match line:
                case Figure():
                    self.figures[line.name] = line
                case Noted(text):
                    self.notes.append(text)
                case Device(name):
                    self.device = name
                case _:
                    pass

    def take_report(self, report: GpuReport) -> None:
        """Takes an earlier run's figures."""
        self.take(list(report.figures))
        self.notes, self.parts, self.device = report.notes, report.parts, report.device


def run(bench: GpuBench) -> bool:
    """Measures, prints, writes. Returns whether every part was done. Raises ConfigError before anything is measured."""
    bench.out.mkdir(parents=True, exist_ok=True)
    if not os.access(bench.out, os.W_OK):
        raise ConfigError(f"--out {bench.out}: not a folder that can be written")
    if "cluster" in bench.parts:
        (bench.out / gpu_picture.CSV_FILE).unlink(missing_ok=True)
    measured, started_s = Measured(), time.monotonic()
    if bench.resume:
        measured.take_report(read_report(bench.out))
    with sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-bench-", dir=bench.folder or None) as folder:
        parts = [part for part in planned(bench.parts) if not _is_made(bench, part)]
        _check_room(bench, parts, Path(folder))
        for part in parts:
            left_s = bench.budget_s - (time.monotonic() - started_s)
            _run_one(bench, part, Path(folder), left_s, measured)
            report_of(bench, measured).write(bench.out)
    if "cluster" in bench.parts and (why := gpu_picture.draw(bench.out)):
        measured.notes.append(f"no picture: {why}")
    report = report_of(bench, measured)
    report.write(bench.out)
    Report(bench.command, report.results).show(f"{report.device}, {time.monotonic() - started_s:.0f} s")
    print(f"report: {bench.out / REPORT_FILE}; as Markdown: python -m benchmarks gpu --table {bench.out / REPORT_FILE}")
    if bench.quick:
        print("note: --quick tells whether everything runs; its figures mean nothing")
    return all(part.state == "done" for part in measured.parts)


def show_table(file: str) -> None:
    """Prints a report's table. Raises ConfigError."""
    print(table(Path(file)), end="")


def report_of(bench: GpuBench, measured: Measured) -> GpuReport:
    results = judged(measured.figures, bench.shapes, bench.long_len, bench.transport, bench.quick)
    figures = list(measured.figures.values())
    return GpuReport(bench.command, measured.device, results, measured.parts, measured.notes, figures)


def _is_made(bench: GpuBench, part: Part) -> bool:
    """Whether the folder that keeps models has this part's."""
    return part.kind == "model" and bool(bench.models) and Path(bench.spec(part, Path()).model, INDEX_FILE).exists()


def _run_one(bench: GpuBench, part: Part, folder: Path, left_s: float, measured: Measured) -> None:
    spec = bench.spec(part, folder)
    if why := _why_not(part, spec, left_s, measured.parts):
        became = [PartResult(name_of(part, spec), "not run", 0.0, why)]
    else:
        print(f"{name_of(part, spec)} …", flush=True)
        became, lines = run_part(part, spec, folder, min(part.most_s * (QUICK_SLOWER if bench.quick else 1), left_s))
        measured.take(lines)
        _keep_logs(part, folder, bench.out)
    again = {each.name.partition(":")[0] for each in became}
    measured.parts = [each for each in measured.parts if each.name.partition(":")[0] not in again] + became
    for each in became:
        print(f"{each.name}: {each.state} ({each.took_s:.0f} s){': ' if each.why else ''}{each.why}", flush=True)


def _why_not(part: Part, spec: GpuSpec, left_s: float, parts: list[PartResult]) -> str:
    """Returns why the part is not started, or ""."""
    if left_s < part.least_s:
        return f"{max(0.0, left_s):.0f} s of --budget were left, and it takes {part.least_s:g} s or more"
    model = f"model {spec.shape.name}"
    if part.reads_model and any(each.name.startswith(model) and each.state != "done" for each in parts):
        return f"{model} is not there"
    return ""


def _check_room(bench: GpuBench, parts: list[Part], folder: Path) -> None:
    wanted = sum(2 * bench.shapes[part.model].num_parameters for part in parts if part.kind == "model")
    place = bench.models or str(folder)
    if (free := shutil.disk_usage(place).free) < ROOM * wanted:
        where = f"--models {place}" if bench.models else f"--folder {folder.parent}"
        raise ConfigError(
            f"{where}: the models take {wanted / 1e9:.0f} GB and {free / 1e9:.0f} GB are free; name another folder, or "
            "fewer --parts"
        )


def _keep_logs(part: Part, folder: Path, out: Path) -> None:
    """Keeps the child's output, for finding the cause of a failure."""
    log = folder / f"{part.kind}-{part.model}.log"
    if log.exists() and log.stat().st_size:
        shutil.copy(log, out / log.name)
