"""The engine stepped directly, for `benchmarks offline`: the baseline of the offline service."""

from __future__ import annotations

import time

import torch

from benchmarks.offline.service import engine_config
from benchmarks.peers.ours import run
from benchmarks.spec import PeerResult, Spec, child_main
from pd_cluster import __version__
from pd_cluster.engine.build import build_core


def measure(spec: Spec) -> PeerResult:
    torch.set_num_threads(spec.num_threads)
    core, _ = build_core(engine_config(spec))
    runs = {spec.warmup.name: run(core, spec.warmup)}
    began_s = time.process_time()
    runs |= {workload.name: run(core, workload) for workload in spec.workloads}
    return PeerResult(
        version=f"pd-cluster {__version__}, torch {torch.__version__}",
        runs=runs,
        figures={"busy_s": time.process_time() - began_s},
    )


if __name__ == "__main__":
    child_main(measure)
