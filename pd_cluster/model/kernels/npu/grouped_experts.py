"""A sparse block on NPUs: rows are sorted by expert, and one operator multiplies them by all experts' matrices.

The host never learns which experts were chosen, so a graph can capture the block. Rows for other ranks' experts come
after the last group. The operator's description requires the last group to end with the last row; but vllm-ascend
relies on the operator to accept further rows, whose own results are then undefined.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from pd_cluster.model.kernels.npu.grouped_matmul import grouped_of
from pd_cluster.model.layers.expert_share import ExpertShare, RankExperts
from pd_cluster.model.layers.expert_weights import ExpertWeights
from pd_cluster.model.layers.gated_mlp import Activation, ExpertRouter, Gates


class NpuGroupedExperts:
    """Passes each row through the `top_k` experts that its router chose; with a share, only this rank's experts."""

    def __init__(
        self,
        router: ExpertRouter,
        weights: ExpertWeights,
        ops: Gates,
        activation: Activation,
        share: ExpertShare | None = None,
    ) -> None:
        """`share`: see `Experts`."""
        assert share is None or weights.rows is None  # the experts of a share are whole
        self._ops, self._activation = ops, activation
        weight = router.weight.float() if router.routing.in_float32 else router.weight
        self._router = weight.clone()  # [number of experts the router chooses from, hidden_size]
        self._router_bias = router.bias
        self._routing = router.routing
        self._own = None if share is None else RankExperts(share, len(weight))
        self._num_experts = len(weights.down)
        gate_up, down, self._rows = weights.gate_up.whole(), weights.down.whole(), weights.rows
        self._gate_up, self._down = grouped_of(gate_up), grouped_of(down)
        self._gate_up_bias, self._down_bias = gate_up.bias, down.bias  # [num_experts, out_features]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [num_rows, hidden_size] to the same shape."""
        logits = linear(x.to(self._router.dtype), self._router, self._router_bias)
        weights, chosen = self._routing.weigh(logits, x.dtype)  # [num_rows, top_k]
        if self._own is None:
            return self._compute(x, chosen, weights)
        return self._own.through(self._compute, x, chosen, weights)

    def take_part(self) -> None:
        assert self._own is not None
        self._own.take_part(self._compute)

    def _compute(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        top_k, flat = self._routing.top_k, chosen.flatten()
        order = flat.argsort(stable=True)
        experts = torch.arange(self._num_experts, device=x.device)
        ends = (flat[:, None] == experts).sum(0).cumsum(0)  # [num_experts] int64
        # Indexing by tensors may make the host wait for the device; index_select does not.
        chosen_in_order = flat.index_select(0, order)
        others = None
        if self._own is not None:
            others = (chosen_in_order >= self._num_experts)[:, None]
            chosen_in_order = chosen_in_order.clamp(max=self._num_experts - 1)
        gate_up = self._gate_up(x.index_select(0, order // top_k), ends)
        if self._gate_up_bias is not None:
            gate_up = gate_up + self._gate_up_bias.index_select(0, chosen_in_order)
        inner = self._ops.gate(gate_up, self._activation)
        down = self._down(inner if self._rows is None else self._rows.gathered(inner), ends)
        if self._down_bias is not None:
            down = down + self._down_bias.index_select(0, chosen_in_order)
        if others is not None:  # a weight of 0 is not enough: undefined results may be NaN
            down = down.masked_fill(others, 0)
        added = torch.empty_like(down).index_copy_(0, order, down).view(len(x), top_k, -1)
        summed = (added * weights[..., None]).sum(1).to(x.dtype)
        return summed if self._rows is None else self._rows.placed(summed)
