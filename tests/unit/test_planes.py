"""Pools whose planes have different widths, as a latent and its rope part have, travel every way that pools do."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from pd_cluster import wire
from pd_cluster.errors import LinkError
from pd_cluster.kv.block_major import HostBlocks
from pd_cluster.kv.layer_major import LayerMajor
from pd_cluster.kv.layout import KVLayout, Route, check_pair
from pd_cluster.kv.memory import TORCH_DTYPES, Memory
from pd_cluster.kv.pack import pack, unpack
from pd_cluster.kv.pool import KVPool, shape_of
from pd_cluster.kv.swap import SwapSpace
from pd_cluster.wire import KVPiece, Plane
from tests.support.fake_device import FakeModule, install
from tests.support.transports import NUM_BLOCKS, WAIT_S, Pair

PLANES = (Plane("latent", 512), Plane("rope", 64))
LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, planes=PLANES, block_size=4, dtype="float32")
LAST = 8  # tokens 4 to 12 of a prompt travel


def filled(layout: KVLayout, seed: int) -> KVPool:
    pool = KVPool(layout, NUM_BLOCKS)
    fill(pool.memory, layout, seed)
    return pool


def fill(memory: Memory, layout: KVLayout, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in range(layout.num_layers):
        for plane in memory.planes(layer):
            plane.copy_(torch.randn(plane.shape, generator=generator))


def tokens_of(memory: Memory, layout: KVLayout, table: list[int], layer: int) -> list[torch.Tensor]:
    """Each plane's tokens 4 to 12 of a prompt in these blocks, one by one."""
    size = layout.block_size
    places = [(table[at // size], at % size) for at in range(4, 12)]
    return [torch.stack([plane[block, offset] for block, offset in places]) for plane in memory.planes(layer)]


def test_sizes_are_sums_over_planes() -> None:
    assert LAYOUT.token_nbytes == 3 * (512 + 64) * 4
    assert LAYOUT.block_nbytes == 4 * LAYOUT.token_nbytes
    pool = KVPool(LAYOUT, 2)
    assert [plane.shape for plane in pool.memory.planes(1)] == [(5, 4, 1, 512), (5, 4, 1, 64)]
    assert pool.nbytes == 2 * LAYOUT.block_nbytes
    assert shape_of(LAYOUT, 7) == (7, 3, 4 * 576)
    assert KVLayout.from_info(LAYOUT.to_info()) == LAYOUT


def test_planes_share_no_memory_and_leave_none() -> None:
    pool = KVPool(LAYOUT, 2)
    at = 1.0
    for layer in range(3):
        for plane in pool.memory.planes(layer):
            plane.fill_(at)
            at += 1
    values, counts = pool.memory.parts[0].unique(return_counts=True)
    assert values.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert counts.tolist() == [5 * 4 * 512, 5 * 4 * 64] * 3


CHANGES: dict[str, dict[str, object]] = {
    "verbatim": {},
    "larger blocks": {"block_size": 8},
    "in 16 bits": {"dtype": "bfloat16"},
    "another rank": {"tp_size": 2, "tp_rank": 1},
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("wants_int8", [False, True])
def test_a_piece_arrives_in_either_way_of_lying(name: str, wants_int8: bool) -> None:
    target_layout = replace(LAYOUT, **CHANGES[name])  # type: ignore[arg-type]
    route = Route(LAYOUT, target_layout, wants_int8)
    source = filled(LAYOUT, 1)
    layers = LayerMajor(LAYOUT, [torch.zeros(shape) for shape in LayerMajor.shapes(LAYOUT, len(source.memory))])
    whole = KVPiece(0, 0, 0, 3, list(range(len(source.memory))))
    layers.scatter(source.memory.gather(whole), whole, whole.block_ids)
    piece, size = KVPiece(4, LAST, 1, 2, [5, 2]), target_layout.block_size
    payload = pack(source.memory, piece, route)
    assert torch.equal(pack(layers, piece, route), payload)
    assert len(payload) == route.payload_nbytes(piece)
    table = [9, 3, 0] if size == 4 else [1, 4]
    into = table[4 // size :]
    targets: list[Memory] = [HostBlocks(target_layout, [zeros(target_layout, HostBlocks)[0]])]
    targets.append(LayerMajor(target_layout, zeros(target_layout, LayerMajor)))
    for target in targets:
        unpack(payload, piece, route, target, into)
        assert not any(plane.any() for plane in target.planes(0))
        for layer in (1, 2):
            sent = tokens_of(source.memory, LAYOUT, [0, 5, 2], layer)
            found = tokens_of(target, target_layout, table, layer)
            for ours, theirs in zip(found, sent, strict=True):
                if wants_int8:
                    step = theirs.abs().amax(-1, keepdim=True) / 254
                    assert ((ours.float() - theirs).abs() <= step * 1.01 + (0.05 if name == "in 16 bits" else 0)).all()
                else:
                    assert torch.equal(ours, theirs.to(ours.dtype))


def zeros(layout: KVLayout, way: type[HostBlocks | LayerMajor]) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=TORCH_DTYPES[layout.dtype]) for shape in way.shapes(layout, NUM_BLOCKS)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    return install(monkeypatch)


@pytest.mark.parametrize("way", ["local", "shm", "dist", "cuda local", "cuda ipc", "cuda nccl"])
@pytest.mark.parametrize("block_size", [4, 8])
def test_blocks_travel_over_every_transport(way: str, block_size: int, request: pytest.FixtureRequest) -> None:
    kind, _, name = way.rpartition(" ")
    if kind:
        request.getfixturevalue("gpu")
    into = replace(LAYOUT, block_size=block_size)
    others = set(threading.enumerate())  # earlier tests' threads may still be on their way out
    pair = Pair(name, LAYOUT, kind=kind or "cpu", into=into)  # type: ignore[arg-type]
    piece = wire.KVPiece(4, LAST, 0, 3, [7, 11])
    table = [0, 6, 2] if block_size == 4 else [6, 2]
    pair.move(piece, table[4 // block_size :])
    for layer in range(3):
        sent = tokens_of(pair.source.memory, LAYOUT, [0, 7, 11], layer)
        found = tokens_of(pair.target.memory, into, table, layer)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, sent, strict=True))
    pair.close()
    left = [each for each in threading.enumerate() if each.name == "kv-meeting" and each not in others]
    assert not left, f"within {WAIT_S:g} s"


def test_blocks_swap_out_and_in() -> None:
    pool = filled(LAYOUT, 3)
    before = pool.block(4)
    SwapSpace(pool, 2).move([("out", 4, 1), ("copy", 5, 4), ("in", 1, 5)])
    assert torch.equal(pool.block(5), before)
    assert not torch.equal(pool.block(4), before)


def test_pools_of_other_planes_are_no_pair() -> None:
    with pytest.raises(LinkError, match="planes is latent, rope on the prefill instance and k, v on the decode"):
        check_pair(LAYOUT, replace(LAYOUT, planes=(Plane("k", 512), Plane("v", 64))))
    with pytest.raises(LinkError, match="rope_head_dim is 64 on the prefill instance and 32"):
        check_pair(LAYOUT, replace(LAYOUT, planes=(Plane("latent", 512), Plane("rope", 32))))
    for planes in ((), (Plane("latent", 0),)):
        broken = replace(LAYOUT, planes=planes)
        with pytest.raises(LinkError, match="makes no sense"):
            check_pair(broken, broken)
