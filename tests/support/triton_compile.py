"""Compiles attention's kernels for an absent GPU.

Runs in a TritonChild that does not interpret.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pd_cluster.kv.kv_layout import stored_width
from pd_cluster.kv.pool_memory import TORCH_DTYPES
from pd_cluster.model.kernels.cuda.attention import paged_attention
from pd_cluster.model.kernels.cuda.attention.attention_configs import configs_for, latent_configs_for
from pd_cluster.model.kernels.cuda.attention.attention_plan import NO_SEQS, PlanRules, plan_attention, plan_decode
from pd_cluster.model.kernels.cuda.attention.listed_keys import with_whole_tiles
from pd_cluster.model.layers.attention.sdpa import Scoring
from tests.support.compile_cuda_ops import facts, launches_of


def compiled(arch: int, **shape: Any) -> dict[str, dict[str, Any]]:
    """Maps each kernel to its use of a multiprocessor and properties of its code (`facts`)."""
    return _facts(arch, lambda: _step(**shape, arch=arch))


def latents_compiled(arch: int, **shape: Any) -> dict[str, dict[str, Any]]:
    """Like `compiled`, for latent attention without the products around it."""
    return _facts(arch, lambda: _latents_step(**shape, arch=arch))


def _facts(arch: int, step: Callable[[], None]) -> dict[str, dict[str, Any]]:
    launches = launches_of(step)
    found = {launch[0].__name__: facts("attention", launch, arch) for launch in launches}
    assert len(found) == len(launches)
    return found


def _step(
    arch: int,
    head_dim: int,
    group: int,
    dtype: str,
    block_size: int,
    is_rich: bool,  # whether it has window, softcap and sinks
    num_kv_heads: int = 8,
    window: int = 128,
    is_uniform: bool = False,
    pool_dtype: str = "",
    has_limits: bool = False,
    pdl: bool = False,
) -> None:
    """Launches a chunk and two decode sequences on tensors without memory, with a whole model's strides."""
    query_lens, context_lens = np.array([1, 1, 500]), np.array([900, 1000, 700])
    num_heads, torch_dtype = num_kv_heads * group, TORCH_DTYPES[dtype]
    configs = configs_for(head_dim, torch_dtype.itemsize * 8, group, divmod(arch, 10), bool(pool_dtype))
    configs = replace(configs, is_uniform=is_uniform)
    plan = plan_attention(query_lens, context_lens, PlanRules(group, num_kv_heads, configs, 132))

    def empty(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    width = stored_width(pool_dtype or dtype, head_dim)
    pool = empty(4000, 32, 2, block_size, num_kv_heads, width, dtype=TORCH_DTYPES[pool_dtype or dtype])
    qkv = empty(502, num_heads + 2 * num_kv_heads, head_dim, dtype=torch_dtype)
    query, keys, values = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    limits = empty(502) if has_limits else None
    arrivals = empty(plan.num_arrivals(num_kv_heads))
    tiles = empty(len(plan.tiles), 2)
    batch = paged_attention.BatchMetadata(
        plan, empty(4), empty(3), empty(999), empty(4), empty(2), tiles, arrivals, limits
    )
    sinks = empty(num_heads, dtype=torch_dtype)
    scoring = Scoring(0.1, window, 30.0, sinks) if is_rich else Scoring(0.1)
    paged_attention.write_kv(keys, values, pool[:, 3, 0], pool[:, 3, 1], empty(502, dtype=torch.int64), pool_dtype)
    planes = paged_attention.PagedKV(pool[:, 3, 0], pool[:, 3, 1], pool_dtype)
    paged_attention.attend(query, planes, batch, scoring, pdl=pdl)


def _latents_step(
    arch: int,
    num_heads: int,
    widths: tuple[int, int],
    dtype: str,
    pool_dtype: str = "",
    is_uniform: bool = False,
    has_lists: bool = False,
) -> None:
    """`has_lists`: each token attends to the keys in a list of its own."""
    query_lens, context_lens = np.array([1, 1, 500]), np.array([900, 1000, 700])
    torch_dtype = TORCH_DTYPES[dtype]
    capability = divmod(arch, 10)
    configs = latent_configs_for(num_heads, widths, torch_dtype.itemsize * 8, capability, bool(pool_dtype))
    assert configs.latent is not None
    configs = replace(configs, is_uniform=is_uniform)
    group = configs.latent.group
    plan = plan_attention(query_lens, context_lens, PlanRules(group, num_heads // group, configs, 132))

    def empty(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    stored = [stored_width(pool_dtype or dtype, width) for width in widths]
    pools = [empty(4000, 61, 64, 1, width, dtype=TORCH_DTYPES[pool_dtype or dtype])[:, 3] for width in stored]
    query, tiles = empty(502, num_heads, sum(widths), dtype=torch_dtype), empty(len(plan.tiles), 2)
    arrivals = empty(plan.num_arrivals(num_heads // group))
    batch = paged_attention.BatchMetadata(plan, empty(4), empty(3), empty(999), empty(4), empty(2), tiles, arrivals)
    plans = [plan]
    if has_lists:
        batch = replace(batch, has_slots=True)
        whole = with_whole_tiles(configs, num_heads)
        plans = [
            plan_decode(502, 2048, num_heads // group, configs, 132),
            replace(plan, configs=whole, decode_seqs=NO_SEQS),
        ]
        batch = replace(batch, arrivals=empty(plans[0].num_arrivals(num_heads // group)))
    for each in plans:
        planes = paged_attention.PagedKV(*pools, pool_dtype)
        paged_attention.attend(query, planes, replace(batch, plan=each), Scoring(0.1))
