"""Loads what of a checkpoint takes memory: the language model and, for pictures, the vision tower."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import Device
from pd_cluster.kv.memory import TORCH_DTYPES
from pd_cluster.model.causal_lm import CausalLM
from pd_cluster.model.loader import KernelChoices, layout_of, load_model
from pd_cluster.model.parallel.group import Group
from pd_cluster.model.sense import warn_of_chance
from pd_cluster.model.vision.load import load_tower
from pd_cluster.model.vision.tower import Tower
from pd_cluster.settings.engine import EngineConfig


def load_parts(
    checkpoint: Checkpoint,
    config: EngineConfig,
    dtype: str,
    block_size: int,
    device: Device,
    group: Group,
    speedups: Sequence[str],
) -> tuple[CausalLM, Tower | None]:
    """Returns the model, or this rank's share, and its tower; None: it takes no pictures. Raises ModelError."""
    model = load_model(
        checkpoint,
        dtype,
        device,
        group,
        config.attention_backend,
        block_size,
        config.max_num_seqs,
        config.deterministic,
        config.kv_cache_dtype,
        KernelChoices(config.npu_head_dims, speedups),
    )
    warn_of_chance(model, checkpoint, layout_of(model.config, block_size, dtype), device, group)
    if checkpoint.vision is None:
        return model, None
    return model, load_tower_part(checkpoint, config, dtype, device, group)


def load_tower_part(checkpoint: Checkpoint, config: EngineConfig, dtype: str, device: Device, group: Group) -> Tower:
    """Returns the tower of a model that takes pictures. Raises ModelError. `dtype`: the activations'."""
    kept_dtype = TORCH_DTYPES[dtype] if device.is_accelerator else torch.float32
    return load_tower(checkpoint, kept_dtype, device, config.mm_encoder_cache_tokens, group)
