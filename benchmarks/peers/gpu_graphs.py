"""Graphs of decode steps: the time to capture one, and the memory that several take."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from pd_cluster.devices.device import reserved_nbytes, synchronize
from pd_cluster.devices.streams import capture
from pd_cluster.model.batch import step_input
from pd_cluster.model.graphs import DecodeGraphs, Run
from pd_cluster.model.runner import ModelRunner
from pd_cluster.types import Order, Request, Sampling

CASES = tuple((size, context_len) for context_len in (500, 2000, 32_000) for size in (1, 8, 32, 128, 256))
QUICK_CASES = ((1, 20), (3, 20))


def measure(runner: ModelRunner, quick: bool, put: Callable[..., None]) -> None:
    """Captures graphs of several sizes and contexts anew. On CPU the calls are made instead."""
    device, pool = runner.device, runner.pool
    cases = QUICK_CASES if quick else CASES
    make = capture(device) if device.is_accelerator else (lambda run: run)
    took_ms: list[float] = []

    def timed(run: Run) -> Any:
        synchronize(device)
        start_s = time.perf_counter()
        graph = make(run)
        synchronize(device)
        took_ms.append(1e3 * (time.perf_counter() - start_s))
        return graph

    longest = max(context_len for _, context_len in cases) + 1
    graphs = DecodeGraphs(runner.model, pool, max(size for size, _ in cases), longest, timed)
    before = reserved_nbytes(device) if device.is_accelerator else 0
    for size, context_len in cases:
        num_blocks = pool.layout.num_blocks_for(context_len + 1)
        assert num_blocks <= pool.num_blocks
        requests = [
            Request(f"g{i}", Order([0] * (context_len + 1), Sampling()), block_table=list(range(num_blocks)))
            for i in range(size)
        ]
        for request in requests:
            request.num_computed_tokens = context_len
        with torch.inference_mode():
            graphs.compute(step_input([(request, 1) for request in requests], pool.layout.block_size))
    put("graphs: capture of one", median(took_ms), "ms", values=took_ms)
    put(f"graphs: capture of {len(took_ms)}", sum(took_ms) / 1e3, "s")
    after = reserved_nbytes(device) if device.is_accelerator else 0
    put(f"graphs: memory of {len(took_ms)}", (after - before) / 2**20, "MiB")
