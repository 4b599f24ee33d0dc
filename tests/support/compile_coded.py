"""Launches of the kernels for quantized weights, to be compiled for absent GPUs: see compile_cuda_ops.py."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pd_cluster.model.kernels.cuda.experts.expert_matrices import BlockMatrices, ExpertMatrices
from pd_cluster.model.kernels.cuda.experts.grouped_experts import TritonGroupedExperts
from pd_cluster.model.kernels.cuda.linear.lora_tables import CudaTable
from pd_cluster.model.kernels.cuda.linear.quantized_linear import (
    E2M1,
    E4M3,
    INT4,
    INT8,
    ROUNDED,
    QuantizedLinear,
    WeightCodes,
    decoded,
)
from pd_cluster.model.layers.gated_mlp import ExpertRouter, Routing
from pd_cluster.model.lora.adapter_row_blocks import AdaptedBlocks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STORED: dict[int, torch.dtype] = {
    INT4: torch.int32,
    E2M1: torch.int32,
    INT8: torch.int8,
    E4M3: torch.uint8,
    ROUNDED: torch.int8,
}


def empty(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def codes(*outputs: int, num_inputs: int, kind: int, group: int = 0, has_zeros: bool = False) -> WeightCodes:
    """`outputs`: a layer's outputs, or the number of experts and the outputs of each."""
    num_groups = num_inputs // (group or num_inputs)
    filled = -(-num_inputs // 128) * 128
    width = filled // 8 if kind in (INT4, E2M1) else filled
    shape = outputs if kind == ROUNDED else (*outputs, num_groups)
    zeros = empty(*shape, dtype=torch.int32 if kind == ROUNDED else FP32) if has_zeros else None
    inputs = (0.1, 3.0) if has_zeros and kind == ROUNDED else None
    return WeightCodes(
        empty(*outputs, width, dtype=STORED[kind]), empty(*shape, dtype=FP32), zeros, 8.0, kind, num_inputs, inputs
    )


def coded(num_rows: int, num_inputs: int, num_outputs: int, kind: int, dtype: torch.dtype = BF16, **given: int) -> None:
    layer = QuantizedLinear(
        codes(num_outputs, num_inputs=num_inputs, kind=kind, **given), empty(num_outputs, dtype=dtype)
    )
    layer(empty(num_rows, num_inputs, dtype=dtype))


def written(num_inputs: int, num_outputs: int, kind: int, **given: int) -> None:
    decoded(codes(num_outputs, num_inputs=num_inputs, kind=kind, **given), BF16)


def experts(num_rows: int, kind: int, group: int = 0, dtype: torch.dtype = BF16) -> None:
    """Launches Mixtral's experts with quantized weights."""
    gate_up = codes(8, 2 * 14336, num_inputs=4096, kind=kind, group=group)
    down = codes(8, 4096, num_inputs=14336, kind=kind, group=group)
    router = ExpertRouter(empty(8, 4096, dtype=dtype), None, Routing(2))
    matrices = BlockMatrices(ExpertMatrices.of(gate_up), ExpertMatrices.of(down))
    TritonGroupedExperts(router, matrices, "silu")(empty(num_rows, 4096, dtype=dtype))


def adapted(num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype) -> None:
    modules = [slice(0, num_outputs // 2), slice(num_outputs // 2, num_outputs)]
    table = CudaTable(modules, num_inputs, dtype, torch.device("meta"), max_rank=16)
    step = AdaptedBlocks(empty(num_rows, dtype=torch.int32), empty(3, 3, dtype=torch.int32))
    table.add(empty(num_rows, num_inputs, dtype=dtype), empty(num_rows, num_outputs, dtype=dtype), step)


FEW: dict[str, Callable[[], None]] = {
    "int4, one row": lambda: coded(1, 4096, 6144, INT4, group=128, has_zeros=True),
    "int4, 200 rows": lambda: coded(200, 4096, 28672, INT4, group=128),
    "e4m3, 16 rows": lambda: coded(16, 4096, 4096, E4M3, group=128),
    "int8 x int8, 16 rows": lambda: coded(16, 4096, 4096, ROUNDED),
    "adapters": lambda: adapted(32, 4096, 6144, BF16),
    "int4, written out": lambda: written(4096, 4096, INT4, group=128),
}
OTHERS: dict[str, Callable[[], None]] = {
    **{f"{kind} of {num_rows} rows, {dtype}": lambda kind=kind, num_rows=num_rows, dtype=dtype: coded(
        num_rows, 2880, 5760, kind, dtype, group=0 if kind == ROUNDED else 32)
       for kind in STORED for num_rows, dtype in ((1, BF16), (20, FP32), (64, FP16), (500, BF16))},
    **{f"experts of {kind}, {num_rows} rows": lambda num_rows=num_rows, kind=kind, group=group: experts(
        num_rows, kind, group) for num_rows, kind, group in (
            (1, INT4, 128), (2048, E2M1, 32), (1, INT8, 128), (2048, E4M3, 128), (1, ROUNDED, 0))},
    "adapters, float32": lambda: adapted(1, 1000, 70, FP32),
    "int4 of small groups": lambda: coded(1, 896, 1152, INT4, group=16, has_zeros=True),
    "int8 with zero points": lambda: coded(100, 1024, 4096, INT8, group=64, has_zeros=True),
    "int8 x int8 by the file's scale": lambda: coded(100, 29568, 8192, ROUNDED, has_zeros=True),
    **{f"{kind}, written out": lambda kind=kind: written(1000, 70, kind) for kind in (E2M1, INT8, E4M3)},
}  # fmt: skip
