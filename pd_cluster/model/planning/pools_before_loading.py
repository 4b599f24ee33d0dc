"""Checks and sizes a model's pools before its weights are loaded, from modules without values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from pd_cluster import host
from pd_cluster.checkpoints.checkpoint import HYBRID_MODEL_TYPES
from pd_cluster.devices.device import CPU, resolve
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.model.language_model.cache_declaration import LayerCache, layouts_of
from pd_cluster.model.loading.model_loader import plan_of
from pd_cluster.model.parallel.rank_group import SingleRank
from pd_cluster.model.planning.group_pool_sizing import GroupNeeds, GroupSizes, group_sizes
from pd_cluster.model.planning.layer_group_limits import check_states, may_fuse, splits_windows
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.model.planning.model_needs import model_without_values, resident_nbytes
from pd_cluster.model.planning.pool_sizing import num_pool_blocks
from pd_cluster.settings.engine_config import EngineConfig


def pool_layouts(plan: LoadPlan, caches: Sequence[LayerCache], draft_head: str = "") -> tuple[KVLayout, ...]:
    """Returns the layouts of this rank's pools. Raises ConfigError, ModelError. `draft_head`: see `layouts_of`."""
    layouts = layouts_of(caches, plan.block_size, plan.kv_dtype, draft_head, splits_windows(plan))
    if plan.is_alone:
        return layouts
    cut = plan_of(plan.checkpoint, plan.group.size, plan.experts is not None)
    return tuple(cut.layout_of_rank(layout, plan.group.rank) for layout in layouts)


def check_before_loading(plan: LoadPlan) -> None:
    """Raises ConfigError for settings that a model with states refuses, if this can be decided without weights.

    Modules are built only for a single rank outside a unit, because several ranks may be threads of one process, and
    transformers changes torch's default dtype, which they share.
    """
    if plan.checkpoint.model_type not in HYBRID_MODEL_TYPES:
        return
    check_states(plan, may_fuse(plan))
    if plan.config.state_cache_gib is not None and plan.is_alone and plan.experts is None:
        _, caches = model_without_values(plan.checkpoint)
        _needs(plan, _first_layouts(plan, caches, plan.group.size)).num_checkpoints(0)


def _first_layouts(plan: LoadPlan, caches: Sequence[LayerCache], num_ranks: int) -> tuple[KVLayout, ...]:
    """Returns the layouts of the first of `num_ranks` ranks. `caches`: the whole model's."""
    layouts = layouts_of(caches, plan.block_size, plan.kv_dtype, "", splits_windows(plan))
    return tuple(replace(layout, tp_size=num_ranks).of_rank(0) for layout in layouts)


def _needs(plan: LoadPlan, layouts: Sequence[KVLayout]) -> GroupNeeds:
    return GroupNeeds(plan.config, layouts, plan.max_model_len, plan.max_num_batched_tokens)


@dataclass(frozen=True, slots=True)
class ExpectedPools:
    """The pools of one rank, for a model that is not loaded.

    `sizes` None: they depend on the memory that the weights leave on a device.
    """

    model: str
    layouts: tuple[KVLayout, ...]
    sizes: GroupSizes | None

    def __str__(self) -> str:
        if self.sizes is not None:
            return f"{self.model}: KV pools of {self.sizes.describe(self.layouts)}, if no other instance starts here"
        per_token = sum(each.token_nbytes for each in self.layouts if not each.holds.is_state)
        state = f", a state {self.state_nbytes / 2**20:.2f} MiB" if self.state_nbytes else ""
        return (
            f"{self.model}: a token takes {per_token} bytes{state}; a start logs the numbers of tokens, sequences and "
            f"checkpoints, which depend on the memory that the weights leave"
        )

    @property
    def state_nbytes(self) -> int:
        return self.layouts[-1].block_nbytes if self.layouts[-1].holds.is_state else 0

    def to_json(self) -> dict[str, int | str | None]:
        """Returns the sizes as JSON; unknown numbers are None."""
        sizes = self.sizes
        return {
            "model": self.model,
            "num_tokens": None if sizes is None else sizes.nums_blocks[0] * self.layouts[0].block_size,
            "num_sequences": None if sizes is None else sizes.max_num_seqs,
            "num_checkpoints": None if sizes is None else sizes.num_checkpoints,
            "state_nbytes": self.state_nbytes,
        }


def expected_pools(config: EngineConfig) -> ExpectedPools:
    """Computes the sizes of the pools of a host's only instance. Raises ConfigError, ModelError."""
    device, num_ranks = resolve(config.device), config.tensor_parallel_size
    own = msgspec.structs.replace(config, tensor_parallel_size=1, num_local_ranks=num_ranks)
    plan = LoadPlan.of(own, SingleRank(), device)
    check_before_loading(plan)
    built, caches = model_without_values(plan.checkpoint)
    if num_ranks > 1:
        plan_of(plan.checkpoint, num_ranks, config.enable_expert_parallel)
    layouts = _first_layouts(plan, caches, num_ranks)
    if device.is_accelerator:
        return ExpectedPools(config.model, layouts, None)
    free = host.memory()
    free = free._replace(available=max(0, free.available - resident_nbytes(plan.checkpoint, built, plan.dtype)))
    return ExpectedPools(config.model, layouts, _sizes(plan, layouts, free))


def _sizes(plan: LoadPlan, layouts: Sequence[KVLayout], free: host.HostMemory) -> GroupSizes:
    if len(layouts) > 1:
        return group_sizes(_needs(plan, layouts), free)
    num_blocks = num_pool_blocks(plan.config, layouts[0], plan.max_model_len, CPU, free=free)
    return GroupSizes((num_blocks,), (0,), plan.config.max_num_seqs)
