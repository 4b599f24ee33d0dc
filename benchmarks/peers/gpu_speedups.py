"""The engine's decode steps and its mixed workload with one of `--cuda-speedups` each, beside the figures of
gpu_engine: what a GPU says of those that are off by default.
"""

from __future__ import annotations

import gc

from benchmarks.gpu.spec import GpuSpec, Writer, child_main
from benchmarks.peers import gpu_engine
from pd_cluster.devices.device import reset_peak
from pd_cluster.settings.engine import PROMPT_GRAPHS


class SpedUpBench(gpu_engine.Bench):
    def __init__(self, spec: GpuSpec, results: Writer, name: str) -> None:
        self.speedups = (name,)
        super().__init__(spec, results)

    @property
    def name(self) -> str:
        return f"{self.spec.shape.name} {', '.join(self.speedups)}"


def measure(spec: GpuSpec, results: Writer) -> None:
    for name in spec.sections:
        with results.section(name):
            bench = SpedUpBench(spec, results, name)
            if name == PROMPT_GRAPHS:
                bench.mixed()
            else:
                bench.decode()
            device = bench.device
            del bench
            gc.collect()
            if device.is_accelerator:
                reset_peak(device)  # and the next engine gets the memory that this one had


if __name__ == "__main__":
    child_main(measure)
