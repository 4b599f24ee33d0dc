"""The offline service with its engine in the same process, for `benchmarks offline`."""

from __future__ import annotations

import time

import torch

from benchmarks.offline.service import engine_config, run
from benchmarks.spec import PeerResult, Spec, child_main
from pd_cluster.offline.session import Offline, OfflineConfig


def measure(spec: Spec) -> PeerResult:
    torch.set_num_threads(spec.num_threads)
    with Offline(OfflineConfig(engine=engine_config(spec))) as offline:
        runs = {spec.warmup.name: run(offline, spec.warmup)}
        began_s = time.process_time()
        runs |= {workload.name: run(offline, workload) for workload in spec.workloads}
        return PeerResult(runs=runs, figures={"busy_s": time.process_time() - began_s})


if __name__ == "__main__":
    child_main(measure)
