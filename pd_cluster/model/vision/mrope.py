"""M-RoPE: replaces a text model's rotary embedding for prompts with pictures."""

from __future__ import annotations

import copy
from typing import Any

import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import Device
from pd_cluster.errors import ModelError
from pd_cluster.model.vision.multimodal_config import whole_config
from pd_cluster.model.vision.vision_classes import CLASSES, class_of


class SectionsRotaryEmbedding(torch.nn.Module):
    """Rotates sections of a head by time, height and width; with one row of positions, like the text model."""

    def __init__(self, one: torch.nn.Module, three: torch.nn.Module, pairs_neighbours: bool = False) -> None:
        """`pairs_neighbours`: tables of `three` have each angle next to its copy; those of `one`, half a row away."""
        super().__init__()
        self._pairs_neighbours = pairs_neighbours
        self._one, self._three = (one,), (three,)  # hidden from modules(), where loaders look for rotary embeddings
        self.mrope_section = three.mrope_section
        self.rope_type = getattr(three, "rope_type", "")

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`position_ids`: [1, num_tokens], or [3, 1, num_tokens]."""
        (module,) = self._one if position_ids.dim() == 2 else self._three
        cos, sin = module(x, position_ids)
        if self._pairs_neighbours and position_ids.dim() > 2:
            cos, sin = (torch.cat((table[..., ::2], table[..., ::2]), dim=-1) for table in (cos, sin))
        return cos, sin


def install_mrope(model: Any, checkpoint: Checkpoint, device: Device) -> None:
    """Replaces a text model's rotary embedding if pictures rotate by sections. Call it before the model is fused.

    Raises ModelError.
    """
    assert checkpoint.vision is not None
    classes = CLASSES[checkpoint.vision.model_type]
    if not classes.rotary:
        return
    if checkpoint.rope.kind:
        raise ModelError(
            f"{checkpoint.path / 'config.json'}: rope_type {checkpoint.rope.kind}: its frequencies depend on a "
            f"request's number of tokens, but pictures have their own positions; give another rope_type"
        )
    whole = whole_config(checkpoint)
    sections = {name: value for name, value in whole.text_config.rope_parameters.items() if "mrope" in name}
    config = copy.deepcopy(model.config)
    config.rope_parameters = {**config.rope_parameters, **sections}
    config.head_dim = model.model.layers[0].self_attn.head_dim
    three = class_of(checkpoint.vision, classes.rotary)(config).to(device.torch_name)
    if sum(three.mrope_section) != len(three.inv_freq):
        raise ModelError(
            f"{checkpoint.path / 'config.json'}: mrope_section {list(three.mrope_section)}: must add up to half of "
            f"the rotated features, {len(three.inv_freq)}"
        )
    model.model.rotary_emb = SectionsRotaryEmbedding(model.model.rotary_emb, three, classes.pairs_neighbours)
