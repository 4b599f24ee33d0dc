"""Products of sorted rows and all experts' matrices, as floats or codes, with one operator of torch-npu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pd_cluster.model.kernels.npu.quantized_linear import signed, takes
from pd_cluster.model.layers.linear_weight import LinearWeight
from pd_cluster.model.weights.quantized_weight import CodedWeight, Int8Weight

ROWS = 0  # group_type: the rows of x are grouped
ONE_TENSOR = 2  # split_item: one tensor for the results of all groups
RUNNING_SUMS = 0  # group_list_type: the ends of the groups

# Maps x [num_rows, in_features], ends [num_experts] to [num_rows, out_features]; expert i has rows ends[i-1] to
# ends[i].
Grouped = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def grouped_of(weight: LinearWeight) -> Grouped:
    """Returns the product, without the bias. `weight` has a leading dimension of experts."""
    if isinstance(weight, Int8Weight) and weight.inputs is None:
        return _int8(weight)
    if isinstance(weight, CodedWeight) and takes(weight):
        return _coded(weight)
    matrices = _by_inputs(weight.matrix())
    return lambda x, ends: _product(x, matrices, ends)


def _int8(weight: Int8Weight) -> Grouped:
    codes, scales, dtype = _by_inputs(weight.codes), [weight.scales.to(torch.bfloat16)], weight.dtype
    if dtype != torch.bfloat16:  # for bfloat16 results the operator takes bfloat16 scales
        scales = [weight.scales.to(torch.float32)]

    def product(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        rows, steps = torch.ops.npu.npu_dynamic_quant(x.contiguous())
        return _product(rows, codes, ends, scale=scales, per_token_scale=[steps], output_dtype=dtype)

    return product


def _coded(weight: CodedWeight) -> Grouped:
    codes, offsets, _ = signed(weight)
    matrices = _by_inputs(codes)
    scales = [_of_groups(weight.scales, weight.dtype)]
    # The operator requires offsets in addition to scales.
    added = [_of_groups(torch.zeros_like(weight.scales) if offsets is None else offsets, weight.dtype)]
    return lambda x, ends: _product(x, matrices, ends, antiquant_scale=scales, antiquant_offset=added)


def _by_inputs(matrices: torch.Tensor) -> torch.Tensor:
    """Maps [num_experts, out_features, in_features] to [num_experts, in_features, out_features]."""
    return matrices.transpose(1, 2).contiguous()


def _of_groups(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Maps [num_experts, out_features, num_groups] to [num_experts, num_groups, out_features]; drops a single group."""
    found = values.transpose(1, 2).to(dtype).contiguous()
    return found[:, 0].contiguous() if found.shape[1] == 1 else found


def _product(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, **how: Any) -> torch.Tensor:
    (result,) = torch.ops.npu.npu_grouped_matmul(
        [x],
        [matrices],
        group_list=ends,
        split_item=ONE_TENSOR,
        group_type=ROWS,
        group_list_type=RUNNING_SUMS,
        **how,
    )
    found: torch.Tensor = result
    return found
