"""Start-up of an engine by phase, twice: with an empty cache of compiled kernels, and with the cache that it left."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.child import run_child
from benchmarks.gpu.parts import num_threads
from benchmarks.gpu.spec import Figure, GpuSpec, Writer, child_main, read_lines

DEADLINE_S = 110.0


def measure(spec: GpuSpec, results: Writer) -> None:
    with tempfile.TemporaryDirectory(prefix="pd-cluster-start-") as folder:
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder, "triton"))
        for name in spec.sections:
            with results.section(name):
                for line in one_start(spec, name, Path(folder)):
                    results.put(line)


def one_start(spec: GpuSpec, name: str, folder: Path) -> list[Figure]:
    """Returns the figures of a start in a process of its own. Raises ChildFailed."""
    spec_file, result_file = folder / f"{name}.spec.json", folder / f"{name}.result.jsonl"
    own = msgspec.structs.replace(spec, sections=["startup"], label=f", {name} kernels")
    spec_file.write_bytes(msgspec.json.encode(own))
    command = [sys.executable, "-m", "benchmarks.peers.gpu_engine", str(spec_file), str(result_file)]
    run_child(command, folder / f"{name}.log", DEADLINE_S, num_threads(spec.quick))
    return [line for line in read_lines(result_file) if isinstance(line, Figure)]


if __name__ == "__main__":
    child_main(measure)
