"""A graph without a GPU: records a run's operators and repeats them on the same tensors, without the model's Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pd_cluster.kv.kv_vectors import write_kv
from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.layers.attention.sdpa import Scoring, write_and_attend


class _Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            self.calls.append(lambda: func(*args, **kwargs))
        elif not func.is_view or not _storages(args) >= _storages([out]):  # a view operator may copy, as reshape does
            self.calls.append(lambda: refill(out, func(*args, **kwargs)))
        return out


def _storages(given: Any) -> set[int]:
    if isinstance(given, torch.Tensor):
        return {given.untyped_storage().data_ptr()}
    return set().union(*map(_storages, given)) if isinstance(given, (tuple, list)) else set()


def refill(out: Any, fresh: Any) -> None:
    if isinstance(out, torch.Tensor):
        out.copy_(fresh)
    elif isinstance(out, (tuple, list)):
        for to, of in zip(out, fresh, strict=True):
            refill(to, of)


def recorded(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Runs once to warm up, then records a run; returns a function that repeats the recorded calls."""
    run()
    with _Record() as record:
        result = run()

    def replay() -> torch.Tensor:
        for call in record.calls:
            call()
        return result

    return replay


def attend_without_lengths(
    layer_idx: int,
    query: torch.Tensor,  # [num_heads, num_seqs, head_dim]
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: ForwardBatch,
    scoring: Scoring,
) -> torch.Tensor:
    """In a graph, attends one token per sequence over all blocks that a context can have; otherwise uses SDPA."""
    if batch.replay_lens is None:
        return write_and_attend(layer_idx, query, keys, values, batch, scoring)
    key_pool, value_pool = batch.pool.layer(layer_idx)
    block_size = batch.pool.layout.block_size
    write_kv(keys, values, key_pool, value_pool, batch.slot_mapping)
    batch.layer_written(layer_idx, scoring.sliding_window)
    num_blocks = -(-int(batch.host_context_lens.max()) // block_size)
    at = batch.table_starts[:-1, None] + torch.arange(num_blocks)
    table = batch.block_table[at.clamp(max=len(batch.block_table) - 1).long()]
    k, v = (pool[table].flatten(1, 2) for pool in (key_pool, value_pool))  # [num_seqs, seen, num_kv_heads, head_dim]
    group = query.shape[0] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("hsd,sthd->sht", query, k) * scoring.scaling
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    positions, lens = torch.arange(scores.shape[2]), batch.context_lens[:, None, None]
    seen = positions < lens
    if scoring.sliding_window is not None:
        seen = seen & (positions >= lens - scoring.sliding_window)
    weights = torch.where(seen, scores, -1e30).softmax(-1)
    assert scoring.sinks is None
    return torch.einsum("sht,sthd->shd", weights, torch.where(seen[:, 0, :, None, None], v, 0.0))
