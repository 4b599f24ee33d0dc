"""The parts of `benchmarks gpu`, in order of importance; each runs in a child of its own, with a deadline.

A part whose child fails continues after the failed section, in a new child; earlier results stay. Knows nothing of
goals.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.child import ChildFailed, run_child
from benchmarks.gpu import handover as gpu_handover
from benchmarks.gpu.report import PartResult
from benchmarks.gpu.spec import Began, Ended, GpuSpec, Line, Writer, read_lines
from pd_cluster.errors import ConfigError
from pd_cluster.settings.engine import PDL, PROMPT_GRAPHS, SKINNY_GATE

MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class Part:
    """`module` of peers/, or "" for the parts that run here. `model`: the shape that it uses.

    `stages` of scripts/gpu_check.sh measure it. `least_s`: with less time it is not started; `most_s`: it is then
    ended. Both are for an H100.
    """

    kind: str
    stages: tuple[str, ...]
    module: str
    sections: tuple[str, ...]
    least_s: float
    most_s: float
    model: int = 0
    reads_model: bool = True


ENGINE = ("startup", "decode", "overhead", "prefill", "mixed", "profile")
DECIDING = ("sampled", "ragged", "seats", "graphs")
MODELS = (
    Part("model", (), "gpu_model", (), 20, 120, 0, False),
    Part("model", (), "gpu_model", (), 5, 40, 1, False),
)
PARTS = (
    Part("ceilings", ("engine", "cluster"), "gpu_ceilings", (), 10, 60, 0, False),
    Part("engine", ("engine",), "gpu_engine", (*ENGINE, *DECIDING), 40, 180),
    Part("layout", ("engine",), "gpu_layout", (), 10, 40, 0, False),
    Part("start", ("engine",), "gpu_start", ("cold", "warm"), 25, 90),
    Part("handover", ("cluster",), "", ("with checksums", "without checksums"), 15, 45, 0, False),
    Part("cluster", ("cluster",), "gpu_cluster", ("split", "colocated"), 50, 150),
    Part("transformers", ("peers",), "gpu_continuous", (), 40, 110),
    Part("small", ("peers",), "gpu_engine", ENGINE, 25, 80, 1),
    Part("attention", ("engine",), "gpu_attention", (), 15, 60, 0, False),
    Part("small-transformers", ("peers",), "gpu_continuous", (), 30, 60, 1),
    Part("deterministic", ("engine",), "gpu_deterministic", ("decode", "prefill"), 30, 90),
    Part("speedups", ("engine",), "gpu_speedups", (PDL, SKINNY_GATE, PROMPT_GRAPHS), 30, 120),
)


def parts_of(stage: str) -> tuple[str, ...]:
    """Returns the names of a stage's parts, in order. Raises ConfigError."""
    names = tuple(part.kind for part in PARTS if stage in part.stages)
    if not names:
        stages = sorted({each for part in PARTS for each in part.stages})
        raise ConfigError(f"--stage {stage}: expected one of {', '.join(stages)}")
    return names


def planned(names: Sequence[str]) -> list[Part]:
    """Returns those parts, with each model made before it is first read; "models" makes both."""
    found: list[Part] = list(MODELS) if "models" in names else []
    for part in PARTS:
        if part.kind in names:
            if part.reads_model and MODELS[part.model] not in found:
                found.append(MODELS[part.model])
            found.append(part)
    return found


def name_of(part: Part, spec: GpuSpec) -> str:
    return f"{part.kind} {spec.shape.name}" if part.reads_model or part.kind == "model" else part.kind


def run_part(part: Part, spec: GpuSpec, folder: Path, deadline_s: float) -> tuple[list[PartResult], list[Line]]:
    """Returns the part's outcome, by section if one failed, and all results. Never raises ChildFailed."""
    name, started_s = name_of(part, spec), time.monotonic()
    lines: list[Line] = []
    failures: list[PartResult] = []
    sections: Sequence[str] = part.sections
    while True:
        left_s = max(1.0, deadline_s - (time.monotonic() - started_s))
        own = msgspec.structs.replace(spec, sections=list(sections))
        why, new = _attempt(part, own, folder, left_s)
        lines += new
        took_s = time.monotonic() - started_s
        if not why:
            break
        failed = _interrupted(new, sections)
        label = f"{name}: {failed}" if failed else name
        failures.append(PartResult(label, "failed", took_s, why))
        sections = sections[sections.index(failed) + 1 :] if failed in sections else ()
        if not sections or took_s + part.least_s > deadline_s:
            failures += [
                PartResult(f"{name}: {each}", "not run", 0.0, "no time was left after the failure before it")
                for each in sections
            ]
            break
    return failures or [PartResult(name, "done", took_s)], lines


def _attempt(part: Part, spec: GpuSpec, folder: Path, deadline_s: float) -> tuple[str, list[Line]]:
    """Returns why it failed, or "", and the lines that were written."""
    place = folder / f"{part.kind}-{part.model}"
    spec_file, result_file = place.with_suffix(".spec.json"), place.with_suffix(".result.jsonl")
    result_file.unlink(missing_ok=True)
    spec_file.write_bytes(msgspec.json.encode(spec))
    try:
        if part.module:
            command = [sys.executable, "-m", f"benchmarks.peers.{part.module}", str(spec_file), str(result_file)]
            run_child(command, place.with_suffix(".log"), deadline_s, num_threads(spec.quick))
        else:
            gpu_handover.run(spec, Writer(result_file), folder, deadline_s)
    except ChildFailed as error:
        return str(error), read_lines(result_file)
    return "", read_lines(result_file)


def _interrupted(lines: Sequence[Line], sections: Sequence[str]) -> str:
    """Returns the first section that began and did not end; preferably one of the part's own."""
    ended = {line.section for line in lines if isinstance(line, Ended)}
    begun = [line.section for line in lines if isinstance(line, Began) and line.section not in ended]
    return next((each for each in begun if each in sections), begun[0] if begun else "")


def num_threads(quick: bool) -> int:
    return 1 if quick else min(MOST_THREADS, len(os.sched_getaffinity(0)))
