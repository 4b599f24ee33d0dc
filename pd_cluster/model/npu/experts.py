"""Mixtral's sparse block on NPUs: rows are sorted by expert, and each expert's matrices meet theirs in one operator.

The host never learns which experts were chosen, so that a graph can hold it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from pd_cluster.model.ops import Activation, Ops

ROWS = 0  # group_type: the rows of x are grouped
ONE_TENSOR = 2  # split_item: all groups' results in one tensor
RUNNING_SUMS = 0  # group_list_type


class GroupedExperts:
    """Each row goes through the `top_k` experts that its router likes best."""

    def __init__(self, block: Any, ops: Ops, activation: Activation) -> None:
        self._ops, self._activation = ops, activation
        self._router: torch.Tensor = block.gate.weight.detach().clone()  # [num_experts, hidden_size]
        self._top_k: int = block.gate.top_k
        experts = block.experts  # its matrices are [num_experts, out_features, in_features]
        self._gate_up = experts.gate_up_proj.detach().transpose(1, 2).contiguous()
        self._down = experts.down_proj.detach().transpose(1, 2).contiguous()
        del block.experts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] to the same shape."""
        probs = linear(x, self._router).float().softmax(-1)  # in 16 bits experts would tie
        weights, chosen = probs.topk(self._top_k, dim=-1)  # [num_rows, top_k]
        weights = weights / weights.sum(-1, keepdim=True)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        experts = torch.arange(len(self._router), device=x.device)
        ends = (flat[:, None] == experts).sum(0).cumsum(0)  # [num_experts] int64
        gate_up = _grouped(x[order // self._top_k], self._gate_up, ends)
        down = _grouped(self._ops.gate(gate_up, self._activation), self._down, ends)
        added = torch.empty_like(down).index_copy_(0, order, down).view(len(x), self._top_k, -1)
        return (added * weights[..., None]).sum(1).to(x.dtype)


def _grouped(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows [.., ends[i]) of x, after those before, times weights[i] [in_features, out_features]."""
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
