"""Paged attention for CPU: gathers the blocks of each sequence and calls scaled_dot_product_attention.

It is registered with transformers as `NAME`; a model's attention modules call `forward` and pass the step's
ForwardBatch as a keyword. `forward` first writes the step's keys and values to the pool, then attends through the pool.
If a module requests a feature that this file does not support, the proof at load raises an error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from pd_cluster.errors import ModelError
from pd_cluster.kv.kv_vectors import decode, encode, write_kv
from pd_cluster.kv.pool_memory import TORCH_DTYPES
from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.layers.attention.latent_attention import UpProjection, attend_latents

NAME = "pd_cluster"  # transformers would interpret a name that contains "sdpa" or "paged|"

# Arguments without effect here, which modules may pass: the batch holds the positions, and there is no training.
HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "output_attentions", "output_router_logits"})


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """How attention weights are computed: softmax(softcap * tanh(q @ k * scaling / softcap))."""

    scaling: float
    sliding_window: int | None = None  # a token attends to this many tokens, including itself
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [num_heads]: scores of an additional key whose value is zero (gpt-oss)

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


class WindowOfModule:
    """The default of the argument `sliding_window`: the window is the module's attribute."""


def window_of(module: torch.nn.Module, given: int | type[WindowOfModule] | None) -> int | None:
    """Returns a module's sliding window, from the argument or the module's attribute; None: no window."""
    window = getattr(module, "sliding_window", None) if isinstance(given, type) else given
    assert window is None or isinstance(window, int)
    return window


def forward(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    forward_batch: ForwardBatch,
    sliding_window: int | type[WindowOfModule] | None = WindowOfModule,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Returns ([1, num_tokens, num_heads, head_dim], None).

    Raises ModelError for arguments that would have to be ignored.
    """
    dropout = others.pop("dropout", None) or None  # 0 is the same as None
    unknown = {name: given for name, given in others.items() if name not in HARMLESS}
    _refuse_unknown(module, {**unknown, "attention_mask": attention_mask, "dropout": dropout})
    window = window_of(module, sliding_window)
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [num_tokens, num_kv_heads, head_dim]
    layer_idx = module.layer_idx
    assert isinstance(layer_idx, int)
    source = forward_batch.reads.get(layer_idx, layer_idx)  # the layer whose keys and values this layer reads
    forward_batch = forward_batch.of_layer(source)
    scoring = Scoring(scaling, window, softcap, s_aux)
    queries = query[0]
    if forward_batch.query_factors is not None:
        queries = queries * forward_batch.query_factors[:, None].to(queries.dtype)
    if forward_batch.pool.layout.has_latents:
        up = module.kv_b_proj
        assert isinstance(up, UpProjection)
        return attend_latents(layer_idx, up.keys, up.values, queries, forward_batch, scaling)[None], None
    if source != layer_idx:
        return read_and_attend(source, queries, keys, values, forward_batch, scoring)[None], None
    attend = forward_batch.write_and_attend or write_and_attend
    return attend(layer_idx, queries, keys, values, forward_batch, scoring)[None], None


def _refuse_unknown(module: torch.nn.Module, given: dict[str, object]) -> None:
    for name, value in given.items():
        if value is not None:
            raise ModelError(f"{type(module).__name__} attends with {name}, which paged attention does not support")
    if getattr(module, "is_causal", True) is False:
        raise ModelError(f"{type(module).__name__} is not causal: tokens attend to later tokens")


def write_and_attend(
    layer_idx: int,
    query: torch.Tensor,  # [num_heads, num_tokens, head_dim]
    keys: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    values: torch.Tensor,
    batch: ForwardBatch,
    scoring: Scoring,
) -> torch.Tensor:
    """Writes the step's keys and values to the pool; returns [num_tokens, num_heads, head_dim]."""
    planes = batch.pool.layer(layer_idx)
    stored, seen = _as_stored(keys, values, batch, query.dtype)
    write_kv(*stored, *planes, batch.slot_mapping)
    batch.layer_written(layer_idx, scoring.sliding_window)
    return _attend_each(planes, query, seen, batch, scoring)


def read_and_attend(
    layer_idx: int,
    query: torch.Tensor,  # [num_heads, num_tokens, head_dim]
    keys: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    values: torch.Tensor,
    batch: ForwardBatch,
    scoring: Scoring,
) -> torch.Tensor:
    """Attends to the keys and values that layer `layer_idx` has written in the same step, for a later layer that has no
    keys and values of its own.

    Returns [num_tokens, num_heads, head_dim]. Raises ModelError if the attention in use cannot do this.
    """
    if batch.write_and_attend is not None:
        raise ModelError(
            f"layer {layer_idx}: other layers read its keys and values; only the attention on CPUs supports "
            f"this; use cpu"
        )
    batch.windows.add(scoring.sliding_window)
    _, seen = _as_stored(keys, values, batch, query.dtype)
    return _attend_each(batch.pool.layer(layer_idx), query, seen, batch, scoring)


Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values


def _as_stored(keys: torch.Tensor, values: torch.Tensor, batch: ForwardBatch, dtype: torch.dtype) -> tuple[Pair, Pair]:
    """Returns keys and values twice: as the pool stores them, and as attention reads them, converted to `dtype`."""
    own = batch.pool.layout.dtype
    if TORCH_DTYPES[own] == keys.dtype:
        return (keys, values), (keys, values)
    stored = encode(keys, own), encode(values, own)
    seen_keys, seen_values = (decode(each, own).to(dtype) for each in stored)
    return stored, (seen_keys, seen_values)


def _attend_each(
    planes: Pair, query: torch.Tensor, written: Pair, batch: ForwardBatch, scoring: Scoring
) -> torch.Tensor:
    """Attends to the pool's planes for each sequence; `written`: the keys and values of this step.

    Returns [num_tokens, num_heads, head_dim].
    """
    dtype, block_size = batch.pool.layout.dtype, batch.pool.layout.block_size
    num_heads, num_tokens, _ = query.shape
    output = query.new_empty(num_tokens, num_heads, written[1].shape[-1])
    query_starts, table_starts = batch.query_starts.tolist(), batch.table_starts.tolist()
    window = scoring.sliding_window
    for i, context_len in enumerate(batch.context_lens.tolist()):
        rows = slice(query_starts[i], query_starts[i + 1])
        if context_len == 0:  # padding
            output[rows] = 0
            continue
        query_len = rows.stop - rows.start
        table = batch.block_table[table_starts[i] : table_starts[i + 1]]
        first = 0 if window is None else max(0, context_len - query_len - window + 1) // block_size
        seen = context_len - first * block_size  # number of gathered keys; the last query_len belong to the queries
        if seen == query_len:
            k, v = (each[rows] for each in written)
        else:
            k, v = (  # [seen, num_kv_heads, head_dim]
                decode(plane.index_select(0, table[first:]).flatten(0, 1)[:seen], dtype).to(query.dtype)
                for plane in planes
            )
        limits = None if batch.key_limits is None else batch.key_limits[rows] - first * block_size
        output[rows] = _attend(query[:, rows], k, v, batch, scoring, limits).transpose(0, 1)
    return output


def _attend(
    q: torch.Tensor,  # [num_heads, query_len, head_dim]
    k: torch.Tensor,  # [seen, num_kv_heads, head_dim]
    v: torch.Tensor,
    batch: ForwardBatch,
    scoring: Scoring,
    limits: torch.Tensor | None = None,  # [query_len]: where each query's visible keys end; None: at its own position
) -> torch.Tensor:
    """Attends for one sequence. Returns [num_heads, query_len, head_dim]."""
    num_heads, query_len, head_dim = q.shape
    seen, num_kv_heads, _ = k.shape
    scaling, sliding_window = scoring.scaling, scoring.sliding_window
    window = sliding_window if sliding_window is not None and seen > sliding_window else 0
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]  # [1, num_kv_heads, seen, head_dim]
    if not scoring.is_plain:
        mask = _mask(batch, query_len, seen, window, limits)
        return _attend_step_by_step(q, k[0], v[0], mask, scoring)
    if query_len == 1:  # the query heads that share a key head become rows of one matrix
        if window:
            k, v = k[:, :, -window:], v[:, :, -window:]
        grouped = q.reshape(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        attended = scaled_dot_product_attention(grouped, k, v, scale=scaling)
        return attended.reshape(num_heads, 1, -1)  # on CUDA, float32 heads are strided
    if seen == query_len and not window and limits is None:
        return scaled_dot_product_attention(q[None], k, v, is_causal=True, scale=scaling, enable_gqa=True)[0]
    mask = _mask(batch, query_len, seen, window, limits)
    return scaled_dot_product_attention(q[None], k, v, attn_mask=mask, scale=scaling, enable_gqa=True)[0]


def _attend_step_by_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Attends with a softcap (Gemma 2) or sinks (gpt-oss), which scaled_dot_product_attention does not support."""
    num_heads, query_len, head_dim = q.shape
    num_kv_heads = k.shape[0]
    grouped = q.reshape(num_kv_heads, -1, query_len, head_dim)  # [num_kv_heads, group, query_len, head_dim]
    scores = torch.einsum("hgqd,hkd->hgqk", grouped, k) * scoring.scaling
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if scoring.sinks is not None:  # a sink takes a share of the weights; its value is zero
        sinks = scoring.sinks.to(scores.dtype).view(num_kv_heads, -1, 1, 1).expand(-1, -1, query_len, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : k.shape[1]].to(q.dtype)
    return torch.einsum("hgqk,hkd->hgqd", weights, v).reshape(num_heads, query_len, -1)


def _mask(
    batch: ForwardBatch, query_len: int, seen: int, window: int, limits: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns [query_len, seen] bool: whether query i sees key j, that is, j is not later and inside the window."""
    found = batch.masks.get((query_len, seen, window)) if limits is None else None
    if found is None:
        device = batch.slot_mapping.device
        query_at = torch.arange(seen - query_len, seen, device=device)[:, None]
        key_at = torch.arange(seen, device=device)[None]
        found = key_at <= query_at if limits is None else key_at < limits[:, None]
        if window:
            found &= key_at > query_at - window
        if limits is None:
            batch.masks[query_len, seen, window] = found
    return found
