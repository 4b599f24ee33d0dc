"""The offline service with a prefill and a decode process, which share the threads, for `benchmarks offline`.

Its busy time is that of its rank processes, by role; this process's own is `caller_s`.
"""

from __future__ import annotations

import os
import time

from benchmarks.offline.service import engine_config, run
from benchmarks.processes import cpu_s
from benchmarks.spec import PeerResult, Spec, child_main
from pd_cluster.offline.session import Offline, OfflineConfig


def measure(spec: Spec) -> PeerResult:
    os.environ["OMP_NUM_THREADS"] = str(max(1, spec.num_threads // 2))  # per worker, inherited
    with Offline(OfflineConfig(engine=engine_config(spec), prefill=1, decode=1)) as offline:
        runs = {spec.warmup.name: run(offline, spec.warmup)}
        before, own_s = _busy_s(offline), time.process_time()
        runs |= {workload.name: run(offline, workload) for workload in spec.workloads}
        figures = {f"{role}_s": now_s - before[role] for role, now_s in _busy_s(offline).items()}
        return PeerResult(runs=runs, figures=figures | {"caller_s": time.process_time() - own_s})


def _busy_s(offline: Offline) -> dict[str, float]:
    """Returns the CPU time of each role's rank processes."""
    infos = [each.info for each in offline.service.router.membership.instances if each.info is not None]
    return {info.role: sum(map(cpu_s, info.rank_pids)) for info in infos}


if __name__ == "__main__":
    child_main(measure)
