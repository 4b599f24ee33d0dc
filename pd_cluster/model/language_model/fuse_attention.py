"""Makes the attention of a fused layer from a transformers module, and removes the module's projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pd_cluster.model.language_model.architecture_quirks import Quirks
from pd_cluster.model.language_model.layer_maker import LayerMaker, norm_of
from pd_cluster.model.layers.attention.latent_attention import UpProjection
from pd_cluster.model.layers.attention.sparse_indexer import Indexer
from pd_cluster.model.layers.attention.sparse_selection import IndexNorm
from pd_cluster.model.layers.fused_layer import GatedHeadsAttention, HeadsAttention, LatentAttention
from pd_cluster.model.layers.ops import Heads, LatentOps, Latents, Ops, SparseOps
from pd_cluster.model.layers.rope.rope_tables import ends_order, qkv_order, starts_order
from pd_cluster.model.parallel.parallel_layers import SpanningNorm


def has_latents(attention: Any) -> bool:
    return isinstance(getattr(attention, "kv_b_proj", None), UpProjection)


def heads_attention(
    attention: Any, config: Any, quirks: Quirks, order: torch.Tensor | None, maker: LayerMaker
) -> HeadsAttention | GatedHeadsAttention:
    heads = _heads(attention, config, quirks, order)
    rows = None if order is None else qkv_order(order, heads.num_heads, heads.num_kv_heads)
    query: Any = getattr(attention, "q_proj", None)
    is_gated = query is not None and query.out_features == 2 * heads.num_heads * heads.head_dim
    if is_gated:
        rows = _gates_last(heads, rows)
    found = HeadsAttention(
        heads=heads,
        qkv=maker.joined(attention, ("qkv_proj",), ("q_proj", "k_proj", "v_proj"), rows=rows),
        output=maker.joined(attention, ("o_proj",), ("out_proj",)),
        ops=maker.ops,
        rope=quirks.rope(attention),
        spanning=_spanning(attention, heads, maker.ops, quirks)
        if quirks.norms_span_heads
        else _factors(attention, heads),
    )
    return GatedHeadsAttention(found, found.output) if is_gated else found


def _gates_last(heads: Heads, rows: torch.Tensor | None) -> torch.Tensor:
    """Returns the order of QKV rows that moves the gates to the end; the files store them after each head's query.

    `rows`: the order of the other rows.
    """
    num_heads, dim = heads.num_heads, heads.head_dim
    queries, gates = torch.arange(2 * num_heads * dim).view(num_heads, 2, dim).unbind(1)
    rest = torch.arange(2 * heads.num_kv_heads * dim) + 2 * num_heads * dim
    found = torch.cat((queries.flatten(), rest))
    return torch.cat((found if rows is None else found[rows], gates.flatten()))


def _factors(attention: Any, heads: Heads) -> tuple[tuple[slice, Callable[[torch.Tensor], torch.Tensor]], ...]:
    """Returns the factor of the keys with their columns in the rows of QKV; () if there is none (Falcon-H1)."""
    factor = float(getattr(attention, "key_multiplier", 1.0))
    first = heads.num_heads * heads.head_dim
    keys = slice(first, first + heads.num_kv_heads * heads.head_dim)
    return () if factor == 1.0 else ((keys, lambda x: x * factor),)


def latent_attention(
    attention: Any, config: Any, quirks: Quirks, order: torch.Tensor | None, maker: LayerMaker
) -> LatentAttention:
    assert isinstance(maker.ops, LatentOps)
    up: UpProjection = attention.kv_b_proj
    dtype = torch.float32 if maker.ops.wide_latents else attention.kv_a_layernorm.weight.dtype
    latents = Latents(
        layer_idx=attention.layer_idx,
        norm=norm_of(attention.kv_a_layernorm, quirks),
        keys=up.keys.to(dtype),
        values=up.values.to(dtype),
        rope_width=attention.qk_rope_head_dim,
        scaling=attention.scaling,
    )
    heads = ends_order(order, latents.num_heads, latents.query_width, latents.rope_width)
    kept = ends_order(order, 1, latents.width, latents.rope_width)
    if getattr(attention, "q_a_proj", None) is None:
        rows = None if heads is None or kept is None else torch.cat((heads, kept + len(heads)))
        down, query_norm, query_up = maker.joined(attention, ("q_proj", "kv_a_proj_with_mqa"), rows=rows), None, None
    else:
        rank = attention.q_a_proj.out_features
        rows = None if kept is None else torch.cat((torch.arange(rank), kept + rank))
        down = maker.joined(attention, ("q_a_proj", "kv_a_proj_with_mqa"), rows=rows)
        query_norm = norm_of(attention.q_a_layernorm, quirks)
        query_up = maker.joined(attention, ("q_b_proj",), rows=heads)
    output = maker.joined(attention, ("o_proj",))
    indexer = None
    if getattr(attention, "indexer", None) is not None:
        indexer = _indexer(attention, order if quirks.indexer_pairs else None, maker.of("indexer"))
    return LatentAttention(latents, down, output, maker.ops, query_norm, query_up, indexer, quirks.rope(attention))


def _indexer(attention: Any, order: torch.Tensor | None, maker: LayerMaker) -> Indexer:
    """`order`: the new order of the rotated features; None: unchanged order."""
    assert isinstance(maker.ops, SparseOps)
    module, rope_width = attention.indexer, attention.qk_rope_head_dim
    num_heads, width = module.weights_proj.out_features, module.wk.out_features
    weighs = getattr(module.weights_proj, "weight", None)
    rows = starts_order(order, 1, rope_width, width - rope_width)
    weight, bias = (each.detach().float().clone() for each in (module.k_norm.weight, module.k_norm.bias))
    if rows is not None:
        weight, bias = weight[rows], bias[rows]
    return Indexer(
        layer_idx=attention.layer_idx,
        queries=maker.joined(module, ("wq_b",), rows=starts_order(order, num_heads, rope_width, width - rope_width)),
        keys=maker.joined(module, ("wk",), rows=rows),
        weights=maker.joined(module, ("weights_proj",)),
        norm=IndexNorm(weight, bias, module.k_norm.eps),
        scaling=module.softmax_scale * num_heads**-0.5,
        index_topk=module.index_topk,
        weighs_in_float32=weighs is not None and weighs.dtype == torch.float32,
        ops=maker.ops,
    )


def _heads(attention: Any, config: Any, quirks: Quirks, order: torch.Tensor | None) -> Heads:
    norms = {}
    if not quirks.norms_span_heads:
        names = {"q_norm": ("q_norm", "q_layernorm"), "k_norm": ("k_norm", "k_layernorm")}
        modules = {
            role: getattr(attention, first, getattr(attention, last, None)) for role, (first, last) in names.items()
        }
        norms = {role: norm_of(module, quirks, order) for role, module in modules.items() if module is not None}
    sinks = getattr(attention, "sinks", None)
    return Heads(
        layer_idx=attention.layer_idx,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        sliding_window=quirks.window(attention),
        softcap=attention.attn_logit_softcapping if quirks.caps_scores else None,
        sinks=None if sinks is None else sinks.detach().clone(),
        q_norm=norms.get("q_norm"),
        k_norm=norms.get("k_norm"),
    )


def _spanning(
    attention: Any, heads: Heads, ops: Ops, quirks: Quirks
) -> tuple[tuple[slice, Callable[[torch.Tensor], torch.Tensor]], ...]:
    """Returns the norms over all query heads and over all key heads, each with its columns in the rows of QKV."""
    first_key = heads.num_heads * heads.head_dim
    parts = (slice(first_key), slice(first_key, first_key + heads.num_kv_heads * heads.head_dim))
    return tuple(
        (part, _spanning_norm(module, ops, quirks))
        for part, module in zip(parts, (attention.q_norm, attention.k_norm), strict=True)
    )


def _spanning_norm(module: Any, ops: Ops, quirks: Quirks) -> Callable[[torch.Tensor], torch.Tensor]:
    if isinstance(module, SpanningNorm):  # computed together with the other ranks
        return module
    norm = norm_of(module, quirks)
    return lambda x: ops.norm(x, norm)
