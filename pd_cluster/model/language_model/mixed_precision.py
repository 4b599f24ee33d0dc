"""bfloat16 on a CPU: matrices stay in 16 bits; everything else, including activations and sums, is float32.

Only fused models can do this: transformers' modules would compute in bfloat16 throughout, which CPUs emulate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import embedding

from pd_cluster.model.layers.expert_weights import PRODUCTS, are_experts
from pd_cluster.native.packed_products import bf16_way


def is_narrow(model: torch.nn.Module) -> bool:
    """Whether this is a bfloat16 model on a CPU for which there are bfloat16 kernels."""
    parameters = list(model.parameters())
    kinds = {(parameter.device.type, parameter.dtype) for parameter in parameters}
    has_any = ("cpu", torch.bfloat16) in kinds
    return has_any and kinds <= {("cpu", torch.bfloat16), ("cpu", torch.float32)} and bf16_way() is not None


def widen(model: torch.nn.Module) -> None:
    """Converts every parameter to float32, except for the matrices of linear layers, experts and embeddings."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not _is_matrix(module, name):
                setattr(module, name, torch.nn.Parameter(parameter.detach().float(), requires_grad=False))


def _is_matrix(module: torch.nn.Module, name: str) -> bool:
    if are_experts(module):
        return name.removesuffix("_bias") in PRODUCTS
    return isinstance(module, torch.nn.Linear | torch.nn.Embedding)


class WideEmbedding(torch.nn.Module):
    """Looks up bfloat16 rows and returns them in float32, multiplied by the architecture's embedding factor."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.weight = inner.weight
        self._factor = float(getattr(inner, "scalar_embed_scale", 1.0))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        rows = embedding(input_ids, self.weight).float()
        return rows if self._factor == 1.0 else rows * self._factor
