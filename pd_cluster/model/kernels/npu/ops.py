"""`Ops` with torch-npu's operators. No operation waits for the device. Does not deal with graphs or streams."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.kernels.npu.grouped_experts import NpuGroupedExperts
from pd_cluster.model.kernels.npu.quantized_linear import linear_of
from pd_cluster.model.layers.expert_share import ExpertShare
from pd_cluster.model.layers.expert_weights import ExpertWeights
from pd_cluster.model.layers.gated_mlp import Activation, ExpertRouter
from pd_cluster.model.layers.linear_weight import LinearWeight
from pd_cluster.model.layers.ops import Heads, Norm, Rope, Rows, TorchOps
from pd_cluster.model.layers.packed_linear import Linear


class NpuOps(TorchOps):
    """Uses torch-npu's operators where they exist, otherwise torch."""

    name = "NPU"
    is_capturable = True

    def __init__(self, write_and_attend: Callable[..., torch.Tensor], attention: str) -> None:
        """`attention`: its name, for the log."""
        self._write_and_attend = write_and_attend
        self.attention = attention

    def linear(self, weight: LinearWeight) -> Linear:
        return linear_of(weight) or weight.linear()

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if norm.weight.dtype != x.dtype:  # float32, for norms that multiply by 1 + w (Gemma)
            return super().norm(x, norm)
        normed: torch.Tensor = torch.ops.npu.npu_rms_norm(x, norm.weight, norm.eps)[0]
        return normed

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        if activation != "silu":
            return super().gate(gate_up, activation)
        gated: torch.Tensor = torch.ops.npu.npu_swiglu(gate_up, dim=-1)
        return gated

    def experts(
        self, router: ExpertRouter, weights: ExpertWeights, activation: Activation, share: ExpertShare | None = None
    ) -> Rows:
        return NpuGroupedExperts(router, weights, self, activation, share)

    def attend(self, heads: Heads, qkv: torch.Tensor, rope: Rope, batch: ForwardBatch) -> torch.Tensor:
        num_kv, dim = heads.num_kv_heads, heads.head_dim
        query, key, value = torch.split(qkv.view(len(qkv), -1, dim), [heads.num_heads, num_kv, num_kv], dim=1)
        if heads.q_norm is not None and heads.k_norm is not None:
            query, key = self.norm(query.contiguous(), heads.q_norm), self.norm(key.contiguous(), heads.k_norm)
        query, key = rotated(query, rope), rotated(key, rope)
        found = self._write_and_attend(heads.layer_idx, query.transpose(0, 1), key, value, batch, heads.scoring)
        return found.reshape(len(qkv), -1)


def rotated(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotates x [num_tokens, num_heads, head_dim], as one sequence in a batch of one."""
    cos, sin = (table.to(x.dtype)[None, :, None] for table in (rope.cos, rope.sin))  # [1, num_tokens, 1, head_dim]
    rotated: torch.Tensor = torch.ops.npu.npu_rotary_mul(x[None].contiguous(), cos, sin, "half")
    return rotated[0]
