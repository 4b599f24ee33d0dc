"""Paged attention on CUDA: launches the kernels for a batch. No launch waits for the device.

Launches use the process's current device and stream. Importing this file imports Triton.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from pd_cluster.kv.kv_layout import stored_width
from pd_cluster.model.kernels.cuda.attention.attention_configs import AttentionConfigs, LatentTile, padded
from pd_cluster.model.kernels.cuda.attention.attention_decode import decode_kernel
from pd_cluster.model.kernels.cuda.attention.attention_kernels import prefill_kernel
from pd_cluster.model.kernels.cuda.attention.attention_plan import MAX_SPLITS, AttentionPlan
from pd_cluster.model.kernels.cuda.attention.attention_write import write_codes_kernel, write_kernel
from pd_cluster.model.kernels.cuda.attention.quantized_kv import codes_of
from pd_cluster.model.kernels.cuda.dependent_launch import launched
from pd_cluster.model.layers.attention.sdpa import Scoring

LOG2_E = math.log2(math.e)
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 4, 256
MERGED_ELEMENTS = 4096  # elements of split results that a program reads at once when it merges: 32 per thread
SEARCHED = 128  # rows whose splits a decode program counts at once, one per thread
WRITE_CHUNK = 1024  # elements of a token that one program writes


@dataclass(frozen=True, slots=True, eq=False)
class BatchMetadata:
    """A batch's metadata on the device, int32. Sequence i owns query rows [query_starts[i], query_starts[i + 1]).

    Its blocks are block_table[table_starts[i]:table_starts[i + 1]]. A padding row has the context_len 0 and no blocks;
    its output is zero. `has_slots`: the table has the slot of each key instead of blocks.
    """

    plan: AttentionPlan
    query_starts: torch.Tensor  # [num_seqs + 1]
    context_lens: torch.Tensor  # [num_seqs]
    block_table: torch.Tensor  # [total number of blocks]
    table_starts: torch.Tensor  # [num_seqs + 1]
    decode_seqs: torch.Tensor  # [num_decode], from the plan; not read if all sequences decode
    tiles: torch.Tensor  # [num_tiles, 2], from the plan
    # [plan.num_arrivals(num_kv_heads)]: counters of completed splits, 0 between launches. They belong to one plan,
    # whose launches run one after another; graphs keep them outside of the memory that they share.
    arrivals: torch.Tensor
    key_limits: torch.Tensor | None = None  # [num_tokens]: where each row's visible keys end; None: at its own position
    has_slots: bool = False


class PagedKV(NamedTuple):
    """A layer's planes of the pool. `dtype`: the pool's dtype if it is quantized.

    For latents, the planes hold the latents and their rotated parts.
    """

    keys: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim or stored width of codes]
    values: torch.Tensor
    dtype: str = ""


class Buffers(NamedTuple):
    """Memory that a caller provides; None: it is allocated."""

    out: torch.Tensor | None = None  # contiguous, like the query
    workspace: torch.Tensor | None = None  # float32, at least plan.workspace_numel(num_heads, head_dim)


ALLOCATED = Buffers()


class _ValueHeads(NamedTuple):
    """The heads as the kernels see them.

    Query heads that read the same latents count as the query heads of one KV head; all these KV heads have the same
    address.
    """

    num_kv_heads: int
    head_dim: int  # of the values
    rope_dim: int
    head_stride: int

    @classmethod
    def of(cls, query: torch.Tensor, key_pool: torch.Tensor, configs: AttentionConfigs) -> _ValueHeads:
        latent = configs.latent
        if latent is None:
            return cls(key_pool.shape[2], query.shape[2], 0, key_pool.stride(2))
        return cls(query.shape[1] // latent.group, latent.width, latent.rope_width, 0)


def attend(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]; the last dimension is contiguous
    pools: PagedKV,
    batch: BatchMetadata,
    scoring: Scoring,
    buffers: Buffers = ALLOCATED,
    pdl: bool = False,
) -> torch.Tensor:
    """Returns [num_tokens, num_heads, head_dim]. The step's keys and values must already be in the pool.

    With `plan.configs.latent`, a query has two parts, as wide as a latent and its rotated part, and the result is as
    wide as a latent.
    """
    plan, (out, workspace) = batch.plan, buffers
    shape = _ValueHeads.of(query, pools.keys, plan.configs)
    if out is None:
        out = torch.empty(*query.shape[:2], shape.head_dim, dtype=query.dtype, device=query.device)
    _check(query, pools, out, scoring, plan.configs.latent)
    if len(plan.tiles):
        _prefill(query, pools, batch, scoring, out, pdl)
    if len(plan.decode_seqs):
        if workspace is None:
            numel = plan.workspace_numel(query.shape[1], shape.head_dim)
            workspace = torch.empty(numel, dtype=torch.float32, device=query.device)
        _decode(query, pools, batch, scoring, (out, workspace), pdl)
    return out


def write_kv(
    keys: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], contiguous within a token
    values: torch.Tensor,
    key_pool: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,  # [num_tokens] int64: block * block_size + offset
    pool_dtype: str = "",
) -> None:
    """Writes the step's keys and values to their slots, in the pool's precision. `pool_dtype`: see `attend`."""
    num_tokens, num_kv_heads, head_dim = keys.shape
    _check_pools(key_pool, value_pool)
    for given, pool in ((keys, key_pool), (values, value_pool)):
        assert given.shape == (num_tokens, num_kv_heads, head_dim)
        assert pool.shape[2:] == (num_kv_heads, stored_width(pool_dtype, head_dim))
        assert given.stride()[1:] == (head_dim, 1)
    assert slot_mapping.dtype == torch.int64
    assert len(slot_mapping) == num_tokens
    if codes := codes_of(pool_dtype):
        half = triton.next_power_of_2(head_dim // 2)
        write_codes_kernel[num_tokens, num_kv_heads](
            *(keys, values, key_pool, value_pool, slot_mapping, keys.stride(0), values.stride(0)),
            *key_pool.stride()[:3],
            HEAD_DIM=head_dim,
            HALF=half,
            BLOCK_SIZE=key_pool.shape[1],
            CODES=codes,
            num_warps=1,
            enable_fp_fusion=False,
        )
        return
    width = num_kv_heads * head_dim
    chunk = min(WRITE_CHUNK, padded(width))
    write_kernel[num_tokens, -(-width // chunk)](
        keys,
        values,
        key_pool,
        value_pool,
        slot_mapping,
        keys.stride(0),
        values.stride(0),
        key_pool.stride(0),
        key_pool.stride(1),
        WIDTH=width,
        CHUNK=chunk,
        BLOCK_SIZE=key_pool.shape[1],
    )


def _check_pools(key_pool: torch.Tensor, value_pool: torch.Tensor, latent: LatentTile | None = None) -> None:
    """Asserts the kernels' preconditions. Block ids are not checked here: they were when the batch was built."""
    block_size = key_pool.shape[1]
    if latent is None:
        assert key_pool.shape == value_pool.shape
        assert key_pool.stride() == value_pool.stride()
    else:
        assert key_pool.shape[:3] == value_pool.shape[:3]
        assert key_pool.shape[2] == 1
    for pool in (key_pool, value_pool):
        assert pool.stride()[2:] == (pool.shape[3], 1)
    assert block_size & (block_size - 1) == 0
    assert MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE, f"block_size {block_size}"


def _check(query: torch.Tensor, pools: PagedKV, out: torch.Tensor, scoring: Scoring, latent: LatentTile | None) -> None:
    key_pool, value_pool, pool_dtype = pools
    _check_pools(key_pool, value_pool, latent)
    num_heads, num_kv_heads = query.shape[1], key_pool.shape[2]
    if latent is None:
        assert num_heads % num_kv_heads == 0
        assert stored_width(pool_dtype, query.shape[2]) == key_pool.shape[3]
        assert out.shape == query.shape
    else:
        assert num_heads % latent.group == 0
        widths = latent.width, latent.rope_width
        assert (key_pool.shape[3], value_pool.shape[3]) == tuple(stored_width(pool_dtype, each) for each in widths)
        assert query.shape[2] == sum(widths)
        assert out.shape == (*query.shape[:2], latent.width)
        assert scoring.is_plain
        assert scoring.sliding_window is None
    assert query.stride(2) == 1
    assert query.dtype == out.dtype
    assert key_pool.dtype == value_pool.dtype
    assert (key_pool.dtype == torch.uint8) == bool(codes_of(pool_dtype))
    assert out.is_contiguous()
    assert scoring.scaling > 0
    assert scoring.sinks is None or scoring.sinks.shape == (num_heads,)


def _scales(scoring: Scoring) -> tuple[float, float]:
    """Returns (scale, softcap) in units of log2, as `_attend_tile` expects them."""
    if scoring.softcap is None:
        return scoring.scaling * LOG2_E, 0.0
    return 2 * LOG2_E * scoring.scaling / scoring.softcap, scoring.softcap * LOG2_E


def _strides(
    query: torch.Tensor, out: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, heads: _ValueHeads
) -> tuple[int, ...]:
    of_rows = *query.stride()[:2], out.stride(0)
    return (*of_rows, *key_pool.stride()[:2], heads.head_stride, *value_pool.stride()[:2])


def _constants(
    query: torch.Tensor, key_pool: torch.Tensor, scoring: Scoring, pool_dtype: str, shape: _ValueHeads
) -> dict[str, object]:
    """Returns the constants for which both attention kernels are specialized."""
    return {
        "GROUP": query.shape[1] // shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "D": padded(shape.head_dim),
        "ROPE_DIM": shape.rope_dim,
        "R": padded(shape.rope_dim) if shape.rope_dim else 1,
        "BLOCK_SIZE": key_pool.shape[1],
        "HAS_WINDOW": scoring.sliding_window is not None,
        "HAS_SOFTCAP": scoring.softcap is not None,
        "HAS_SINKS": scoring.sinks is not None,
        "CODES": codes_of(pool_dtype),
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",  # ignored for 16 bits
    }


def _prefill(
    query: torch.Tensor, pools: PagedKV, batch: BatchMetadata, scoring: Scoring, out: torch.Tensor, pdl: bool
) -> None:
    plan, (key_pool, value_pool, pool_dtype) = batch.plan, pools
    config, shape = plan.configs.prefill, _ValueHeads.of(query, key_pool, plan.configs)
    num_kv_heads = shape.num_kv_heads
    prefill_kernel[(len(plan.tiles) * num_kv_heads,)](
        query,
        out,
        key_pool,
        value_pool,
        batch.query_starts,
        batch.context_lens,
        batch.block_table,
        batch.table_starts,
        batch.tiles,
        batch.key_limits if batch.key_limits is not None else batch.tiles,
        scoring.sinks if scoring.sinks is not None else out,
        num_kv_heads,
        *_strides(query, out, key_pool, value_pool, shape),
        scoring.sliding_window or 0,
        *_scales(scoring),
        BLOCK_M=config.rows,
        BLOCK_N=config.keys,
        HAS_LIMITS=batch.key_limits is not None,
        HAS_SLOTS=batch.has_slots,
        UNIFORM=plan.configs.is_uniform,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **_constants(query, key_pool, scoring, pool_dtype, shape),
        **launched(pdl),
    )


def _decode(
    query: torch.Tensor,
    pools: PagedKV,
    batch: BatchMetadata,
    scoring: Scoring,
    buffers: tuple[torch.Tensor, torch.Tensor],
    pdl: bool,
) -> None:
    plan, (key_pool, value_pool, pool_dtype), (out, workspace) = batch.plan, pools, buffers
    config, max_splits, num_decode = plan.configs.decode, plan.max_splits, len(plan.decode_seqs)
    shape, num_heads = _ValueHeads.of(query, key_pool, plan.configs), query.shape[1]
    num_kv_heads, head_dim = shape.num_kv_heads, shape.head_dim
    assert workspace.dtype == torch.float32
    assert workspace.numel() >= plan.workspace_numel(num_heads, head_dim)
    assert not plan.all_decode or num_decode == len(query)
    assert plan.split_keys % config.keys == 0
    partial = workspace[: num_decode * num_heads * max_splits * head_dim] if max_splits > 1 else workspace
    partial_lse = workspace[partial.numel() :] if max_splits > 1 else workspace
    d, merged = padded(head_dim), 1 << (num_heads // num_kv_heads - 1).bit_length()
    assert batch.arrivals.numel() >= plan.num_arrivals(num_kv_heads)
    sinks = scoring.sinks if scoring.sinks is not None else out
    decode_kernel[num_kv_heads, plan.num_workers](
        query,
        out,
        partial,
        partial_lse,
        batch.arrivals,
        key_pool,
        value_pool,
        batch.query_starts,
        batch.context_lens,
        batch.block_table,
        batch.table_starts,
        batch.decode_seqs,
        sinks,
        num_decode,
        max_splits,
        *_strides(query, out, key_pool, value_pool, shape),
        scoring.sliding_window or 0,
        *_scales(scoring),
        BLOCK_M=config.rows,
        BLOCK_N=config.keys,
        SPLIT_KEYS=plan.split_keys,
        MAX_SPLITS=MAX_SPLITS,
        SEARCHED=SEARCHED,
        MERGED=merged,
        CHUNK=max(1, MERGED_ELEMENTS // (merged * d)),
        ALL_DECODE=plan.all_decode,
        HAS_SLOTS=batch.has_slots,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **_constants(query, key_pool, scoring, pool_dtype, shape),
        **launched(pdl),
    )
