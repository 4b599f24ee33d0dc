"""Loads the parts of a checkpoint that take memory: the language model and, if it takes pictures, the vision tower."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import Device
from pd_cluster.kv.pool_memory import TORCH_DTYPES
from pd_cluster.model.draft.draft_head import DraftHead
from pd_cluster.model.draft.load_draft_head import load_head
from pd_cluster.model.language_model.cache_declaration import LayerCache
from pd_cluster.model.language_model.causal_lm import CausalLM
from pd_cluster.model.loading.model_loader import LoadChoices, load_model
from pd_cluster.model.parallel.rank_group import Group
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.model.vision.load_tower import load_tower
from pd_cluster.model.vision.vision_tower import Tower
from pd_cluster.settings.engine_config import EngineConfig


class LoadedParts(NamedTuple):
    """The loaded model, or this rank's share of it, and the modules that belong to it."""

    model: CausalLM
    tower: Tower | None  # the vision tower; None: the model accepts no pictures
    draft: CausalLM | None = None  # the draft model
    head: DraftHead | None = None  # the draft head, which is a single layer

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """Returns the caches of all layers; the draft head's cache is last."""
        return self.model.caches if self.head is None else (*self.model.caches, *self.head.model.caches)


def load_parts(plan: LoadPlan) -> LoadedParts:
    """Loads all parts. Raises ModelError."""
    checkpoint, config = plan.checkpoint, plan.config
    model, tower = _model_of(plan), None
    if checkpoint.vision is not None:
        tower = load_tower_part(checkpoint, config, plan.dtype, plan.device, plan.group)
    draft = None if plan.draft is None else _model_of(plan.draft)
    return LoadedParts(model, tower, draft, load_head(plan, model))


def _model_of(plan: LoadPlan) -> CausalLM:
    checkpoint, config = plan.checkpoint, plan.config
    return load_model(
        checkpoint,
        plan.dtype,
        plan.device,
        plan.group,
        LoadChoices(
            config.attention_backend,
            plan.block_size,
            config.max_num_seqs,
            config.deterministic,
            config.kv_cache_dtype,
            config.npu_head_dims,
            plan.speedups,
            plan.experts,
        ),
    )


def load_tower_part(checkpoint: Checkpoint, config: EngineConfig, dtype: str, device: Device, group: Group) -> Tower:
    """Returns the vision tower of a model that accepts pictures. Raises ModelError. `dtype`: the activations' dtype."""
    kept_dtype = TORCH_DTYPES[dtype] if device.is_accelerator else torch.float32
    return load_tower(checkpoint, kept_dtype, device, config.mm_encoder_cache_tokens, group)
