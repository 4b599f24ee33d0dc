"""Takes latent attention's `kv_b_proj`, in whatever form its files have it, as numbers for attention/latent.py."""

from __future__ import annotations

from typing import Any

import torch

from pd_cluster.errors import ModelError
from pd_cluster.model.layers.attention.latent_attention import UpProjection
from pd_cluster.model.layers.linear_weight import weight_of


def put_up_projections(model: torch.nn.Module) -> list[UpProjection]:
    """Takes `kv_b_proj` of each layer apart, unless it is already; returns them.

    Raises ModelError for one that has more than weights.
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
            raise ModelError(f"{type(module).__name__}.kv_b_proj has a bias, which nothing here adds")
        widths = int(module.qk_nope_head_dim), int(module.v_head_dim)  # type: ignore[arg-type]
        module.kv_b_proj = up = UpProjection(weight.matrix(), widths)
        found.append(up)
    return found
