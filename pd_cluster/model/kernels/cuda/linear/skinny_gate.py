"""The gated half of an MLP for few rows: one launch instead of a product and a gate.

Like the separate product it reads the weight once, but it saves a launch and the memory of the intermediate result.
With more rows cuBLAS computes the product. Not measured on a GPU yet.
"""

from __future__ import annotations

import torch
import triton

from pd_cluster.model.kernels.cuda.dependent_launch import launched
from pd_cluster.model.kernels.cuda.elementwise_kernels import ACTIVATIONS
from pd_cluster.model.kernels.cuda.linear.skinny_gate_kernels import skinny_gate_product
from pd_cluster.model.layers.gated_mlp import Activation

MOST_ROWS = 64
DTYPES = (torch.bfloat16, torch.float16)
LEAST_ROWS = 16  # rows of a tile: the fewest in a matrix product
BLOCK_N, BLOCK_K = 64, 64  # features of each half, and inputs per step: one stage takes 24 KiB with 64 rows
# Two programs of 64 rows run concurrently on a multiprocessor of compute capability 8.0 or 9.0, but only one on 8.6,
# 8.9 and 12.0.
NUM_WARPS, NUM_STAGES = 4, 4


class SkinnyGate:
    """Maps x [num_rows, num_inputs], at most MOST_ROWS rows, to activation(gate) * up, [num_rows, num_features]."""

    __slots__ = ("_activation", "_bias", "_pdl", "_weight")
    most_rows = MOST_ROWS

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation, pdl: bool) -> None:
        """`weight` [2 * num_features, num_inputs]: gates, then ups; `bias` [2 * num_features]."""
        assert weight.dtype in DTYPES
        assert weight.is_contiguous()
        assert bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous())
        self._weight, self._bias, self._activation, self._pdl = weight, bias, activation, pdl

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._weight, self._bias
        num_rows, num_inputs = x.shape
        num_features = len(weight) // 2
        assert num_rows <= MOST_ROWS
        assert x.dtype == weight.dtype
        out = x.new_empty(num_rows, num_features)
        if not num_rows:
            return out
        skinny_gate_product[(triton.cdiv(num_features, BLOCK_N),)](
            x.contiguous(),
            weight,
            bias if bias is not None else weight,
            out,
            num_rows,
            NUM_INPUTS=num_inputs,
            NUM_FEATURES=num_features,
            HAS_BIAS=bias is not None,
            ACTIVATION=ACTIVATIONS[self._activation],
            ROWS=max(LEAST_ROWS, triton.next_power_of_2(num_rows)),
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
            **launched(self._pdl),
        )
        return out
