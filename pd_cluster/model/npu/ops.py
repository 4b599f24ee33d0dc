"""`Ops` by torch-npu's operators. Nothing here waits for the device. Knows nothing of graphs or streams."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pd_cluster.model.attention.sdpa import Scoring
from pd_cluster.model.batch import ForwardBatch
from pd_cluster.model.ops import Activation, Heads, Norm, Rope, TorchOps


class NpuOps(TorchOps):
    """What has an operator of its own; the rest as torch computes it."""

    name = "NPU"

    def __init__(self, write_and_attend: Callable[..., torch.Tensor], attention: str) -> None:
        """`attention`: what it is called, for the log."""
        self._write_and_attend = write_and_attend
        self.attention = attention

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if norm.weight.dtype != x.dtype:  # one that was added in float32 (Gemma)
            return super().norm(x, norm)
        normed: torch.Tensor = torch.ops.npu.npu_rms_norm(x, norm.weight, norm.eps)[0]
        return normed

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        if activation != "silu":
            return super().gate(gate_up, activation)
        gated: torch.Tensor = torch.ops.npu.npu_swiglu(gate_up, dim=-1)
        return gated

    def attend(self, heads: Heads, qkv: torch.Tensor, rope: Rope, batch: ForwardBatch) -> torch.Tensor:
        num_kv, dim = heads.num_kv_heads, heads.head_dim
        query, key, value = torch.split(qkv.view(len(qkv), -1, dim), [heads.num_heads, num_kv, num_kv], dim=1)
        if heads.q_norm is not None and heads.k_norm is not None:
            query, key = self.norm(query.contiguous(), heads.q_norm), self.norm(key.contiguous(), heads.k_norm)
        scoring = Scoring(heads.scaling, heads.sliding_window, heads.softcap)
        query, key = _rotated(query, rope), _rotated(key, rope)
        found = self._write_and_attend(heads.layer_idx, query.transpose(0, 1), key, value, batch, scoring)
        return found.reshape(len(qkv), -1)


def _rotated(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """x [num_tokens, num_heads, head_dim], as one sequence of a batch of one."""
    cos, sin = rope.cos[None, :, None], rope.sin[None, :, None]  # [1, num_tokens, 1, head_dim]
    rotated: torch.Tensor = torch.ops.npu.npu_rotary_mul(x[None].contiguous(), cos, sin, "half")
    return rotated[0]
