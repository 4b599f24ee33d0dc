"""Launches the kernels before and after attention to latents: they turn queries into latent queries, and results into
values.

Checks the kernels' preconditions. No launch waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton

from pd_cluster.kv.kv_layout import stored_width
from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.kernels.cuda.attention import latent_kernels as kernels
from pd_cluster.model.kernels.cuda.attention.quantized_kv import codes_of
from pd_cluster.model.kernels.cuda.dependent_launch import launched
from pd_cluster.model.kernels.cuda.elementwise_kernels import DTYPES
from pd_cluster.model.layers.attention.sdpa import Scoring
from pd_cluster.model.layers.ops import Latents, Rope

# (query, key pool, value pool, batch, scoring) -> [num_tokens, num_heads, width of the values]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ForwardBatch, Scoring], torch.Tensor]

FEW_ROWS = 16  # rows of the smaller tile of a product
ROWS, COLUMNS, INNER = 64, 64, 64  # a tile of a product; not measured yet
ROPE_ELEMENTS = 512  # elements of half heads that a program rotates, for two warps


class LatentKernels(NamedTuple):
    """How latents are computed. `one_tile`: products use the same tile for every number of rows."""

    attend: Attend
    one_tile: bool = False
    pdl: bool = False


class LatentRows(NamedTuple):
    """A step's rows: see `LatentOps.attend_latents`."""

    queries: torch.Tensor
    kept: torch.Tensor
    rope: Rope


def attend_latents(by: LatentKernels, latents: Latents, rows: LatentRows, batch: ForwardBatch) -> torch.Tensor:
    """See `LatentOps.attend_latents`."""
    queries, (attend, one_tile, pdl) = rows.queries, by
    num_tokens, num_heads = len(queries), latents.num_heads
    latent_pool, rope_pool = batch.pool.layer(latents.layer_idx)
    absorbed = queries.new_empty(num_tokens, num_heads, latents.width + latents.rope_width)
    if num_tokens:
        _prepare(latents, rows, absorbed, batch, pdl)
    apart = queries.view(num_tokens, num_heads, -1)
    _product(apart[..., : latents.query_width], latents.keys, absorbed[..., : latents.width], one_tile, pdl)
    batch.layer_written(latents.layer_idx, None)
    summed = attend(absorbed, latent_pool, rope_pool, batch, Scoring(latents.scaling))
    found = queries.new_empty(num_tokens, num_heads, latents.value_width)
    _product(summed, latents.values, found, one_tile, pdl)
    return found.flatten(1)


def _prepare(latents: Latents, rows: LatentRows, absorbed: torch.Tensor, batch: ForwardBatch, pdl: bool) -> None:
    queries, kept, rope = rows
    dtype, (latent_pool, rope_pool) = batch.pool.layout.dtype, batch.pool.layer(latents.layer_idx)
    _check(latents, rows, (latent_pool, rope_pool), batch.slot_mapping)
    for pool, width in ((latent_pool, latents.width), (rope_pool, latents.rope_width)):
        assert pool.shape[2:] == (1, stored_width(dtype if codes_of(dtype) else "", width))
    half, rope_half = (triton.next_power_of_2(each // 2) for each in (latents.width, latents.rope_width))
    heads = min(max(1, ROPE_ELEMENTS // rope_half), triton.next_power_of_2(latents.num_heads))
    kernels.prepare_latents[(len(queries), 1 + triton.cdiv(latents.num_heads, heads))](
        *(queries, kept, rope.cos, rope.sin, latents.norm.weight, absorbed, latent_pool, rope_pool),
        batch.slot_mapping,
        *(queries.stride(0), kept.stride(0), rope.cos.stride(0)),
        *(*latent_pool.stride()[:2], *rope_pool.stride()[:2]),
        latents.norm.eps,
        NUM_HEADS=latents.num_heads,
        QUERY_WIDTH=latents.query_width,
        WIDTH=latents.width,
        ROPE_WIDTH=latents.rope_width,
        BLOCK_SIZE=latent_pool.shape[1],
        HEADS=heads,
        HALF=half,
        ROPE_HALF=rope_half,
        CODES=codes_of(dtype),
        num_warps=2,
        enable_fp_fusion=False,
        **launched(pdl),
    )


def _check(latents: Latents, rows: LatentRows, pools: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor) -> None:
    queries, kept, rope = rows
    num_tokens = len(queries)
    assert queries.dtype in DTYPES
    assert queries.shape == (num_tokens, latents.num_heads * (latents.query_width + latents.rope_width))
    assert kept.shape == (num_tokens, latents.width + latents.rope_width)
    assert kept.dtype == queries.dtype
    assert queries.stride(1) == kept.stride(1) == 1
    assert latents.norm.weight.shape == (latents.width,)
    assert latents.norm.weight.dtype in (queries.dtype, torch.float32)
    assert latents.norm.weight.is_contiguous()
    for table in (rope.cos, rope.sin):
        assert table.shape == (num_tokens, latents.rope_width)
        assert table.dtype in (queries.dtype, torch.float32)
        assert table.stride() == (rope.cos.stride(0), 1)
    for pool in pools:
        assert pool.stride(3) == 1
    assert slots.shape == (num_tokens,)
    assert slots.dtype == torch.int64
    assert slots.is_contiguous()


def _product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, one_tile: bool, pdl: bool) -> None:
    """Writes x [num_rows, num_heads, inputs] times weight [num_heads, inputs, outputs] to `out`; sums are float32."""
    num_rows, num_heads, num_inputs = x.shape
    num_outputs = weight.shape[2]
    assert weight.shape[:2] == (num_heads, num_inputs)
    assert weight.dtype == x.dtype == out.dtype
    assert weight.is_contiguous()
    assert out.shape == (num_rows, num_heads, num_outputs)
    assert x.stride(2) == out.stride(2) == 1
    if not num_rows:
        return
    is_wide = x.dtype == torch.float32
    rows = FEW_ROWS if num_rows <= FEW_ROWS and not one_tile else ROWS
    kernels.heads_product[(triton.cdiv(num_rows, rows), triton.cdiv(num_outputs, COLUMNS), num_heads)](
        *(x, weight, out, num_rows),
        *(*x.stride()[:2], *out.stride()[:2]),
        NUM_INPUTS=num_inputs,
        NUM_OUTPUTS=num_outputs,
        BLOCK_M=rows,
        BLOCK_N=COLUMNS,
        BLOCK_K=INNER // 2 if is_wide else INNER,
        PRECISION="ieee" if is_wide else "tf32",
        num_warps=4,
        num_stages=2 if is_wide else 3,
        **launched(pdl),
    )
