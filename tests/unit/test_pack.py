"""Pieces of KV cache between pools of any block size and dtype, against a per-token reference."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from pd_cluster.errors import LinkError
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import KVPool, probe_content
from pd_cluster.kv.kv_vectors import convert, encode
from pd_cluster.kv.pack import pack, unpack
from pd_cluster.kv.pool_compatibility import check_pair
from pd_cluster.kv.pool_memory import runs
from pd_cluster.kv.pool_route import PoolRoute
from pd_cluster.wire import KVPiece

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, planes=keys_and_values(8), block_size=4, dtype="float32")
NUM_BLOCKS = 24
PAIRS = [
    ({}, {}),
    ({}, {"block_size": 8}),
    ({"block_size": 6}, {"block_size": 4}),
    ({}, {"dtype": "bfloat16"}),
    ({"dtype": "float16"}, {"dtype": "float32"}),
    ({"dtype": "bfloat16", "block_size": 2}, {"dtype": "float16", "block_size": 5}),
    ({"dtype": "int8"}, {"dtype": "int8"}),
    ({"dtype": "int4", "block_size": 6}, {"dtype": "int4", "block_size": 4}),
    ({"dtype": "float16"}, {"dtype": "int8", "block_size": 8}),
    ({"dtype": "fp8_e4m3"}, {"dtype": "float32"}),
    ({"dtype": "int8"}, {"dtype": "int4", "block_size": 3}),
]


def random_pool(layout: KVLayout, seed: int) -> KVPool:
    pool = KVPool(layout, NUM_BLOCKS)
    numbers = torch.randn((*pool.data.shape[:-1], layout.head_dim), generator=torch.Generator().manual_seed(seed))
    pool.data.copy_(encode(numbers, layout.dtype))
    return pool


def token(data: torch.Tensor, block_size: int, table: list[int], position: int, layer: int) -> torch.Tensor:
    """Returns one token's keys and values, [2, heads, head_dim]."""
    return data[table[position // block_size], layer, :, position % block_size]


def random_piece(
    rng: random.Random, source: KVLayout, target: KVLayout, is_verbatim: bool
) -> tuple[KVPiece, list[int]]:
    """Draws a piece of a prompt, and the target's table for the whole prompt."""
    num_tokens = rng.randrange(1, 40)
    source_table = rng.sample(range(NUM_BLOCKS), source.num_blocks_for(num_tokens))
    target_table = rng.sample(range(NUM_BLOCKS), target.num_blocks_for(num_tokens))
    start = rng.randrange(num_tokens)
    if is_verbatim:
        start -= start % source.block_size
    stop = rng.randrange(start, num_tokens) + 1
    first_layer = rng.randrange(source.num_layers)
    num_layers = rng.randrange(first_layer, source.num_layers) + 1 - first_layer
    ids = source_table[start // source.block_size : source.num_blocks_for(stop)]
    return KVPiece(start, stop - start, first_layer, num_layers, ids), target_table


@pytest.mark.parametrize("wants_int8", [False, True])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_piece_arrives_and_nothing_else_changes(
    source: dict[str, object], target: dict[str, object], wants_int8: bool
) -> None:
    ours, theirs = dataclasses.replace(LAYOUT, **source), dataclasses.replace(LAYOUT, **target)  # type: ignore[arg-type]
    route = PoolRoute(ours, theirs, wants_int8)
    for seed in range(8):
        rng = random.Random(seed)
        piece, table = random_piece(rng, ours, theirs, route.is_verbatim)
        a, b = random_pool(ours, seed), random_pool(theirs, seed + 100)
        before = b.data.clone()
        payload = pack(a.memory, piece, route)
        assert len(payload) == route.payload_nbytes(piece)
        size = theirs.block_size
        into = table[piece.first_token // size : theirs.num_blocks_for(piece.stop_token)]
        unpack(payload, piece, route, b.memory, into)
        first = piece.first_token // ours.block_size * ours.block_size
        for position in range(piece.first_token, piece.stop_token):
            for layer in range(piece.first_layer, piece.stop_layer):
                sent = token(a.data, ours.block_size, piece.block_ids, position - first, layer)
                expected = convert(convert(sent, ours.dtype, route.wire_dtype), route.wire_dtype, theirs.dtype)
                assert torch.equal(token(b.data, size, table, position, layer), expected)
                token(before, size, table, position, layer).copy_(expected)
        if not route.is_verbatim:  # verbatim, whole blocks are sent, including slots after the last token
            assert torch.equal(before, b.data), "something outside the piece was written"


def test_what_travels_is_the_narrower_dtype() -> None:
    """The narrower dtype is sent. A transport that reads the pool directly does not use int8, and stays exact."""
    half = dataclasses.replace(LAYOUT, dtype="float16")
    assert PoolRoute(LAYOUT, half).wire_dtype == PoolRoute(half, LAYOUT).wire_dtype == "float16"
    assert PoolRoute(LAYOUT, LAYOUT, wants_int8=True, one_sided=True).precision == ""
    assert PoolRoute(LAYOUT, LAYOUT, wants_int8=True).precision == "int8"
    assert PoolRoute(LAYOUT, dataclasses.replace(LAYOUT, dtype="bfloat16")).precision == "float32"


def test_runs_of_blocks_are_not_copied() -> None:
    pool = random_pool(LAYOUT, 1)
    payload = pack(pool.memory, KVPiece(0, 12, 0, 3, [4, 5, 6]), PoolRoute(LAYOUT, LAYOUT))
    assert payload.data_ptr() == pool.data[4].data_ptr()
    assert runs([3, 4, 5, 9]) == [(3, 3), (9, 1)]
    assert runs([]) == []
    assert runs([2, 1]) == [(2, 1), (1, 1)]


def test_the_probe_is_the_same_number_in_every_dtype() -> None:
    exact = probe_content(LAYOUT, 5)
    for dtype in ("float32", "float16", "bfloat16"):
        assert torch.equal(probe_content(dataclasses.replace(LAYOUT, dtype=dtype), 5).float(), exact)
    assert not torch.equal(probe_content(LAYOUT, 6), exact)


def test_pairs_that_cannot_work_are_refused_by_name() -> None:
    changes: dict[str, Any] = {"num_layers": 4, "num_kv_heads": 4, "k_head_dim": keys_and_values(4)}
    for name, value in changes.items():
        theirs = dataclasses.replace(LAYOUT, **{"planes" if name == "k_head_dim" else name: value})
        with pytest.raises(LinkError, match=name) as caught:
            check_pair(LAYOUT, theirs)
        assert not caught.value.retry
    change: dict[str, Any]
    for change in ({}, {"block_size": 8}, {"dtype": "float16"}):
        check_pair(LAYOUT, dataclasses.replace(LAYOUT, **change))
    for change in ({"block_size": 0}, {"block_size": -4}, {"block_size": 1 << 40}, {"dtype": "int3"}):
        with pytest.raises(LinkError, match="is invalid"):
            check_pair(dataclasses.replace(LAYOUT, **change), LAYOUT)


def test_head_ranges_cover_all_heads() -> None:
    """Heads are split if there are enough for all ranks, and replicated otherwise."""

    def ranges(num_kv_heads: int, tp_size: int) -> list[tuple[int, int]]:
        layout = dataclasses.replace(LAYOUT, num_kv_heads=num_kv_heads, tp_size=tp_size)
        return [dataclasses.replace(layout, tp_rank=rank).head_range for rank in range(tp_size)]

    assert ranges(8, 2) == [(0, 4), (4, 8)]
    assert ranges(2, 4) == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert ranges(2, 2) == [(0, 1), (1, 2)]
