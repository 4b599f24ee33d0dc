"""Groups of layers: planes with different numbers of heads, layers of pools, and steps over several pools."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pd_cluster.engine.ranks.follower import _input_of
from pd_cluster.engine.ranks.lead_runner import message_of
from pd_cluster.engine.ranks.rank_channel import encode
from pd_cluster.errors import LinkError
from pd_cluster.kv.block_major import DeviceBlocks, HostBlocks
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values, lanes, num_lanes, token_nbytes_of
from pd_cluster.kv.kv_pool import NUM_EXTRA_BLOCKS, KVPool, probe_content
from pd_cluster.kv.layer_major import LayerMajor
from pd_cluster.kv.pack import pack, unpack
from pd_cluster.kv.pool_compatibility import check_groups
from pd_cluster.kv.pool_memory import Memory
from pd_cluster.kv.pool_route import PoolRoute
from pd_cluster.kv.swap_space import SwapSpace
from pd_cluster.model.inputs.forward_batch import batch_of, build_batch, sizes_of_blocks
from pd_cluster.model.inputs.state_rows import Segment
from pd_cluster.model.inputs.step_input import StepInput, keeps_of, step_input
from pd_cluster.types import Request, RequestSpec, Sampling
from pd_cluster.wire import KVPiece, Plane

# A gated delta rule with 8 value and 2 key heads, and B and C of a Mamba-2 layer with one group.
PLANES = (
    Plane("state", 12),
    Plane("conv_q", 9, 2),
    Plane("conv_k", 9, 2),
    Plane("conv_v", 15),
    Plane("conv_b", 6, 1),
)
STATES = KVLayout(3, 8, PLANES, 1, "float32", rule="state", layers=(0, 1, 4))
HEADS = KVLayout(2, 2, keys_and_values(4), 4, "float32", layers=(2, 3))
NUM_BLOCKS = 4
Way = type[HostBlocks | DeviceBlocks | LayerMajor]


def whole(seed: int = 0) -> dict[tuple[int, int], torch.Tensor]:
    """Returns a whole state: (layer, plane) -> [heads, width]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(STATES.num_heads_of(plane), plane.width) for plane in PLANES]
    pairs = [(layer, at) for layer in range(3) for at in range(len(PLANES))]
    return {(layer, at): torch.randn(shapes[at], generator=generator) for layer, at in pairs}


def memory(layout: KVLayout, way: Way) -> Memory:
    return way(layout, [torch.zeros(shape) for shape in way.shapes(layout, NUM_BLOCKS)])


def check(found: Memory, layout: KVLayout, block: int, content: dict[tuple[int, int], torch.Tensor]) -> None:
    for layer in range(3):
        for at, plane in enumerate(found.planes(layer)):
            expected = content[layer, at][slice(*layout.head_range_of(PLANES[at]))]
            assert torch.equal(plane[block, 0], expected), (layout.tp_rank, layer, PLANES[at].name)
            others = [each for each in range(NUM_BLOCKS) if each != block]
            assert not plane[others].any(), "another block has changed"


def put(into: Memory, layout: KVLayout, block: int, content: dict[tuple[int, int], torch.Tensor]) -> None:
    for (layer, at), numbers in content.items():
        into.planes(layer)[at][block, 0] = numbers[slice(*layout.head_range_of(PLANES[at]))]


@pytest.mark.parametrize("target_size", [1, 2, 4])
@pytest.mark.parametrize("source_size", [1, 2, 4])
@pytest.mark.parametrize("ways", [(HostBlocks, LayerMajor), (LayerMajor, HostBlocks), (DeviceBlocks, DeviceBlocks)])
def test_a_state_arrives_whole_on_other_numbers_of_ranks(
    source_size: int, target_size: int, ways: tuple[Way, ...]
) -> None:
    """Each target rank gets every head of every plane once, even if several senders have it."""
    content = whole()
    source, target = replace(STATES, tp_size=source_size), replace(STATES, tp_size=target_size)
    senders = [memory(source.of_rank(rank), ways[0]) for rank in range(source_size)]
    receivers = [memory(target.of_rank(rank), ways[1]) for rank in range(target_size)]
    for rank, each in enumerate(senders):
        put(each, source.of_rank(rank), 3, content)
    nbytes = 0
    for lane in lanes(source, target):
        route = PoolRoute(source.of_rank(lane.source_rank), target.of_rank(lane.target_rank), wants_int8=True)
        assert (route.wire_dtype, route.precision) == ("float32", "")  # states are never quantized
        for first in range(3):  # layer by layer, as large states are sent
            piece = KVPiece(0, 1, first, 1, [3])
            payload = pack(senders[lane.source_rank], piece, route)
            assert len(payload) == route.payload_nbytes(piece)
            unpack(payload, piece, route, receivers[lane.target_rank], [1])
            nbytes += len(payload)
    for rank, each in enumerate(receivers):
        check(each, target.of_rank(rank), 1, content)
    assert nbytes == sum(target.of_rank(rank).block_nbytes for rank in range(target_size))


def test_planes_lie_one_behind_the_other_with_their_own_heads() -> None:
    """On each rank, sizes are sums over planes, and planes do not overlap."""
    for rank in range(4):
        layout = replace(STATES, tp_size=4, tp_rank=rank)
        assert layout.layer_numel(PLANES) == 2 * 12 + 9 + 9 + 2 * 15 + 6
        assert layout.head_range_of(PLANES[1]) == (rank // 2, rank // 2 + 1)
        found = memory(layout, HostBlocks)
        for at in range(3):
            for number, plane in enumerate(found.planes(at)):
                plane.fill_(10 * at + number + 1)
        values, counts = found.parts[0].unique(return_counts=True)
        assert len(values) == 15
        assert counts.tolist() == [NUM_BLOCKS * each for each in (24, 9, 9, 30, 6)] * 3
    assert token_nbytes_of(STATES.to_info(), STATES.to_info()) == STATES.block_nbytes
    assert num_lanes(replace(STATES, tp_size=2), [1, 2, 4, 3]) == 1 + 1 + 2 + 0


def test_a_pool_knows_its_layers_by_the_models_indices() -> None:
    with KVPool(STATES, NUM_BLOCKS) as pool:
        assert [pool.has_layer(layer_idx) for layer_idx in range(5)] == [True, True, False, False, True]
        assert [each.shape[2:] for each in pool.planes(4)] == [(8, 12), (2, 9), (2, 9), (8, 15), (1, 6)]
        assert torch.equal(pool.block(pool.probe_block), probe_content(STATES, pool.probe_seed))
        pool.planes(4)[1].fill_(3)
        assert pool.memory.planes(2)[1].min() == 3
        with pytest.raises(KeyError):
            pool.planes(2)
    with KVPool(HEADS, NUM_BLOCKS) as pool:
        keys, values = pool.layer(3)
        assert keys.shape == values.shape == (NUM_BLOCKS + NUM_EXTRA_BLOCKS, 4, 2, 4)


@pytest.mark.parametrize("way", [HostBlocks, DeviceBlocks, LayerMajor])
@pytest.mark.parametrize("layout", [STATES, HEADS], ids=["states", "heads"])
def test_a_block_is_cleared_where_its_turn_comes(way: Way, layout: KVLayout) -> None:
    found = memory(layout, way)
    with KVPool(layout, NUM_BLOCKS) as pool:
        pool.memory = found
        for layer in range(layout.num_layers):
            for plane in found.planes(layer):
                plane.copy_(torch.arange(1.0, NUM_BLOCKS + 1).view(-1, 1, 1, 1).expand_as(plane))
        moves = [("copy", 1, 2), ("clear", 1, 1), ("copy", 1, 3), ("copy", 2, 1), ("clear", 2, 2)]
        SwapSpace(pool, 0).move(moves)  # type: ignore[arg-type]
        planes = [plane for layer in range(layout.num_layers) for plane in found.planes(layer)]
        assert all(plane[:, 0, 0, 0].tolist() == [1, 2, 0, 0] for plane in planes)
        assert all((plane == plane[:, :1, :1, :1]).all() for plane in planes), "a part of a block was not cleared"


def test_instances_of_other_groups_are_no_pair() -> None:
    window = replace(HEADS, num_layers=3, rule="window", window=8, layers=(0, 1, 4))
    check_groups([HEADS, STATES], [replace(HEADS, tp_size=2), replace(STATES, tp_size=4)])
    for ours, wrong in (
        ([HEADS], "groups of layers differ: the decode instance has no group that keeps a state; .* kind of device$"),
        (
            [HEADS, window],
            "the decode instance has no group that keeps a state and the prefill instance has no group that attends "
            "to the last 8 tokens; start both with .*, and both or neither with --kv-host-cache, a draft .*; "
            "an instance without these can have --disable-hybrid-kv-cache-manager instead$",
        ),
        ([STATES, HEADS], "groups of layers differ: their order differs;"),
        ([replace(HEADS, layers=(2, 4)), STATES], r"of group all differs: layers is \(2, 3\) on .* and \(2, 4\) on"),
        (
            [HEADS, replace(STATES, planes=(*PLANES[:1], Plane("conv_q", 9, 4), *PLANES[2:]))],
            "of group state differs: conv_q_num_heads is 2 on the prefill instance and 4 on",
        ),
    ):
        with pytest.raises(LinkError, match=wrong):
            check_groups([HEADS, STATES], ours)
    for broken in (
        replace(STATES, block_size=4),
        replace(STATES, layers=(0, 4, 1)),
        replace(STATES, planes=(*PLANES, Plane("conv_c", 6, 3))),
        replace(STATES, tp_size=3),
        replace(window, window=0),
    ):
        with pytest.raises(LinkError, match="is invalid"):
            check_groups([broken], [broken])
    with pytest.raises(LinkError, match="--block-size 512 of the decode instance is too large for layers with"):
        check_groups([window], [replace(window, block_size=512)])


WINDOW = replace(HEADS, rule="window", window=6, layers=(0, 5))
PADDING = 40  # the pools' number of blocks, and the id of the padding block


def three_pools() -> list[KVPool]:
    return [KVPool(layout, PADDING) for layout in (HEADS, WINDOW, STATES)]


def chunks_of() -> list[tuple[Request, int]]:
    """Returns chunks in the middle and at the beginning of a prompt, and of one token."""
    tables = (
        [[7, 3, 9, 30], [PADDING, 21, 2, 4], [5]],
        [[1, 2], [0, 1], [0]],
        [[11, 10], [PADDING, 39], [39]],
    )
    order = RequestSpec([*range(1, 16)], Sampling())
    nums = ((6, 8), (0, 5), (6, 1))
    return [
        (Request(f"{at}", order, tables=[list(each) for each in own], num_computed_tokens=start), num_tokens)
        for at, (own, (start, num_tokens)) in enumerate(zip(tables, nums, strict=True))
    ]


def test_each_group_has_its_own_places_in_a_step() -> None:
    pools, chunks = three_pools(), chunks_of()
    step = step_input(chunks, 4, further=sizes_of_blocks(pools[1:]))
    step = replace(step, keeps=keeps_of(chunks, [(chunks[1][0], 4, 17), (chunks[0][0], 14, 9), (chunks[0][0], 8, 8)]))
    batch = batch_of(step, pools[0], False, pools[1:])
    for group in (0, 1):
        slots, own = [], batch.of_group(group)
        for request, num_tokens in chunks:
            places = range(request.num_computed_tokens, request.num_computed_tokens + num_tokens)
            slots += [4 * request.tables[group][at // 4] + at % 4 for at in places]
        assert own.pool is pools[group]
        assert own.slot_mapping.tolist() == slots
        assert own.block_table.tolist() == [block for request, _ in chunks for block in request.tables[group]]
        assert own.table_starts.tolist() == [0, 4, 6, 8]
        assert [own is batch.of_layer(layer_idx) for layer_idx in (0, 2, 3, 5)] == [group, not group, not group, group]
    batch.of_layer(0).layer_written(0, 6)
    batch.of_layer(2).layer_written(2, None)
    assert (batch.layers_written, batch.windows) == ([0, 2], {6, None})
    assert batch.states is not None
    assert batch.states.pool is pools[2]
    assert batch.states.segments == (
        Segment(0, 2, 5, 8),
        Segment(2, 8, 5, 9),
        Segment(8, 12, 0, 17),
        Segment(12, 13, 0),
        Segment(13, 14, 39),
    )
    told_ranks = _input_of(message_of(step, False, False))
    for name in StepInput.__slots__:
        ours, theirs = getattr(step, name), getattr(told_ranks, name)
        assert np.array_equal(ours, theirs) if isinstance(ours, np.ndarray) else repr(ours) == repr(theirs), name


def test_a_step_of_one_group_is_as_it_was() -> None:
    chunks = chunks_of()
    step = step_input(chunks, 4)
    assert (step.further, step.keeps) == ((), None)
    message = encode(message_of(step, False, False))
    assert b"further" not in message
    assert b"keeps" not in message
    batch = batch_of(step, KVPool(HEADS, PADDING))
    assert batch.of_layer(3) is batch is batch.of_group(0)
    assert batch.states is None


@pytest.mark.parametrize("group", [1, 2])
def test_a_block_that_no_pool_has_is_refused(group: int) -> None:
    pools, chunks = three_pools(), chunks_of()
    chunks[1][0].tables[group][-1] = PADDING + 1
    with pytest.raises(ValueError, match=r"block tables hold \d+ blocks from \d to 41"):
        build_batch(chunks, pools[0], pools[1:])
    chunks[1][0].tables[group][-1] = 0
    step = step_input(chunks, 4, further=sizes_of_blocks(pools[1:]))
    with pytest.raises(ValueError, match="blocks from 41 to 41"):
        batch_of(replace(step, keeps=np.array([[0, 7, PADDING + 1]])), pools[0], False, pools[1:])
