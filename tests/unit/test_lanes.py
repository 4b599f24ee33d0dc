"""Lanes between instances of different tensor-parallel sizes: routes of heads, and when a transfer has landed."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter

import pytest
import torch

from pd_cluster import wire
from pd_cluster.engine.handover.links.lane_barrier import LaneBarrier
from pd_cluster.engine.ranks import rank_messages as to
from pd_cluster.engine.ranks.follower import ProgressQueue
from pd_cluster.errors import LinkError
from pd_cluster.kv.kv_layout import KVLayout, can_split_heads, keys_and_values, lanes, num_lanes
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.layer_groups import lanes_of, transfer_nbytes
from pd_cluster.kv.pack import pack, unpack
from pd_cluster.kv.pool_compatibility import check_pair
from pd_cluster.kv.pool_route import PoolRoute
from pd_cluster.transport.link_events import Arrived, Drained, Landed, LandFault, LinkEvent
from pd_cluster.types import TokenOutput
from pd_cluster.wire import KVPiece

LAYOUT = KVLayout(num_layers=2, num_kv_heads=4, planes=keys_and_values(4), block_size=4, dtype="float32")
SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
PAIRS = [
    (heads, p, d)
    for heads, p, d in itertools.product((1, 2, 3, 4, 6, 8), SIZES, SIZES)
    if can_split_heads(heads, p) and can_split_heads(heads, d)
]


def sides(heads: int, p: int, d: int) -> tuple[KVLayout, KVLayout]:
    layout = dataclasses.replace(LAYOUT, num_kv_heads=heads)
    return dataclasses.replace(layout, tp_size=p), dataclasses.replace(layout, tp_size=d)


def test_every_rank_gets_each_of_its_heads_once() -> None:
    for heads, p, d in PAIRS:
        source, target = sides(heads, p, d)
        found = lanes(source, target)
        assert found[0] == (0, 0, 0)
        assert len(found) == len(set(found))
        got: dict[int, list[int]] = {rank: [] for rank in range(d)}
        for lane in found:
            route = PoolRoute(source.of_rank(lane.source_rank), target.of_rank(lane.target_rank))
            assert route.num_heads > 0
            got[lane.target_rank] += range(*route.heads)
        for rank, mine in got.items():
            assert sorted(mine) == list(range(*target.of_rank(rank).head_range))


@pytest.mark.parametrize(("heads", "p", "d"), [(1, 4, 4), (2, 8, 4), (2, 4, 8), (4, 8, 8), (4, 16, 8)])
def test_replicated_heads_are_spread_over_their_sources(heads: int, p: int, d: int) -> None:
    """Replicated heads are divided evenly among the sources that have them."""
    source, target = sides(heads, p, d)
    load = Counter(lane.source_rank for lane in lanes(source, target))
    assert max(load.values()) == max(1, d // p)
    assert len(load) == min(p, d)


@pytest.mark.parametrize(("p", "d"), [(1, 2), (2, 1), (4, 8), (1, 1)])
@pytest.mark.parametrize("wants_int8", [False, True])
@pytest.mark.parametrize("block_size", [4, 6])
def test_a_prompt_goes_through_all_lanes(p: int, d: int, wants_int8: bool, block_size: int) -> None:
    """Each target rank gets its heads of the senders' content; nothing else changes."""
    source, target = sides(4, p, d)
    target = dataclasses.replace(target, block_size=block_size)
    rng = random.Random(p * 10 + d)
    whole = torch.randn(13, source.num_layers, 2, source.num_kv_heads, 4)  # [num_tokens, …]
    ids = rng.sample(range(8), source.num_blocks_for(13))
    into = rng.sample(range(8), target.num_blocks_for(13))
    pools = [KVPool(source.of_rank(rank), 8) for rank in range(p)]
    for pool in pools:
        for position, token in enumerate(whole):
            start, stop = pool.layout.head_range
            block = ids[position // source.block_size]
            pool.data[block, :, :, position % source.block_size] = token[:, :, start:stop]
    landed = [KVPool(target.of_rank(rank), 8) for rank in range(d)]
    for pool in landed:
        pool.data.fill_(-1.0)
    piece = KVPiece(0, 13, 0, source.num_layers, ids)
    for lane in lanes(source, target):
        route = PoolRoute(pools[lane.source_rank].layout, landed[lane.target_rank].layout, wants_int8)
        payload = pack(pools[lane.source_rank].memory, piece, route)
        assert len(payload) == route.payload_nbytes(piece)
        unpack(payload, piece, route, landed[lane.target_rank].memory, into)
    for pool in landed:
        start, stop = pool.layout.head_range
        for position, token in enumerate(whole):
            found = pool.data[into[position // block_size], :, :, position % block_size]
            assert torch.allclose(found, token[:, :, start:stop], atol=0.02 if wants_int8 else 0.0)
        others = [block for block in range(8) if block not in into]
        assert bool((pool.data[others] == -1.0).all())


def test_heads_that_cannot_be_spread_are_refused() -> None:
    with pytest.raises(LinkError, match="4 KV heads cannot be split over 3 ranks"):
        check_pair(*sides(4, 1, 3))
    check_pair(*sides(4, 2, 8))


@pytest.mark.parametrize(
    ("heads", "own", "others", "expected"),
    [
        (8, (2, 0), (), 0),
        (8, (2, 1), (2, 2, 2), 3),  # rank to rank
        (8, (1, 0), (2, 4), 6),
        (8, (4, 3), (1, 2), 2),
        (2, (4, 1), (4,), 1),  # two ranks have each head
        (8, (2, 0), (2, 3), 1),  # size 3 is refused
    ],
)
def test_a_rank_counts_its_lanes(heads: int, own: tuple[int, int], others: tuple[int, ...], expected: int) -> None:
    source, _ = sides(heads, own[0], 1)
    assert num_lanes(source.of_rank(own[1]), others) == expected


# ---- groups of layers

WINDOW = dataclasses.replace(LAYOUT, rule="window", window=6, layers=(1, 3))
STATE = dataclasses.replace(LAYOUT, num_kv_heads=8, block_size=1, rule="state", layers=(4, 5))
WHOLE = dataclasses.replace(LAYOUT, layers=(0, 2))


def test_a_link_has_the_lanes_of_each_group_in_turn() -> None:
    sources, targets = ([dataclasses.replace(each, tp_size=size) for each in (WHOLE, STATE)] for size in (8, 4))
    found = lanes_of(sources, targets)
    own = [lanes(*pair) for pair in zip(sources, targets, strict=True)]
    assert [len(each) for each in own] == [4, 8], "P replicates keys and divides states"
    assert found == [lane._replace(group=group) for group in range(2) for lane in own[group]]
    assert wire.LaneOffer(**found[-1]._asdict(), offers=[], probe_seed=0).group == 1


def test_a_prompt_takes_its_tokens_of_a_window_its_last_ones_and_one_state() -> None:
    infos = [each.to_info() for each in (WHOLE, WINDOW, STATE)]
    state_nbytes = STATE.token_nbytes
    for num_tokens, in_window in ((3, 3), (5, 5), (8, 8), (9, 5), (12, 8), (13, 5), (1000, 8)):
        expected = num_tokens * WHOLE.token_nbytes + in_window * WINDOW.token_nbytes + state_nbytes
        assert transfer_nbytes(infos, infos, num_tokens) == expected
    assert transfer_nbytes(infos[:1], infos[:1], 7) == 7 * WHOLE.token_nbytes


# ---- a transfer over several lanes


def landed(nbytes: int, token_id: int = 1) -> Landed:
    return Landed("t", [TokenOutput("r", 0, 0, 0, token_id)], nbytes)


def test_arrived_and_landed_when_all_lanes_have() -> None:
    gather = LaneBarrier(3)
    assert [gather.add(lane, Arrived("t")) for lane in (1, 0, 2)] == [None, None, Arrived("t")]
    gather.add(0, Arrived("u"))  # then given up
    assert [gather.add(lane, Drained("u")) for lane in (0, 1, 2)] == [None, None, Drained("u")]
    assert [gather.add(lane, landed(10)) for lane in (2, 0)] == [None, None]
    assert gather.add(1, landed(5)) == landed(25)
    assert len(gather) == 0


def test_lanes_that_disagree_are_a_fault() -> None:
    gather = LaneBarrier(2)
    gather.add(0, landed(1))
    assert isinstance(gather.add(1, landed(1, token_id=2)), LandFault)


def test_any_order_of_lanes() -> None:
    """Each lane lands or fails, then drains: a fault is reported at once, the drain once, at the end."""
    for seed in range(20):
        rng = random.Random(seed)
        queues: list[list[LinkEvent]] = []
        for _ in range(4):
            first: list[LinkEvent] = [rng.choice([landed(1), LandFault("t", "x")])][: rng.randrange(2)]
            queues.append([*first, Drained("t")])
        gather, said = LaneBarrier(4), []
        while any(queues):
            lane = rng.choice([lane for lane, queue in enumerate(queues) if queue])
            event = gather.add(lane, queues[lane].pop(0))
            said += [event] if event is not None else []
        assert said[-1] == Drained("t")
        assert said.count(Drained("t")) == 1
        assert len(gather) == 0


# ---- when a follower may send


def test_a_follower_sends_what_it_has_computed_itself() -> None:
    gate, done = ProgressQueue(), []
    gate.reached(to.Reached(1, 0))
    for name, after in (("a", (0, 9)), ("b", (1, 2)), ("c", (0, 0)), ("d", (1, 3)), ("e", (2, 1))):
        gate.add(to.Reached(*after), lambda name=name: done.append(name))
    for reached, wanted in (((1, 0), "a"), ((1, 1), "a"), ((1, 2), "abc"), ((2, 0), "abcd"), ((2, 1), "abcde")):
        gate.reached(to.Reached(*reached))
        assert "".join(done) == wanted  # in order, so jobs after b wait for b
