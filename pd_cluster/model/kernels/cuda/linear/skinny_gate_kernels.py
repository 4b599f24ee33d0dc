"""The Triton kernel of a gated product for few rows: computes gate and up together, and stores only their product.

The weight is the left operand, because its many rows fill the tensor cores' instructions; activations are the right
operand. One program adds up the inputs from first to last, in float32, and rounds as the separate layers would. Tile
sizes are in `pd_cluster.model.kernels.cuda.linear.skinny_gate`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pd_cluster.model.kernels.cuda.dependent_launch import begin
from pd_cluster.model.kernels.cuda.elementwise_kernels import activated


@triton.jit(do_not_specialize=["num_rows"])
def skinny_gate_product(
    x,  # [num_rows, NUM_INPUTS], contiguous
    weight,  # [2 * NUM_FEATURES, NUM_INPUTS], contiguous: gates, then ups
    bias,  # [2 * NUM_FEATURES]; not read without HAS_BIAS
    out,  # [num_rows, NUM_FEATURES], contiguous
    num_rows,
    NUM_INPUTS: tl.constexpr,
    NUM_FEATURES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes BLOCK_N features of all rows, of which there are at most ROWS."""
    begin(PDL)
    dtype: tl.constexpr = out.dtype.element_ty
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    near_feature = tl.minimum(feature, NUM_FEATURES - 1).to(tl.int64)
    near_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    gate_at = weight + near_feature[:, None] * NUM_INPUTS + k[None, :]
    up_at = gate_at + NUM_FEATURES * NUM_INPUTS
    x_at = x + near_row[None, :] * NUM_INPUTS + k[:, None]
    gate = tl.zeros([BLOCK_N, ROWS], tl.float32)
    up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in range(0, NUM_INPUTS, BLOCK_K):
        if NUM_INPUTS % BLOCK_K == 0:
            inputs = tl.load(x_at + start)
            gates = tl.load(gate_at + start)
            ups = tl.load(up_at + start)
        else:
            inside = start + k < NUM_INPUTS
            inputs = tl.load(x_at + start, mask=inside[:, None], other=0.0)
            gates = tl.load(gate_at + start, mask=inside[None, :], other=0.0)
            ups = tl.load(up_at + start, mask=inside[None, :], other=0.0)
        gate = tl.dot(gates, inputs, gate)
        up = tl.dot(ups, inputs, up)
    if HAS_BIAS:
        gate += tl.load(bias + near_feature).to(tl.float32)[:, None]
        up += tl.load(bias + NUM_FEATURES + near_feature).to(tl.float32)[:, None]
    result = activated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype, ACTIVATION)
    target = out + row.to(tl.int64)[None, :] * NUM_FEATURES + feature[:, None]
    tl.store(target, result.to(dtype), mask=(feature < NUM_FEATURES)[:, None] & (row < num_rows)[None, :])
