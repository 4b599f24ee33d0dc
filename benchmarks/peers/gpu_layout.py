"""Decode attention over all layers of a pool: blocks that hold every layer, against layers that hold every block.

In a block-major pool the blocks of one layer lie as far apart as a whole block is large: 2 MiB for the 8B model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.spec import GpuSpec, Writer, child_main
from benchmarks.gpu.workloads import CONTEXT_LEN, decode_batches
from benchmarks.peers.gpu_attention import BLOCK_SIZE, Case
from benchmarks.peers.gpu_ceilings import put_rate
from benchmarks.peers.gpu_clock import time_kernels
from pd_cluster.devices.device import resolve, use

ORDERS = ("block-major", "layer-major")


def measure(spec: GpuSpec, results: Writer) -> None:
    device = resolve(spec.device)
    use(device)
    context_len = spec.sizes(CONTEXT_LEN, 32)
    with torch.inference_mode():
        for batch in decode_batches(spec.quick):
            with results.section(f"layout {batch}"):
                case = Case(spec.shape, device, batch, 1, context_len)
                for order in ORDERS:
                    took = time_kernels(sweep(case, order), device, spec.sizes(3, 1), spec.sizes(7, 1))
                    gb = spec.shape.num_layers * case.kv_nbytes / 1e9
                    name = f"attention of {spec.shape.num_layers} layers, decode {batch}, {order}"
                    put_rate(results, name, gb, "GB/s", took)
                del case


def sweep(case: Case, order: str) -> Callable[[], Any]:
    """Returns a function that attends in every layer; on a CPU, which has no such kernel, it reads the blocks."""
    shape, batch = case.shape, case.batch
    num_blocks = case.pool.num_blocks + 2
    plane = (BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    sizes = {"block-major": (num_blocks, shape.num_layers, 2), "layer-major": (shape.num_layers, 2, num_blocks)}
    memory = torch.zeros(*sizes[order], *plane, dtype=torch.bfloat16, device=case.device.torch_name)
    layers = memory if order == "layer-major" else memory.permute(1, 2, 0, 3, 4, 5)
    if case.device.is_accelerator:
        from pd_cluster.model.cuda.paged import attend_batch  # Triton may be missing

        return lambda: [attend_batch(case.query, keys, values, batch, case.scoring) for keys, values in layers]
    blocks = batch.block_table.long()
    return lambda: [(keys[blocks].sum(), values[blocks].sum()) for keys, values in layers]


if __name__ == "__main__":
    child_main(measure)
