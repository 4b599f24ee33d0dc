"""torch-npu's operators of sparse attention in plain torch, with the limits that CANN documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

LATENT_WIDTHS = (512, 64)
INDEX_HEADS, INDEX_WIDTH = 64, 128  # in the packed layout


def scatter_nd_update_(data: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    assert data.is_contiguous()
    assert indices.shape == (len(updates), 1)
    assert data.dtype == updates.dtype
    assert len(indices.unique()) == len(indices)
    assert int(indices.min()) >= 0
    assert int(indices.max()) < len(data)
    data[indices[:, 0].long()] = updates
    return data


def lightning_indexer(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    *,
    actual_seq_lengths_query: torch.Tensor,
    actual_seq_lengths_key: torch.Tensor,
    block_table: torch.Tensor,
    layout_query: str,
    layout_key: str,
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    **others: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns positions by descending score; -1 after a token's last key."""
    assert not others
    assert (layout_query, layout_key, sparse_mode) == ("TND", "PA_BSND", 3)
    assert query.shape[1:] == (INDEX_HEADS, INDEX_WIDTH)
    assert weights.shape == query.shape[:2]
    assert key.shape[2:] == (1, INDEX_WIDTH)
    assert query.dtype == key.dtype == weights.dtype
    assert 1 <= sparse_count <= 2048
    assert all(each.is_contiguous() for each in (query, key, weights))
    found = torch.full((len(query), 1, sparse_count), -1, dtype=torch.int32)
    for row, num_seen, table in _tokens(query, key, block_table, actual_seq_lengths_query, actual_seq_lengths_key):
        keys = key[table].flatten(0, 1)[:num_seen, 0].float()
        scores = ((query[row].float() @ keys.T).relu() * weights[row, :, None].float()).sum(0)
        best = scores.sort(descending=True, stable=True).indices[:sparse_count]
        found[row, 0, : len(best)] = best.to(torch.int32)
    return found, query.new_empty(0)


def sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sparse_indices: torch.Tensor,
    scale_value: float,
    *,
    block_table: torch.Tensor,
    actual_seq_lengths_query: torch.Tensor,
    actual_seq_lengths_kv: torch.Tensor,
    query_rope: torch.Tensor,
    key_rope: torch.Tensor,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    attention_mode: int = 0,
    **others: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert not others
    assert (layout_query, layout_kv, sparse_mode) == ("TND", "PA_BSND", 3)
    assert (sparse_block_size, attention_mode) == (1, 2)
    assert key.data_ptr() == value.data_ptr()
    assert key.shape[2] == key_rope.shape[2] == 1
    assert (query.shape[-1], query_rope.shape[-1]) == (key.shape[-1], key_rope.shape[-1]) == LATENT_WIDTHS
    assert query.shape[1] in (1, 2, 4, 8, 16, 32, 64, 128)
    assert sparse_indices.dtype == torch.int32
    assert all(each.is_contiguous() for each in (query, key, query_rope, key_rope, sparse_indices))
    found = torch.empty_like(query)
    for row, num_seen, table in _tokens(query, key, block_table, actual_seq_lengths_query, actual_seq_lengths_kv):
        listed = sparse_indices[row, 0]
        at = listed[listed >= 0].long()
        assert bool((listed[len(at) :] == -1).all())
        assert int(at.max()) < num_seen
        latents, ropes = (each[table].flatten(0, 1)[at, 0].float() for each in (key, key_rope))
        scores = (query[row].float() @ latents.T + query_rope[row].float() @ ropes.T) * scale_value
        found[row] = (scores.softmax(-1) @ latents).to(query.dtype)
    return found, query.new_empty(0, dtype=torch.float32), query.new_empty(0, dtype=torch.float32)


def _tokens(
    query: torch.Tensor, key: torch.Tensor, tables: torch.Tensor, ends: torch.Tensor, lens: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yields each token's row, the number of keys that it sees, and its sequence's blocks."""
    assert all(each.dtype == torch.int32 and each.is_contiguous() for each in (tables, ends, lens))
    assert len(tables) == len(ends) == len(lens)
    assert key.shape[1] % 16 == 0
    assert key.shape[1] <= 1024
    assert int(ends[-1]) == len(query)
    assert bool(((tables >= 0) & (tables < len(key))).all())
    start = 0
    for table, stop, length in zip(tables, ends.tolist(), lens.tolist(), strict=True):
        assert 0 < length <= len(table) * key.shape[1]
        for row in range(start, stop):
            yield row, length - stop + row + 1, table.long()
        start = stop


REFERENCES: dict[str, Callable[..., Any]] = {
    "npu_scatter_nd_update_": scatter_nd_update_,
    "npu_lightning_indexer": lightning_indexer,
    "npu_sparse_flash_attention": sparse_flash_attention,
}
