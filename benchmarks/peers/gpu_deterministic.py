"""The engine's decode steps and a prefill with `--deterministic`: its price, beside the figures of gpu_engine."""

from __future__ import annotations

from benchmarks.gpu.spec import GpuSpec, Writer, child_main
from benchmarks.peers import gpu_engine


class DeterministicBench(gpu_engine.Bench):
    is_deterministic = True

    @property
    def name(self) -> str:
        return f"{self.spec.shape.name} deterministic"


def measure(spec: GpuSpec, results: Writer) -> None:
    gpu_engine.measure(spec, results, DeterministicBench)


if __name__ == "__main__":
    child_main(measure)
