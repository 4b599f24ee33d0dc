"""Measures this machine's limits: the read bandwidth, and the time of the model's matrix products alone.

Each product has separate weights, so that a pass reads as many bytes as the model does. oneDNN computes the products,
with weights packed for the number of rows, as in the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.engine_messages import PeerResult, Spec, child_main

READ_NBYTES = 1 << 30
Linear = Callable[[torch.Tensor], torch.Tensor]


def measure(spec: Spec) -> PeerResult:
    torch.set_num_threads(spec.num_threads)
    shape = spec.shape
    bytes_per_s = read_bandwidth(READ_NBYTES >> 6 if spec.quick else READ_NBYTES)
    figures = {"read_gb_per_s": bytes_per_s / 1e9, "read_weights_ms": 1e3 * shape.read_nbytes / bytes_per_s}
    with torch.inference_mode():
        weights = [torch.randn(size) for _ in range(shape.num_layers) for size in shape.layer_linears()]
        head = torch.randn(shape.head)
        for num_rows, num_sampled, num_passes in ((1, 1, 15), (32, 32, 15), (1024, 1, 3)):
            took_s = time_linears(weights, head, num_rows, num_sampled, num_passes)
            figures[f"linears_{num_rows}_ms"] = 1e3 * took_s
    return PeerResult(figures=figures)


def read_bandwidth(nbytes: int, num_tries: int = 8, clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns bytes per second: the best of several sums and products over one array."""
    array = torch.ones(nbytes // 4)
    best_s = float("inf")
    reads: tuple[Callable[[], torch.Tensor], ...] = (lambda: array.sum(), lambda: torch.dot(array, array))
    for read in reads:
        for _ in range(num_tries):
            start_s = clock()
            read()
            best_s = min(best_s, clock() - start_s)
    return nbytes / best_s


def packed(weight: torch.Tensor, num_rows: int) -> Linear:
    ops = torch.ops.mkldnn
    reordered = ops._reorder_linear_weight(weight, num_rows)
    return lambda x: ops._linear_pointwise(x, reordered, None, "none", [], "")


def time_linears(
    weights: list[torch.Tensor], head: torch.Tensor, num_rows: int, num_sampled: int, num_passes: int
) -> float:
    """Returns the median seconds of one pass over all matrices, after one pass that is not counted."""
    layers = [(packed(weight, num_rows), torch.randn(num_rows, weight.shape[1])) for weight in weights]
    layers.append((packed(head, num_sampled), torch.randn(num_sampled, head.shape[1])))
    took_s = []
    for _ in range(1 + num_passes):
        start_s = time.perf_counter()
        for linear, x in layers:
            linear(x)
        took_s.append(time.perf_counter() - start_s)
    return median(took_s[1:])


if __name__ == "__main__":
    child_main(measure)
