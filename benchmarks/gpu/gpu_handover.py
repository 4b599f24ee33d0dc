"""Measures the handover between two processes on one device, with the worker's links, threads and exports, but no
model.

The blocks have 1 MiB each, and as many bytes together as the KV cache of 4,096 tokens of the 8B model. Received blocks
are compared with the sent ones. Runs in the benchmark's process, which only queries its two child processes.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from benchmarks.gpu.gpu_messages import GpuSpec, Writer
from benchmarks.kv.kv_bench import hand_over, open_lane
from benchmarks.kv.kv_child import two_children
from benchmarks.kv.kv_messages import Lane, MakePool, Move
from pd_cluster.transport.transport_table import same_host_choice

NUM_BLOCKS = 512  # MiB: 4,096 tokens of 128 KiB
NUM_UNDER_WAY = 8
CHECKED, UNCHECKED = "with checksums", "without checksums"  # workers use the first by default


def run(spec: GpuSpec, results: Writer, folder: Path, timeout_s: float) -> None:
    """Runs the part. Raises ChildFailed."""
    end_s = time.monotonic() + timeout_s
    transport, size = same_host_choice(spec.device), spec.sizes(NUM_BLOCKS, 8)
    move = Move(num_blocks=size, count=spec.sizes(16, 2), num_under_way=NUM_UNDER_WAY)
    with two_children("kv_sender", "kv_receiver", folder) as (sender, receiver):
        for child in (sender, receiver):
            child.tell(MakePool(2 * NUM_UNDER_WAY * size, spec.device))
        for child in (sender, receiver):
            child.hear(timeout_s)
        results.note(f"handover: transport {transport}")
        for name in spec.sections:
            lane = open_lane(sender, receiver, Lane(transport=transport, checked=name == CHECKED), timeout_s)
            rates = []
            for _ in range(1 + spec.sizes(5, 1)):  # the first is not counted, because it maps every page
                left_s = max(0.1, end_s - time.monotonic())
                rates.append(move.nbytes / 1e9 / hand_over(sender, receiver, lane, move, left_s).took_s)
            results.figure(f"handover, {name}", median(rates[1:]), "GB/s", "higher", rates[1:])
