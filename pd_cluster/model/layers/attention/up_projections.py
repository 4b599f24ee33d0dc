"""Splits the `kv_b_proj` of latent attention, in any weight form, into plain matrices for latent_attention.py."""

from __future__ import annotations

from typing import Any

import torch

from pd_cluster.errors import ModelError
from pd_cluster.model.layers.attention.latent_attention import UpProjection
from pd_cluster.model.layers.linear_weight import weight_of


def split_up_projections(model: torch.nn.Module) -> list[UpProjection]:
    """Splits each layer's `kv_b_proj` unless it is already split; returns the results.

    Raises ModelError if a projection has a bias.
    """
    found = []
    for module in model.modules():
        if not isinstance(getattr(module, "layer_idx", None), int):
            continue
        linear: Any = getattr(module, "kv_b_proj", None)
        if linear is None:
            continue
        if isinstance(linear, UpProjection):
            found.append(linear)
            continue
        weight = weight_of(linear)
        if weight.bias is not None:
            raise ModelError(f"{type(module).__name__}.kv_b_proj has a bias, which is not supported")
        widths = int(module.qk_nope_head_dim), int(module.v_head_dim)  # type: ignore[arg-type]
        module.kv_b_proj = up = UpProjection(weight.matrix(), widths)
        found.append(up)
    return found
