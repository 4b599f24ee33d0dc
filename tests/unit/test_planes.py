"""Pools with planes of different widths, as for latents and their rope parts, over every transport."""

from __future__ import annotations

import threading
from dataclasses import replace

import msgspec
import pytest
import torch

from pd_cluster import wire
from pd_cluster.errors import LinkError
from pd_cluster.kv.block_major import HostBlocks
from pd_cluster.kv.kv_layout import KVLayout, token_nbytes_of
from pd_cluster.kv.kv_pool import KVPool, shape_of
from pd_cluster.kv.layer_major import LayerMajor
from pd_cluster.kv.pack import pack, unpack
from pd_cluster.kv.pool_compatibility import check_pair
from pd_cluster.kv.pool_memory import TORCH_DTYPES, Memory
from pd_cluster.kv.pool_route import PoolRoute
from pd_cluster.kv.swap_space import SwapSpace
from pd_cluster.wire import KVPiece, Plane
from tests.support.fake_device import FakeModule, install
from tests.support.transports import NUM_BLOCKS, WAIT_S, Pair

PLANES = (Plane("latent", 512), Plane("rope", 64))
LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, planes=PLANES, block_size=4, dtype="float32")
# only some layers have the third plane
MIXED = replace(LAYOUT, planes=(*PLANES, Plane("index", 32)), plane_layers=((0, 1, 2), (0, 1, 2), (0, 2)))
LAST = 8  # tokens 4 to 12 of a prompt are sent


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
    """Returns the sent tokens' content in each plane, read one by one from these blocks."""
    size = layout.block_size
    places = [(table[at // size], at % size) for at in range(4, 12)]
    return [torch.stack([plane[block, offset] for block, offset in places]) for plane in memory.planes(layer)]


def test_sizes_are_sums_over_planes() -> None:
    assert LAYOUT.token_nbytes == 3 * (512 + 64) * 4
    assert LAYOUT.block_nbytes == 4 * LAYOUT.token_nbytes
    pool = KVPool(LAYOUT, 2)
    assert [plane.shape for plane in pool.memory.planes(1)] == [(5, 4, 1, 512), (5, 4, 1, 64)]
    assert pool.nbytes == 2 * LAYOUT.block_nbytes
    assert shape_of(LAYOUT, 7) == (7, 3 * 4 * 576)
    for layout in (LAYOUT, MIXED):
        assert KVLayout.from_info(layout.to_info()) == layout
        packed = msgspec.msgpack.encode(layout.to_info())
        assert msgspec.msgpack.decode(packed, type=wire.LayoutInfo) == layout.to_info()


def test_a_layer_without_a_plane_has_no_place_for_it() -> None:
    assert MIXED.token_nbytes == (3 * (512 + 64) + 2 * 32) * 4
    assert token_nbytes_of(MIXED.to_info(), MIXED.to_info()) == MIXED.token_nbytes
    assert [(first, stop, len(planes)) for first, stop, planes in MIXED.alike] == [(0, 1, 3), (1, 2, 2), (2, 3, 3)]
    assert MIXED.most_layer_nbytes == 4 * (512 + 64 + 32) * 4
    assert [MIXED.layers_nbytes(0, stop) for stop in range(4)] == [0, 9728, 9728 + 9216, MIXED.block_nbytes]
    pool = KVPool(MIXED, 2)
    assert [len(pool.memory.planes(layer)) for layer in range(3)] == [3, 2, 3]
    assert pool.memory.planes(2)[2].shape == (5, 4, 1, 32)
    assert shape_of(MIXED, 7) == (7, 4 * (3 * 576 + 2 * 32))


@pytest.mark.parametrize(("layout", "widths"), [(LAYOUT, [512, 64] * 3), (MIXED, [512, 64, 32, 512, 64, 512, 64, 32])])
def test_planes_share_no_memory_and_leave_none(layout: KVLayout, widths: list[int]) -> None:
    pool = KVPool(layout, 2)
    at = 1.0
    for layer in range(3):
        for plane in pool.memory.planes(layer):
            plane.fill_(at)
            at += 1
    values, counts = pool.memory.parts[0].unique(return_counts=True)
    assert values.tolist() == [1.0 + i for i in range(len(widths))]
    assert counts.tolist() == [5 * 4 * width for width in widths]


CHANGES: dict[str, dict[str, object]] = {
    "verbatim": {},
    "larger blocks": {"block_size": 8},
    "in 16 bits": {"dtype": "bfloat16"},
    "another rank": {"tp_size": 2, "tp_rank": 1},
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("wants_int8", [False, True])
@pytest.mark.parametrize("layout", [LAYOUT, MIXED], ids=["alike", "mixed"])
def test_a_piece_arrives_in_either_way_of_lying(name: str, wants_int8: bool, layout: KVLayout) -> None:
    target_layout = replace(layout, **CHANGES[name])  # type: ignore[arg-type]
    route = PoolRoute(layout, target_layout, wants_int8)
    source = filled(layout, 1)
    layers = LayerMajor(layout, [torch.zeros(shape) for shape in LayerMajor.shapes(layout, len(source.memory))])
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
            sent = tokens_of(source.memory, layout, [0, 5, 2], layer)
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
@pytest.mark.parametrize(("layout", "block_size"), [(LAYOUT, 4), (LAYOUT, 8), (MIXED, 4), (MIXED, 8)])
def test_blocks_travel_over_every_transport(
    way: str, layout: KVLayout, block_size: int, request: pytest.FixtureRequest
) -> None:
    kind, _, name = way.rpartition(" ")
    if kind:
        request.getfixturevalue("gpu")
    into = replace(layout, block_size=block_size)
    others = set(threading.enumerate())  # threads of earlier tests may still be ending
    pair = Pair(name, layout, kind=kind or "cpu", into=into)  # type: ignore[arg-type]
    piece = wire.KVPiece(4, LAST, 0, 3, [7, 11])
    table = [0, 6, 2] if block_size == 4 else [6, 2]
    pair.move(piece, table[4 // block_size :])
    for layer in range(3):
        sent = tokens_of(pair.source.memory, layout, [0, 7, 11], layer)
        found = tokens_of(pair.target.memory, into, table, layer)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, sent, strict=True))
    pair.close()
    left = [each for each in threading.enumerate() if each.name == "kv-meeting" and each not in others]
    assert not left, f"threads did not end within {WAIT_S:g} s"


@pytest.mark.parametrize("layout", [LAYOUT, MIXED])
def test_blocks_swap_out_and_in(layout: KVLayout) -> None:
    pool = filled(layout, 3)
    before = pool.block(4)
    SwapSpace(pool, 2).move([("out", 4, 1), ("copy", 5, 4), ("in", 1, 5)])
    assert torch.equal(pool.block(5), before)
    assert not torch.equal(pool.block(4), before)


def test_pools_of_other_planes_are_no_pair() -> None:
    with pytest.raises(LinkError, match="planes is latent, rope on the prefill instance and k, v on the decode"):
        check_pair(LAYOUT, replace(LAYOUT, planes=(Plane("k", 512), Plane("v", 64))))
    with pytest.raises(LinkError, match="rope_head_dim is 64 on the prefill instance and 32"):
        check_pair(LAYOUT, replace(LAYOUT, planes=(Plane("latent", 512), Plane("rope", 32))))
    with pytest.raises(LinkError, match=r"plane_layers is \(\(0, 1, 2\), .* on the prefill instance and \(\) on"):
        check_pair(MIXED, replace(MIXED, plane_layers=()))
    for layers in (((0, 1), (0, 1), (0,)), ((0, 1, 2),) * 2, ((0, 1, 2), (0, 2, 1), (0,)), ((0, 1, 2), (3,), (0,))):
        broken = replace(MIXED, plane_layers=layers)
        with pytest.raises(LinkError, match="is invalid"):
            check_pair(broken, broken)
    for planes in ((), (Plane("latent", 0),)):
        broken = replace(LAYOUT, planes=planes)
        with pytest.raises(LinkError, match="is invalid"):
            check_pair(broken, broken)
