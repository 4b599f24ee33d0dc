"""A step's attention through Triton: the plan and its metadata on the device are made once for all layers.

Fused layers call `attend_batch`; transformers' modules call `write_and_attend`. `problem` reports in advance what the
kernels do not support; then they are not used, and the log says why.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from pd_cluster.devices.device import Device, compute_capability, num_multiprocessors
from pd_cluster.kv.kv_layout import CODE_BITS, KVLayout
from pd_cluster.model.inputs.forward_batch import ForwardBatch, on_device
from pd_cluster.model.kernels.cuda.attention.attention_configs import (
    AttentionConfigs,
    configs_for,
    latent_configs_for,
    latent_group,
)
from pd_cluster.model.kernels.cuda.attention.attention_plan import (
    Ids,
    PlanRules,
    most_tiles,
    padded_items,
    plan_attention,
    plan_padded,
)
from pd_cluster.model.kernels.cuda.attention.paged_attention import (
    MAX_BLOCK_SIZE,
    MIN_BLOCK_SIZE,
    BatchMetadata,
    PagedKV,
    attend,
    write_kv,
)
from pd_cluster.model.layers.attention.sdpa import Scoring


class AttentionShape(NamedTuple):
    """A rank's heads. A program's query heads that share latents count as those of one KV head."""

    num_heads: int
    num_kv_heads: int
    width: int  # width of the values
    rope_width: int = 0  # width of the rotated parts besides latents; 0: the pool has keys and values

    @classmethod
    def of_latents(cls, num_heads: int, layout: KVLayout) -> AttentionShape:
        latent, rope, *_ = layout.planes
        return cls(num_heads, num_heads // latent_group(num_heads), latent.width, rope.width)

    @classmethod
    def of_pool(cls, num_heads: int, layout: KVLayout) -> AttentionShape:
        if layout.has_latents:
            return cls.of_latents(num_heads, layout)
        return cls(num_heads, layout.local_kv_heads, layout.head_dim)

    @classmethod
    def of_step(cls, query: torch.Tensor, key_pool: torch.Tensor, layout: KVLayout) -> AttentionShape:
        if layout.has_latents:
            return cls.of_latents(query.shape[1], layout)
        return cls(query.shape[1], key_pool.shape[2], query.shape[2])

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def configs(self, dtype_bits: int, capability: tuple[int, int], has_codes: bool = False) -> AttentionConfigs:
        """Returns the kernels' tiles. Raises ValueError for unsupported shapes."""
        if self.rope_width:
            widths = self.width, self.rope_width
            return latent_configs_for(self.num_heads, widths, dtype_bits, capability, has_codes)
        return configs_for(self.width, dtype_bits, self.group, capability, has_codes)


def problem(layout: KVLayout, num_heads: int) -> str:
    """Returns why these kernels do not support this pool and the model's `num_heads`; "" if they do."""
    block_size = layout.block_size
    if block_size & (block_size - 1) or not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
        return f"blocks of {block_size} tokens: the Triton attention supports powers of 2 from {MIN_BLOCK_SIZE} on"
    try:
        AttentionShape.of_pool(num_heads, layout).configs(16, (9, 0))
    except ValueError as error:
        return str(error)
    return ""


def attend_batch(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    batch: ForwardBatch,
    scoring: Scoring,
    pdl: bool = False,
) -> torch.Tensor:
    """Maps [num_tokens, num_heads, head_dim] to the same shape; this step's keys and values must be in the pool."""
    pools = PagedKV(key_pool, value_pool, batch.pool.layout.dtype)
    return attend(query, pools, _planned(batch, query, key_pool), scoring, pdl=pdl)


def write_and_attend(
    layer_idx: int,
    query: torch.Tensor,  # [num_heads, num_tokens, head_dim]
    keys: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    values: torch.Tensor,
    batch: ForwardBatch,
    scoring: Scoring,
) -> torch.Tensor:
    """Writes the step's keys and values into the pool; returns [num_tokens, num_heads, head_dim]."""
    key_pool, value_pool = batch.pool.layer(layer_idx)
    write_kv(keys.contiguous(), values.contiguous(), key_pool, value_pool, batch.slot_mapping, batch.pool.layout.dtype)
    batch.layer_written(layer_idx, scoring.sliding_window)
    return attend_batch(query.transpose(0, 1).contiguous(), key_pool, value_pool, batch, scoring)


def _planned(batch: ForwardBatch, query: torch.Tensor, key_pool: torch.Tensor) -> BatchMetadata:
    """Returns the batch's metadata, which its first layer makes."""
    key = AttentionShape.of_step(query, key_pool, batch.pool.layout)
    known = batch.kernel_state
    if not isinstance(known, dict):
        known = batch.kernel_state = {}
    if key not in known:
        known[key] = _plan(batch, query.element_size() * 8, key)
    found: BatchMetadata = known[key]
    return found


def _plan(batch: ForwardBatch, dtype_bits: int, shape: AttentionShape) -> BatchMetadata:
    device, num_kv_heads = batch.pool.device, shape.num_kv_heads
    configs = configs_of_shape(shape, dtype_bits, device, batch.pool.layout.dtype in CODE_BITS)
    rules = PlanRules(shape.group, num_kv_heads, configs, num_multiprocessors(device))
    plan = plan_attention(batch.query_lens, batch.host_context_lens, rules)
    there = {"decode_seqs": batch.table_starts[:0], "tiles": batch.table_starts[:0]}
    if not plan.all_decode:
        there = on_device({"decode_seqs": plan.decode_seqs, "tiles": plan.tiles}, device)
    arrivals = there["decode_seqs"][:0]
    if num_arrivals := plan.num_arrivals(num_kv_heads):
        arrivals = torch.zeros(num_arrivals, dtype=torch.int32, device=device.torch_name)
    return BatchMetadata(
        plan,
        batch.query_starts,
        batch.context_lens,
        batch.block_table,
        batch.table_starts,
        there["decode_seqs"],
        there["tiles"],
        arrivals,
        batch.key_limits,
    )


class PaddedPlanner:
    """Plans for graphs of steps with prompts (model/graphs/prompt_graphs.py)."""

    def __init__(self, num_heads: int, layout: KVLayout, dtype_bits: int, device: Device) -> None:
        """`num_heads`: this rank's query heads; `dtype_bits`: bits per element of a query."""
        self._shape = AttentionShape.of_pool(num_heads, layout)
        self._configs = configs_of_shape(self._shape, dtype_bits, device, layout.dtype in CODE_BITS)
        self._num_sms = num_multiprocessors(device)

    def num_tiles(self, size: tuple[int, int]) -> int:
        return most_tiles(*size, self._configs.prefill.rows // self._shape.group)

    def items(self, query_lens: Any, context_lens: Any, size: tuple[int, int]) -> tuple[Ids, Ids]:
        return padded_items(query_lens, context_lens, *size, self._shape.group, self._configs)

    def install(
        self,
        batch: ForwardBatch,
        size: tuple[int, int],
        longest: int,
        decode_seqs: torch.Tensor,
        tiles: torch.Tensor,
    ) -> None:
        num_kv_heads = self._shape.num_kv_heads
        plan = plan_padded(*size, longest, PlanRules(self._shape.group, num_kv_heads, self._configs, self._num_sms))
        arrivals = torch.zeros(plan.num_arrivals(num_kv_heads), dtype=torch.int32, device=tiles.device)
        metadata = BatchMetadata(
            *(plan, batch.query_starts, batch.context_lens, batch.block_table, batch.table_starts),
            *(decode_seqs, tiles, arrivals),
        )
        batch.kernel_state = {self._shape: metadata}


@functools.cache
def configs_of_shape(shape: AttentionShape, dtype_bits: int, device: Device, has_codes: bool) -> AttentionConfigs:
    return shape.configs(dtype_bits, compute_capability(device), has_codes)
