"""Paged attention and KV writes on NPUs, with torch-npu's fused operators.

All sequences of a step, prompts and decode, are computed in one packed call (layout TND). If the operator does not
support a model's heads in this layout, decode steps are computed as a batch of one token each (BSND), and steps with
prompts by layers/attention/sdpa.py. Lengths are on the host, block tables on the device. `problem` reports at load what
neither layout supports; head_dim_probe.py tests other head sizes. The operators and their limits are taken from
torch-npu 2.13's schemas and CANN's descriptions; nothing here has run on hardware.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from pd_cluster.devices.device import Device
from pd_cluster.devices.device_streams import HostValues
from pd_cluster.errors import called
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.inputs.step_input import Ints
from pd_cluster.model.layers.attention import sdpa
from pd_cluster.model.layers.attention.sdpa import Scoring

DTYPES = ("float16", "bfloat16")
PACKED_HEAD_DIM = 128  # 192 is supported only for keys without blocks
PACKED_HEAD_DIM_ALONE = 64  # supported only if every query head has its own key head
PACKED_BLOCK_SIZE = 128  # tokens
MAX_PACKED_SEQS = 4096
BATCHED_STEP = 16  # in decode steps, head dims and block sizes are multiples of this
MAX_BATCHED_HEAD_DIM = 512
MAX_BATCHED_BLOCK_SIZE = 512
MAX_GROUP = 64  # query heads per key head
MAX_WIDTH = 65535  # key heads times head dim
MASK_SIZE = 2048  # the operator derives every causal or windowed mask from one of this size
CAUSAL, BAND = 3, 4  # sparse_mode: both masks are aligned to the last query and key

Way = Literal["TND", "BSND"]


def problem(layout: KVLayout, num_heads: int, max_num_seqs: int, traits: set[str], way: Way | None = None) -> str:
    """Returns why these operators do not support this pool and model; "" if they do.

    `traits`: those of "softcap", "sinks", "window" that the model has. `way`: None means `way_of`. With TND, the
    result shows whether anything besides the head size rules it out.
    """
    if layout.dtype not in DTYPES:
        return f"{called('dtype')} {layout.dtype}: attention on NPUs supports {' or '.join(DTYPES)}"
    group, width = num_heads // layout.local_kv_heads, layout.local_kv_heads * layout.head_dim
    if group > MAX_GROUP:
        return f"{group} query heads per key head: attention on NPUs supports at most {MAX_GROUP}"
    if width > MAX_WIDTH:
        return f"{width} values in a token's keys: attention on NPUs supports at most {MAX_WIDTH}"
    if "softcap" in traits:
        return "the model caps its attention scores (softcap), which attention on NPUs does not support"
    why, dim = _why_not_packed(layout, num_heads), layout.head_dim
    if (way or way_of(layout, num_heads)) == "TND":
        if why_blocks := _why_not_packed_blocks(layout):
            return why_blocks
        if max_num_seqs > MAX_PACKED_SEQS:
            return (
                f"{called('max_num_seqs')} {max_num_seqs}: attention on NPUs supports at most {MAX_PACKED_SEQS} at once"
            )
        return _why_no_dim(dim)
    if others := sorted(traits & {"sinks", "window"}):
        return f"{why}, and the model's {' and '.join(others)} need that"
    size = layout.block_size
    if size % BATCHED_STEP or size > MAX_BATCHED_BLOCK_SIZE:
        return f"{called('block_size')} {size}: on NPUs a multiple of {BATCHED_STEP} up to {MAX_BATCHED_BLOCK_SIZE}"
    return _why_no_dim(dim)


def way_of(layout: KVLayout, num_heads: int) -> Way:
    """Returns the input layout that the operators' descriptions allow."""
    return "BSND" if _why_not_packed(layout, num_heads) else "TND"


def _why_not_packed(layout: KVLayout, num_heads: int) -> str:
    if why := _why_not_packed_blocks(layout):
        return why
    dim = layout.head_dim
    if dim == PACKED_HEAD_DIM or (dim == PACKED_HEAD_DIM_ALONE and num_heads == layout.num_kv_heads):
        return ""
    return f"head_dim {dim}: attention on NPUs supports prompts with {PACKED_HEAD_DIM}"


def _why_not_packed_blocks(layout: KVLayout) -> str:
    if layout.block_size == PACKED_BLOCK_SIZE:
        return ""
    blocks = called("block_size")
    return f"{blocks} {layout.block_size}: attention on NPUs supports prompts in blocks of {PACKED_BLOCK_SIZE}"


def _why_no_dim(dim: int) -> str:
    if dim % BATCHED_STEP or dim > MAX_BATCHED_HEAD_DIM:
        return f"head_dim {dim}: attention on NPUs supports multiples of {BATCHED_STEP} up to {MAX_BATCHED_HEAD_DIM}"
    return ""


class PlannedStep(NamedTuple):
    """The arguments of a step's attention, the same in all its layers."""

    tables: torch.Tensor  # [num_seqs, width] int32: blocks, padded with arbitrary valid ids
    query_ends: list[int]  # [num_seqs] running sums of the query lengths
    context_lens: list[int]  # [num_seqs]


class NpuAttention:
    """Attention for fused layers and transformers' modules; both call `write_and_attend`."""

    def __init__(self, device: Device, way: Way) -> None:
        self.way: Way = way
        self._mask = causal_mask(device)

    def write_and_attend(
        self,
        layer_idx: int,
        query: torch.Tensor,  # [num_heads, num_tokens, head_dim]
        keys: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        values: torch.Tensor,
        batch: ForwardBatch,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Writes the step's keys and values into the pool; returns [num_tokens, num_heads, head_dim]."""
        if self._uses_sdpa(batch):
            return sdpa.write_and_attend(layer_idx, query, keys, values, batch, scoring)
        write_kv(layer_idx, keys.contiguous(), values.contiguous(), batch)
        batch.layer_written(layer_idx, scoring.sliding_window)
        if layer_idx == 0 or not isinstance(batch.kernel_state, PlannedStep):
            batch.kernel_state = planned_step(batch)
        return self._attend(query.transpose(0, 1).contiguous(), layer_idx, batch, batch.kernel_state, scoring)

    def _attend(
        self, query: torch.Tensor, layer_idx: int, batch: ForwardBatch, planned: PlannedStep, scoring: Scoring
    ) -> torch.Tensor:
        """Maps [num_tokens, num_heads, head_dim] to the same shape; this step's keys and values must be in the pool."""
        query = query if self.way == "TND" else query[:, None]  # [num_seqs, 1, num_heads, head_dim]
        options: dict[str, Any] = {"block_table": planned.tables, "input_layout": self.way}
        if self.way == "TND":
            options |= {"atten_mask": self._mask, "sparse_mode": CAUSAL}
            # A band counts the keys before the token itself, so a window of W tokens is a band of W - 1.
            if scoring.sliding_window is not None:
                options |= {"sparse_mode": BAND, "pre_tokens": scoring.sliding_window - 1, "next_tokens": 0}
        keys, values = (pool.flatten(2) for pool in batch.pool.layer(layer_idx))
        found = _call(query, keys, values, planned, scoring, options)
        return found if self.way == "TND" else found[:, 0]

    def _uses_sdpa(self, batch: ForwardBatch) -> bool:
        """Whether the step has prompts with unsupported head sizes, or tokens that see later tokens."""
        is_batched = self.way == "BSND" and len(batch.query_lens) != batch.num_tokens
        return is_batched or batch.key_limits is not None


def causal_mask(device: Device) -> torch.Tensor:
    """Returns the mask [MASK_SIZE, MASK_SIZE] int8, with 1 where a key is masked."""
    ones = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8, device=device.torch_name)
    return ones.triu(1)


def write_kv(layer_idx: int, keys: torch.Tensor, values: torch.Tensor, batch: ForwardBatch) -> None:
    """Writes [num_tokens, num_kv_heads, head_dim] to the step's slots; no two are the same."""
    key_pool, value_pool = batch.pool.layer(layer_idx)
    torch.ops.npu.npu_scatter_pa_kv_cache(keys, values, key_pool, value_pool, batch.slot_mapping, cache_mode="Norm")


def _call(
    query: torch.Tensor,
    keys: torch.Tensor,  # [num_blocks, block_size, num_kv_heads * head_dim]
    values: torch.Tensor,
    planned: PlannedStep,
    scoring: Scoring,
    options: dict[str, Any],
) -> torch.Tensor:
    """Calls the first operator, or with sinks the second, which has other names for the same arguments."""
    num_heads, head_dim = query.shape[-2:]
    num_kv_heads, block_size = keys.shape[2] // head_dim, keys.shape[1]
    options |= {"block_size": block_size, "num_key_value_heads": num_kv_heads}
    query_ends = planned.query_ends if options["input_layout"] == "TND" else None
    if scoring.sinks is None:
        found = torch.ops.npu.npu_fused_infer_attention_score(
            query,
            keys,
            values,
            actual_seq_lengths=query_ends,
            actual_seq_lengths_kv=planned.context_lens,
            num_heads=num_heads,
            scale=scoring.scaling,
            **options,
        )
    else:
        found = torch.ops.npu.npu_fused_infer_attention_score_v2(
            query,
            keys,
            values,
            actual_seq_qlen=query_ends,
            actual_seq_kvlen=planned.context_lens,
            learnable_sink=scoring.sinks.to(query.dtype),
            num_query_heads=num_heads,
            softmax_scale=scoring.scaling,
            **options,
        )
    attended: torch.Tensor = found[0]
    return attended


def planned_step(batch: ForwardBatch) -> PlannedStep:
    """Makes the plan in a step's first layer. A graph repeats this at each replay, from its buffers."""
    lens = batch.host_context_lens if batch.replay_lens is None else batch.replay_lens
    batch.host_values = _host_values
    return PlannedStep(tables_of(batch), np.cumsum(batch.query_lens).tolist(), _at_least_one(lens))


def tables_of(batch: ForwardBatch) -> torch.Tensor:
    """Returns the sequences' blocks, [num_seqs, width] int32, each followed by arbitrary valid ids."""
    width = batch.pool.layout.num_blocks_for(int(batch.host_context_lens.max()))
    columns = torch.arange(width, device=batch.block_table.device)
    at = batch.table_starts[:-1, None].long() + columns
    at = at.clamp(max=len(batch.block_table) - 1)  # the device checks no ids, so all must be valid
    # Indexing by a tensor may make the host wait for the device, which a graph cannot do; index_select does not.
    return batch.block_table.index_select(0, at.flatten()).view(at.shape)


def _host_values(lens: Ints) -> HostValues:
    """Returns the values that a graph's attention receives at replay, under the names that both operators use."""
    context_lens = _at_least_one(lens)
    return {"actual_seq_lengths_kv": context_lens, "actual_seq_kvlen": context_lens}


def _at_least_one(lens: Ints) -> list[int]:
    """Makes a padding row see one arbitrary token, because the operator's result for zero tokens is undefined."""
    found: list[int] = np.maximum(lens, 1).tolist()
    return found
