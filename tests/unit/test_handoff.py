"""The handover's state machines under random orders of events and invalid messages."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from pd_cluster import wire
from pd_cluster.engine.handover.exports import Exports
from pd_cluster.engine.handover.imports import Imports
from pd_cluster.engine.handover.shipping import ShipGroup, ShipLimits, ShipProgress, ShipSizes
from pd_cluster.engine.handover.transfer_terms import TransferTerms
from pd_cluster.engine.scheduling import group_holdings
from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.errors import QuarantineFull
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.group_rule import STATE, Rule
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import Leg, Request, RequestSpec, Sampling, TokenOutput
from tests.support.handoff_ahead import AheadWorld
from tests.support.handoff_groups import GroupsWorld
from tests.support.handoff_rest import RestingWorld
from tests.support.handoff_world import World
from tests.support.seeds import of_seed

SLOW_SEEDS = range(1000, 101_000)


def explore(seeds: Sequence[int], world_of: type[World] = World) -> Counter[str]:
    """Runs every seed; returns the number of times that each outcome was seen on either side."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        world = world_of(seed)
        with of_seed(seed):
            world.run()
            world.check()
        if world.num_troubles == 0:
            for name, at_p in world.p_ends.outcome.items():
                at_d = world.d_ends.outcome[name]
                on_token_one = at_p == "finished" and at_d in ("aborted", "dropped")
                was_told = at_p in ("handed over", "aborted")  # D may finish before P has read its confirmation
                assert on_token_one or (was_told and at_d == "finished"), f"seed {seed}: {at_p}, {at_d}"
        seen["D waits"] += world.num_waits > 0
        seen["D drafts cold"] += world.num_cold
        seen["windows spare tokens"] += world.num_spared
        seen["D waits for a landing"] += world.num_landing_waits > 0
        if isinstance(world, AheadWorld):
            seen["steps ahead"] += world.num_ahead
        if isinstance(world, RestingWorld):
            seen["rests"] += world.num_rests
            seen["wakes"] += world.num_wakes
            seen["lost"] += world.num_lost
        for side, ends in (("P", world.p_ends), ("D", world.d_ends)):
            seen.update(f"{side} {outcome.split(':')[0]}" for outcome in ends.outcome.values())
    return seen


def explore_on_all_cores(seeds: range) -> Counter[str]:
    """Runs the seeds in separate processes; pytest's timeout does not end them, so each has a deadline."""
    parts = [seeds[at : at + 125] for at in range(0, len(seeds), 125)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        return sum(pool.map(explore, parts), Counter())


OF_BOTH = ("P handed over", "P died", "D finished")
PLAIN = (
    *("P the link to decode is down", "P decode did not take the transfer within 10 s"),
    *("P decode did not finish the transfer within 30 s", "P decode abandoned the transfer", "D aborted", "D dropped"),
    *("D died", "D the link from prefill is down", "D the transfer made no progress for 30 s", "D waits"),
    *("D waits for a landing", "D drafts cold"),
)
ORDERS: list[tuple[type[World], int, tuple[str, ...]]] = [
    (World, 125, PLAIN),  # at least 2 of 100 seeds detected each seeded fault of commit 6ae04940
    (RestingWorld, 60, ("P the link to decode did not open", "rests", "wakes")),
    (AheadWorld, 125, ("P the link to decode is down", "D aborted", "steps ahead")),
    (GroupsWorld, 65, (*PLAIN[:6], "D died", "P died", "windows spare tokens")),
]


@pytest.mark.parametrize(
    ("world_of", "num_seeds", "outcomes"), ORDERS, ids=["plain", "links rest", "steps ahead", "groups"]
)
def test_random_orders_of_events(
    world_of: type[World], num_seeds: int, outcomes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All invariants hold, also with resting links, steps launched ahead of the host, and several groups of layers."""
    monkeypatch.setattr(group_holdings, "MAX_PEER_BLOCK_SIZE", 4)  # so that P releases blocks of short prompts
    seen = explore(range(num_seeds), world_of)
    for outcome in (*OF_BOTH, *outcomes):
        assert seen[outcome] > num_seeds // 25, f"{outcome!r} was hardly seen: {seen}"


def test_a_state_that_leaves_before_the_last_chunk_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = ShipProgress.computed

    def early(self: ShipProgress, num_computed: int, *rest: Any) -> Iterator[wire.KVPiece]:
        is_begun = self.group.holds.is_state and 0 < num_computed < self.num_tokens
        return computed(self, self.num_tokens if is_begun else num_computed, *rest)

    monkeypatch.setattr(ShipProgress, "computed", early)
    with pytest.raises(AssertionError, match="is shipped too early"):
        explore(range(40), GroupsWorld)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_orders_of_events() -> None:
    explore_on_all_cores(SLOW_SEEDS)


class Recorder:
    """Ports of both sides that record their calls."""

    def __init__(self) -> None:
        self.sent: list[wire.Body] = []
        self.ended: list[str | None] = []
        self.have_joined: list[Request] = []
        self.sequences: list[Request] = []
        self.tail_s = 0.0

    def link_to(self, peer: str) -> str | None:
        return "c"

    def send(self, conn: str, body: wire.Body) -> None:
        self.sent.append(body)

    def limits(self, conn: str, group: int) -> ShipLimits:
        return ShipLimits(4, 1000, 2)

    def precision(self, conn: str) -> str:
        return "int8"

    def ship(self, *_: object) -> None: ...

    ship_end = drop = begin = forget = ship

    def progress_s(self, conn: str) -> float:
        return 0.0

    def left_s(self, transfer_id: str) -> float:
        return self.tail_s

    def offered(self, request: Request, num_cached_tokens: int) -> None: ...

    def joined(self, request: Request, sequences: list[Request], tokens: list[TokenOutput]) -> None:
        self.have_joined.append(request)
        self.sequences += sequences

    def export_ended(self, request: Request, error: str | None) -> None:
        self.ended.append(error)

    import_ended = export_ended


def make_request(leg: Leg, sampling: Sampling | None = None) -> Request:
    return Request(
        "r", RequestSpec([1] * 8, sampling or Sampling(max_tokens=4)), leg=leg, transfer_id="t", peer="decode"
    )


NO_TOKENS = [[-1], [3], [9], [2**62], [0, 0]]
NO_TOKENS_OF_GROUPS = [[0], [0, 4], [0, 0, 0], [0, 2, 0], [0, 4, 1], [4, 4, 4], [0, 9, 0], [0, 4, 0, 0]]


@pytest.mark.parametrize(
    ("first_tokens", "groups"), [*((each, 1) for each in NO_TOKENS), *((each, 3) for each in NO_TOKENS_OF_GROUPS)]
)
def test_a_credit_that_makes_no_sense_ends_the_transfer(first_tokens: list[int], groups: int) -> None:
    """With several groups, such a credit wants tokens that a window has passed, a partial state, or too few groups."""
    world = Recorder()
    sizes = (ShipGroup(4, 32), ShipGroup(4, 32, Rule("window", 4)), ShipGroup(1, 32, STATE))[:groups]
    scheduler = StepScheduler([LayerGroup(BlockPool(8))], StepSizes(4, 4, 16))
    exports = Exports(world, world, TransferTerms(lambda: 0.0, Timeouts()), ShipSizes(sizes))
    request = make_request("prefill")
    scheduler.add(request)
    scheduler.plan()
    exports.admitted(request)
    exports.on_credit("c", wire.Credit("t", first_tokens))
    assert world.ended == [f"decode sent a credit with invalid first tokens: {', '.join(map(str, first_tokens))}"]
    assert world.sent[-1] == wire.Revoke("t")
    assert not len(exports)


def submitted(sampling: Sampling | None = None, clock: Callable[[], float] = lambda: 0.0) -> tuple[Imports, Recorder]:
    world, scheduler = Recorder(), StepScheduler([LayerGroup(BlockPool(8))], StepSizes(4, 4, 16))
    imports = Imports(scheduler, world, world, TransferTerms(clock, Timeouts()), growth_tokens=4, vocab_size=100)
    imports.submit(make_request("decode", sampling))
    return imports, world


def landing(sampling: Sampling | None = None, clock: Callable[[], float] = lambda: 0.0) -> tuple[Imports, Recorder]:
    imports, world = submitted(sampling, clock)
    imports.on_offer("c", wire.Offer("t", 8))
    imports.credit()
    return imports, world


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [TokenOutput("r", 0, 0, 0, 5), TokenOutput("r", 0, 0, 1, 5)],
        [TokenOutput("other", 0, 0, 0, 5)],
        [TokenOutput("r", 1, 0, 0, 5)],
        [TokenOutput("r", 0, 0, 1, 5)],
        [TokenOutput("r", 0, 0, 0, 100)],
        [TokenOutput("r", 0, 0, 0, 5, "stop")],
    ],
)
def test_first_tokens_of_something_else_are_refused(tokens: list[TokenOutput]) -> None:
    imports, world = landing()
    imports.on_landed("t", tokens)
    assert world.ended == ["the first-token outputs do not belong to this request"]
    assert isinstance(world.sent[-1], wire.Cancel)
    imports.on_drained("t")
    assert not len(imports)


def test_a_transfer_is_imminent_from_its_last_chunk_until_it_joins_or_is_late() -> None:
    imports, world = landing()
    assert imports.imminent_s is None
    imports.on_arrived("t")
    world.tail_s = 0.5
    assert imports.imminent_s == 0.5
    imports.mark_late()  # nothing is expected of this transfer yet
    assert imports.imminent_s == 0.5
    imports.on_landed("t", [TokenOutput("r", 0, 0, 0, 5)])
    world.tail_s = 0.0
    assert imports.imminent_s == 0
    imports.mark_late()
    assert imports.imminent_s is None
    imports.on_confirmed("c", wire.Confirmed("t", True))
    given_up, _ = landing()
    given_up.on_arrived("t")
    given_up.on_link_down("c", "gone")
    assert given_up.imminent_s is None


def test_blocks_in_quarantine_are_counted_and_bounded() -> None:
    """A given-up transfer's blocks stay in quarantine until it is drained, and count against the bound once late."""
    now_s = [0.0]
    imports, _ = landing(clock=lambda: now_s[0])
    assert imports.num_quarantined_blocks == 0
    imports.on_link_down("c", "the peer stands still")
    num_blocks = imports.num_quarantined_blocks
    assert num_blocks >= 2  # for 8 tokens and growth
    imports.check_quarantine(0)
    now_s[0] = Timeouts().transfer_timeout_s
    imports.check_quarantine(num_blocks / 8)
    with pytest.raises(QuarantineFull, match=rf"^{num_blocks} KV blocks .* more than the 1 of --kv-max-quarantine"):
        imports.check_quarantine(1 / 100)
    imports.on_drained("t")
    assert imports.num_quarantined_blocks == 0
    imports.check_quarantine(0)


@pytest.mark.parametrize(("name", "is_right"), [("other", False), ("r", True)])
def test_candidates_of_a_beam_search_are_checked(name: str, is_right: bool) -> None:
    """Another request's candidates end the transfer; the right ones become beams that share the prompt's blocks."""
    imports, world = landing(Sampling(max_tokens=4, n=2, beam_width=2, temperature=0.0))
    land(imports, *(TokenOutput(name, 0, at, 0, 5 + at, score=-1.0 - at) for at in range(3)))
    assert world.ended == ([] if is_right else ["the first-token outputs do not belong to this request"])
    assert [beam.output_token_ids for beam in world.sequences] == ([[5], [6]] if is_right else [])
    assert len({tuple(beam.tables[0]) for beam in world.sequences}) == (1 if is_right else 0)


def test_an_offer_of_another_instance_than_the_one_expected_is_ignored() -> None:
    imports, world = submitted()
    imports.on_offer("c", wire.Offer("t", 8), "another@1")
    imports.credit()
    assert not world.sent
    imports.on_offer("d", wire.Offer("t", 8), "decode")
    imports.credit()
    assert world.sent == [wire.Credit("t", [0])]


def test_a_transfer_is_not_submitted_twice_and_known_by_the_precision_of_its_link() -> None:
    imports, world = landing()
    imports.submit(make_request("decode"))
    assert world.ended == ["transfer t is under way for another request"]
    land(imports, TokenOutput("r", 0, 0, 0, 5))
    assert [request.kv_precision for request in world.have_joined] == ["int8"]


def land(imports: Imports, *tokens: TokenOutput) -> None:
    imports.on_landed("t", [*tokens])
    imports.on_confirmed("c", wire.Confirmed("t", True))


def test_an_offer_of_another_length_is_refused() -> None:
    imports, world = submitted()
    imports.on_offer("c", wire.Offer("t", 2**60))
    assert world.ended == [f"offered {2**60} tokens for a prompt of 8"]
    assert not len(imports)
