"""Steps of pd-cluster's engine on one rank and on two, and the share of a step spent on sums over ranks.

One rank has all threads, two have half of them each. All figures are medians.
"""

from __future__ import annotations

import torch

from benchmarks.peers.steps import GREEDY, Bench
from benchmarks.spec import PeerResult, Spec, child_main
from pd_cluster.engine.build import build_core
from pd_cluster.engine.start.spawn import Followers
from pd_cluster.settings.engine import EngineConfig

SIZES = (1, 2)


def measure(spec: Spec) -> PeerResult:
    figures: dict[str, float] = {}
    for size in SIZES:
        figures |= {f"tp{size}_{name}": value for name, value in _measure(spec, size).items()}
    return PeerResult(figures=figures)


def _measure(spec: Spec, size: int) -> dict[str, float]:
    num_threads = max(1, spec.num_threads // size)
    torch.set_num_threads(num_threads)
    config = EngineConfig(model=spec.model, dtype="float32", device="cpu", tensor_parallel_size=size)
    num_steps, num_repeats = (3, 1) if spec.quick else (40, 5)
    with Followers(config, num_threads) as followers:
        bench = Bench(*build_core(config, followers.meet(), followers.channels))
        figures = {}
        for num_seqs in (1, spec.batch_size):
            parts = bench.decode(num_seqs, num_steps, GREEDY)
            figures[f"decode_{num_seqs}_ms"] = parts["step"]
            figures[f"decode_{num_seqs}_sums_percent"] = 100 * parts["sums"] / parts["step"]
        summed_s = bench.runner.group.reduce_s
        figures["prefill_1024_ms"] = bench.prefill(1024, num_repeats)
        summed_ms = 1e3 * (bench.runner.group.reduce_s - summed_s) / (1 + num_repeats)
        figures["prefill_1024_sums_percent"] = 100 * summed_ms / figures["prefill_1024_ms"]
    return figures


if __name__ == "__main__":
    child_main(measure)
