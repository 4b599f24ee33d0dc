"""Paged attention for CPU: per sequence, gather its blocks and call scaled_dot_product_attention.

Registered with transformers under `NAME`; a model's attention modules call `forward` with the step's ForwardBatch
as a keyword. Writes the step's keys and values to the pool first, then attends through the pool.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from pd_cluster.model.batch import ForwardBatch

NAME = "pd_cluster"  # transformers gives names with "sdpa" or "paged|" in them a meaning of their own


def forward(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    forward_batch: ForwardBatch,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Returns ([1, num_tokens, num_heads, head_dim], None)."""
    batch = forward_batch
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [num_tokens, num_kv_heads, head_dim]
    layer_idx = module.layer_idx
    assert isinstance(layer_idx, int)
    output = write_and_attend(layer_idx, query[0], keys, values, batch, scaling, sliding_window, softcap)
    return output[None], None


def write_and_attend(
    layer_idx: int,
    query: torch.Tensor,  # [num_heads, num_tokens, head_dim]
    keys: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    values: torch.Tensor,
    batch: ForwardBatch,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Puts the step's keys and values into the pool; returns [num_tokens, num_heads, head_dim]."""
    key_pool, value_pool = batch.pool.layer(layer_idx)
    block_size = batch.pool.layout.block_size
    block, offset = batch.slot_mapping // block_size, batch.slot_mapping % block_size
    key_pool.index_put_((block, offset), keys.to(key_pool.dtype))
    value_pool.index_put_((block, offset), values.to(value_pool.dtype))
    batch.layer_written()

    output = torch.empty_like(query.transpose(0, 1))  # [num_tokens, num_heads, head_dim]
    query_starts, table_starts = batch.query_starts.tolist(), batch.table_starts.tolist()
    for i, context_len in enumerate(batch.context_lens.tolist()):
        rows = slice(query_starts[i], query_starts[i + 1])
        query_len = rows.stop - rows.start
        table = batch.block_table[table_starts[i] : table_starts[i + 1]]
        first = 0 if sliding_window is None else max(0, context_len - query_len - sliding_window + 1) // block_size
        seen = context_len - first * block_size  # keys at hand; the last query_len of them are the queries' own
        if seen == query_len:
            k, v = keys[rows], values[rows]
        else:
            k = key_pool.index_select(0, table[first:]).flatten(0, 1)[:seen]  # [seen, num_kv_heads, head_dim]
            v = value_pool.index_select(0, table[first:]).flatten(0, 1)[:seen]
        output[rows] = _attend(query[:, rows], k, v, batch, scaling, sliding_window, softcap).transpose(0, 1)
    return output


def _attend(
    q: torch.Tensor,  # [num_heads, query_len, head_dim]
    k: torch.Tensor,  # [seen, num_kv_heads, head_dim]
    v: torch.Tensor,
    batch: ForwardBatch,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """One sequence. Returns [num_heads, query_len, head_dim]."""
    num_heads, query_len, head_dim = q.shape
    seen, num_kv_heads, _ = k.shape
    window = sliding_window if sliding_window is not None and seen > sliding_window else 0
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]  # [1, num_kv_heads, seen, head_dim]
    if softcap is not None:
        return _attend_softcapped(q, k[0], v[0], _mask(batch, query_len, seen, window), scaling, softcap)
    if query_len == 1:  # query heads of a group become rows of one matrix
        if window:
            k, v = k[:, :, -window:], v[:, :, -window:]
        grouped = q.reshape(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        return scaled_dot_product_attention(grouped, k, v, scale=scaling).view(num_heads, 1, head_dim)
    if seen == query_len and not window:
        return scaled_dot_product_attention(q[None], k, v, is_causal=True, scale=scaling, enable_gqa=True)[0]
    mask = _mask(batch, query_len, seen, window)
    return scaled_dot_product_attention(q[None], k, v, attn_mask=mask, scale=scaling, enable_gqa=True)[0]


def _attend_softcapped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float, softcap: float
) -> torch.Tensor:
    """softcap * tanh(scores / softcap) before the softmax (Gemma 2)."""
    num_heads, query_len, head_dim = q.shape
    num_kv_heads = k.shape[0]
    grouped = q.reshape(num_kv_heads, -1, query_len, head_dim)  # [num_kv_heads, group, query_len, head_dim]
    scores = torch.einsum("hgqd,hkd->hgqk", grouped, k) * scaling
    scores = torch.tanh(scores / softcap) * softcap
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
    return torch.einsum("hgqk,hkd->hgqd", weights, v).reshape(num_heads, query_len, head_dim)


def _mask(batch: ForwardBatch, query_len: int, seen: int, window: int) -> torch.Tensor:
    """[query_len, seen] bool: key j is visible to query i when it is not later, and within the window if any."""
    found = batch.masks.get((query_len, seen, window))
    if found is None:
        query_at = torch.arange(seen - query_len, seen)[:, None]
        key_at = torch.arange(seen)[None]
        found = key_at <= query_at
        if window:
            found &= key_at > query_at - window
        batch.masks[query_len, seen, window] = found
    return found
