"""Child of `bench serve --against`: how evenly this machine does work that never changes. Prints nothing.

`python -m benchmarks.peers.steady RESULT SECONDS`: a thread on one core computes the linear layers of a decode step
again and again, and one on another core those of a prompt. Whatever varies in the first one's times is the machine's.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from statistics import mean

import msgspec
import torch

from benchmarks.spec import PeerResult
from benchmarks.tiny_model import ModelShape
from pd_cluster.model.layers.linear import PackedLinear
from pd_cluster.tables import percentile

NUM_SEQUENCES, NUM_PROMPT_TOKENS = 14, 128
NUM_WARM = 3


def passes_until(end_s: float, linears: list[PackedLinear], num_rows: int, core: int) -> list[float]:
    """Returns the seconds of each pass through all layers, computed by the calling thread on `core` alone."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    xs = {each.in_features: torch.randn(num_rows, each.in_features) for each in linears}
    took_s: list[float] = []
    while time.perf_counter() < end_s:
        begun_s = time.perf_counter()
        for linear in linears:
            linear(xs[linear.in_features])
        took_s.append(time.perf_counter() - begun_s)
    return took_s[NUM_WARM:]


def main(result: str, seconds: str) -> None:
    torch.set_num_threads(1)
    shape = ModelShape()
    sizes = [*(shape.layer_linears() * shape.num_layers), shape.head]
    decode, prompt = ([PackedLinear(torch.randn(size), None) for size in sizes] for _ in range(2))
    cores = sorted(os.sched_getaffinity(0))
    end_s = time.perf_counter() + float(seconds)
    with torch.inference_mode():
        beside = threading.Thread(target=passes_until, args=(end_s, prompt, NUM_PROMPT_TOKENS, cores[-1]), daemon=True)
        beside.start()
        took_s = passes_until(end_s, decode, NUM_SEQUENCES, cores[0])
        beside.join(float(seconds))
    figures = {"mean_ms": 1e3 * mean(took_s), "p99_ms": 1e3 * (percentile(took_s, 99) or 0.0)}
    Path(result).write_bytes(msgspec.json.encode(PeerResult(figures=figures)))


if __name__ == "__main__":
    main(*sys.argv[1:])
