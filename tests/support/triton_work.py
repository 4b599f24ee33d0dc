"""Which programs of decode work on which row, by Triton's interpreter. Runs in a TritonChild."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime.interpreter import interpreter_builder

from pd_cluster.kv.layout import KVLayout, keys_and_values
from pd_cluster.kv.pool import KVPool
from pd_cluster.model.attention import sdpa
from pd_cluster.model.batch import ForwardBatch, build_batch
from pd_cluster.model.cuda import attention, attention_decode
from pd_cluster.model.cuda.plan import SPLIT_KEYS, plan_decode
from pd_cluster.types import Order, Request
from tests.support.triton_attention import ANY, LAYER, NUM_LAYERS, configs, difference, metadata

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 2, 1, 16, 32


@contextmanager
def noted_sweeps() -> Iterator[list[tuple[int, int]]]:
    """Yields (worker, offset of the row's table) of each sweep over keys."""
    sweep: Any = attention_decode.sweep
    found: list[tuple[int, int]] = []

    def noting(*given: Any, **options: Any) -> Any:
        address = int(given[10].handle.data.item())
        found.append((int(interpreter_builder.grid_idx[1]), address))
        return sweep(*given, **options)

    attention_decode.sweep = noting
    try:
        yield found
    finally:
        attention_decode.sweep = sweep


def decode_batch(lens: list[int]) -> ForwardBatch:
    """Returns rows of one query each over a pool of random numbers."""
    counts = [-(-length // BLOCK_SIZE) for length in lens]
    pool = KVPool(KVLayout(NUM_LAYERS, NUM_KV_HEADS, keys_and_values(HEAD_DIM), BLOCK_SIZE, "float32"), sum(counts) + 1)
    pool.data.normal_(generator=torch.Generator().manual_seed(3))
    blocks = torch.randperm(pool.num_blocks, generator=torch.Generator().manual_seed(4)).tolist()
    chunks = []
    for at, (length, count) in enumerate(zip(lens, counts, strict=True)):
        table, blocks = blocks[:count], blocks[count:]
        request = Request(str(at), Order([0] * length, ANY), num_computed_tokens=length - 1, block_table=table)
        chunks.append((request, 1))
    return build_batch(chunks, pool)


def attended(
    batch: ForwardBatch, query: torch.Tensor, longest: int, num_sms: int, split_keys: int, scoring: sdpa.Scoring
) -> torch.Tensor:
    plan = plan_decode(len(query), longest, NUM_KV_HEADS, configs(NUM_HEADS, keys=32), num_sms, split_keys)
    return attention.attend(query, *batch.pool.layer(LAYER), metadata(batch, plan), plan, scoring)


def long_among_short(lens: list[int], window: int | None, num_sms: int, split_keys: int = SPLIT_KEYS) -> dict[str, Any]:
    """Decodes all rows; returns how far they are from the reference, whether the longest has the same bits alone,
    and for each row the number of its splits and of the programs that worked on it; for each program its splits.
    """
    torch.manual_seed(5)
    scoring = sdpa.Scoring(0.3, window)
    batch = decode_batch(lens)
    query = torch.randn(len(lens), NUM_HEADS, HEAD_DIM)
    k, v = torch.randn(2, len(lens), NUM_KV_HEADS, HEAD_DIM)
    expected = sdpa.write_and_attend(LAYER, query.transpose(0, 1), k, v, batch, scoring)
    with noted_sweeps() as sweeps:
        together = attended(batch, query, max(lens), num_sms, split_keys, scoring)
    at = lens.index(max(lens))
    start, stop = batch.table_starts[at : at + 2].tolist()
    request = Request(
        "alone",
        Order([0] * lens[at], ANY),
        num_computed_tokens=lens[at] - 1,
        block_table=batch.block_table[start:stop].tolist(),
    )
    alone = attended(
        build_batch([(request, 1)], batch.pool), query[at : at + 1], lens[at], num_sms, split_keys, scoring
    )
    base = batch.block_table.data_ptr()
    rows = {base + 4 * start: at for at, start in enumerate(batch.table_starts.tolist()[:-1])}
    workers: list[list[int]] = [[] for _ in lens]
    load: dict[int, int] = {}
    for worker, address in sweeps:
        workers[rows[address]].append(worker)
        load[worker] = load.get(worker, 0) + 1
    return {
        "difference": difference(together, expected),
        "is_same_alone": torch.equal(alone[0], together[at]),
        "splits": [len(each) for each in workers],
        "programs": [len(set(each)) for each in workers],
        "load": list(load.values()),
    }
