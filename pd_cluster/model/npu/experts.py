"""A sparse block on NPUs: rows are sorted by expert, and one operator multiplies them by all experts' matrices.

The host never learns which experts were chosen, so a graph can capture it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from pd_cluster.model.layers.expert_weight import ExpertWeights
from pd_cluster.model.layers.gated import Activation, Gates, bias_of, routing_of

ROWS = 0  # group_type: the rows of x are grouped
ONE_TENSOR = 2  # split_item: all groups' results in one tensor
RUNNING_SUMS = 0  # group_list_type


class NpuGroupedExperts:
    """Sends each row through its router's `top_k` experts."""

    def __init__(self, gate: Any, weights: ExpertWeights, ops: Gates, activation: Activation) -> None:
        self._ops, self._activation = ops, activation
        self._router: torch.Tensor = gate.weight.detach().clone()  # [num_experts, hidden_size]
        self._router_bias = bias_of(gate)  # [num_experts]
        self._routing = routing_of(gate)
        gate_up, down = weights.gate_up.whole(), weights.down.whole()
        # [num_experts, in_features, out_features]
        self._gate_up = gate_up.matrix().transpose(1, 2).contiguous()
        self._down = down.matrix().transpose(1, 2).contiguous()
        self._gate_up_bias, self._down_bias = gate_up.bias, down.bias  # [num_experts, out_features]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [num_rows, hidden_size] to the same shape."""
        weights, chosen = self._routing.weigh(linear(x, self._router, self._router_bias))  # [num_rows, top_k]
        top_k, flat = self._routing.top_k, chosen.flatten()
        order = flat.argsort(stable=True)
        experts = torch.arange(len(self._router), device=x.device)
        ends = (flat[:, None] == experts).sum(0).cumsum(0)  # [num_experts] int64
        # Gathers, not indexing by tensors, which may make the host wait for the device.
        chosen_in_order = flat.index_select(0, order)
        gate_up = _grouped(x.index_select(0, order // top_k), self._gate_up, ends)
        if self._gate_up_bias is not None:
            gate_up = gate_up + self._gate_up_bias.index_select(0, chosen_in_order)
        down = _grouped(self._ops.gate(gate_up, self._activation), self._down, ends)
        if self._down_bias is not None:
            down = down + self._down_bias.index_select(0, chosen_in_order)
        added = torch.empty_like(down).index_copy_(0, order, down).view(len(x), top_k, -1)
        return (added * weights[..., None]).sum(1).to(x.dtype)


def _grouped(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiplies rows [ends[i - 1], ends[i]) of x by weights[i] [in_features, out_features]."""
    (result,) = torch.ops.npu.npu_grouped_matmul(
        [x],
        [weights],
        group_list=ends,
        split_item=ONE_TENSOR,
        group_type=ROWS,
        group_list_type=RUNNING_SUMS,
    )
    found: torch.Tensor = result
    return found
