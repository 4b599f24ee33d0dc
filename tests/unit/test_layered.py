"""Layer-major pools store, transfer and swap the same content as block-major ones."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pd_cluster.devices.device import Device
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.layer_major import LayerMajor
from pd_cluster.kv.pack import pack, unpack
from pd_cluster.kv.pool_memory import Move
from pd_cluster.kv.pool_route import PoolRoute
from pd_cluster.kv.swap_space import SwapSpace
from pd_cluster.wire import KVPiece

LAYOUT = KVLayout(num_layers=3, num_kv_heads=4, planes=keys_and_values(8), block_size=4, dtype="float32")
NUM_BLOCKS = 6
ROUTES = {
    "verbatim": PoolRoute(LAYOUT, LAYOUT),
    "larger blocks": PoolRoute(LAYOUT, replace(LAYOUT, block_size=8)),
    "fewer heads": PoolRoute(LAYOUT, replace(LAYOUT, tp_size=2, tp_rank=1)),
    "in 16 bits": PoolRoute(LAYOUT, replace(LAYOUT, dtype="float16")),
    "int8": PoolRoute(LAYOUT, LAYOUT, wants_int8=True),
}


def by_layers(pool: KVPool) -> LayerMajor:
    """Returns a layer-major pool with the same content."""
    layers = [pool.data[:, i].transpose(0, 1).contiguous() for i in range(pool.layout.num_layers)]
    return LayerMajor(pool.layout, layers)


def filled(layout: KVLayout) -> KVPool:
    pool = KVPool(layout, NUM_BLOCKS)
    pool.data.normal_()
    return pool


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("layers", [(0, 3), (1, 2)])
def test_a_payload_is_the_same_from_either_and_lands_the_same_in_either(name: str, layers: tuple[int, int]) -> None:
    route = ROUTES[name]
    source, target = filled(route.source), filled(route.target)
    copy = by_layers(target)
    piece = KVPiece(4, 8, layers[0], layers[1], [5, 2])  # tokens 4 to 12
    payload = pack(source.memory, piece, route)
    assert torch.equal(pack(by_layers(source), piece, route), payload)
    assert len(payload) == route.payload_nbytes(piece)
    into = [3, 0] if route.target.block_size == 4 else [1, 4]
    unpack(payload, piece, route, target.memory, into)
    unpack(payload, piece, route, copy, into)
    for i, layer in enumerate(copy.layers):
        assert torch.equal(layer, target.data[:, i].transpose(0, 1))


class WritesNote(TorchDispatchMode):
    """Records indexed writes as (tensor, dimension)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[torch.Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "aten::index_copy_":
            self.found.append((args[0], args[1]))
        elif name in ("aten::index_put_", "aten::_index_put_impl_"):
            self.found.append((args[0], [each is not None for each in args[1]].index(True)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ROUTES)
def test_what_lands_or_moves_is_written_along_the_first_dimension_of_contiguous_memory(name: str) -> None:
    """Writes along another dimension, or to parts of rows, would make NPUs copy the whole layer out and back."""
    route = ROUTES[name]
    source = filled(route.source)
    target = KVPool(route.target, NUM_BLOCKS)
    memory = by_layers(target)
    target.memory = memory
    piece = KVPiece(4, 8, 1, 2, [5, 2])
    space = SwapSpace(target, 2)
    with WritesNote() as writes:
        unpack(pack(source.memory, piece, route), piece, route, memory, [3, 0])
        memory.copy_from(by_layers(filled(route.target)), KVPiece(0, 4, 0, 3, [1]), [2])
        space.move([("copy", 0, 1), ("out", 0, 0), ("in", 0, 2)])
    assert writes.found
    assert all(dim == 0 and tensor.is_contiguous() for tensor, dim in writes.found)


@pytest.mark.parametrize("seed", range(12))
def test_swapping_moves_the_same_blocks(seed: int) -> None:
    """Moves in one batch equal moves one by one, even if blocks are released and taken again within a step."""
    rng = random.Random(seed)
    plain = filled(LAYOUT)
    layered = KVPool(LAYOUT, NUM_BLOCKS)
    layered.memory = by_layers(plain)
    spaces = SwapSpace(plain, 4), SwapSpace(layered, 4)
    for space in spaces:
        space.move([("out", block, block) for block in range(4)])
    moves: list[tuple[Move, int, int]] = []
    for kind in rng.choices(("copy", "out", "in"), (8, 1, 1), k=12):
        source, target = rng.sample(range(NUM_BLOCKS), 2)
        moves.append((kind, source % 4 if kind == "in" else source, target % 4 if kind == "out" else target))
        spaces[0].move(moves[-1:])
    spaces[1].move(moves)
    for block in range(NUM_BLOCKS):
        assert torch.equal(layered.block(block), plain.block(block))
        assert torch.equal(layered.layer(1)[0][block], plain.layer(1)[0][block])


def test_on_an_npu_a_pool_lies_by_layers_that_are_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "torch_name", "cpu")
    pool = KVPool(LAYOUT, NUM_BLOCKS, Device("npu", 0))
    assert isinstance(pool.memory, LayerMajor)
    keys, values = pool.layer(2)
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert keys.shape == (NUM_BLOCKS + 3, 4, 4, 8)
    assert pool.block(pool.probe_block).any()
    pool.clear([pool.probe_block])
    assert not pool.block(pool.probe_block).any()
    assert not pool.block(pool.landing_probe_block).any()
