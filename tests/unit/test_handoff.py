"""The handover's state machines, driven through random orders of events, and proof that the test would notice."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from pd_cluster import wire
from pd_cluster.devices.device import CPU
from pd_cluster.engine.handover.exports import Exports, ExportState, ShipLimits
from pd_cluster.engine.handover.held import Held
from pd_cluster.engine.handover.imports import Import, Imports, ImportState
from pd_cluster.engine.step import ahead
from pd_cluster.engine.step.plan import StepPlan
from pd_cluster.engine.step.scheduler import StepScheduler
from pd_cluster.errors import QuarantineFull
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.model.batch import OnLayer
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.copies import Copies
from pd_cluster.transport.events import Arrived, Drained, Landed, LandFault
from pd_cluster.transport.guard import Opener
from pd_cluster.transport.landing import Lander
from pd_cluster.types import Leg, Order, Request, Sampling, Status, TokenOutput
from tests.support.handoff_ahead import AheadWorld
from tests.support.handoff_rest import RestingWorld
from tests.support.handoff_world import World

SEEDS = range(500)  # a deliberate fault is noticed by 2 of 100 at least, see below
SLOW_SEEDS = range(1000, 101_000)


def explore(seeds: Sequence[int], world_of: type[World] = World) -> Counter[str]:
    """Runs every seed; returns how often which outcome was seen on either side."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        world = world_of(seed)
        try:
            world.run()
            world.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        if world.num_troubles == 0:
            for name, at_p in world.p_ends.outcome.items():
                at_d = world.d_ends.outcome[name]
                on_token_one = at_p == "finished" and at_d in ("aborted", "dropped")
                was_told = at_p in ("handed over", "aborted")  # D may be done before P has read that it took over
                assert on_token_one or (was_told and at_d == "finished"), f"seed {seed}: {at_p}, {at_d}"
        seen["D waits"] += world.num_waits > 0
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
    """In processes of their own, which pytest does not time: each part must end by itself."""
    parts = [seeds[at : at + 125] for at in range(0, len(seeds), 125)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        return sum(pool.map(explore, parts), Counter())


def test_random_orders_of_events() -> None:
    seen = explore(SEEDS)
    for outcome in (
        "P handed over",
        "P died",
        "P the link to decode is down",
        "P decode did not take the transfer within 10 s",
        "P decode did not finish the transfer within 30 s",
        "P decode gave the transfer up",
        "D finished",
        "D aborted",
        "D dropped",
        "D died",
        "D the link from prefill is down",
        "D the transfer stood still for 30 s",
        "D waits",
        "D waits for a landing",
    ):
        assert seen[outcome] > 25, f"{outcome!r} was hardly seen: {seen}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_orders_of_events() -> None:
    explore_on_all_cores(SLOW_SEEDS)


def commit_without_asking(self: Imports, transfer_id: str, first_tokens: list[TokenOutput]) -> None:
    found = self._imports.get(transfer_id)
    if found is not None and found.state is ImportState.LANDING:
        found.state, found.first_tokens = ImportState.CONFIRMING, first_tokens
        self.on_confirmed(found.conn, wire.Confirmed(transfer_id, True))


def release_before_drained(self: Imports, found: Import, error: str | None) -> None:
    request = found.request
    del self._imports[found.transfer_id]
    if request is not None:
        if request.key in self._scheduler.requests:
            self._scheduler.finish(request)
        self._ended(request, error)


def drain_is_ignored(self: Imports, transfer_id: str) -> None:
    return


def cancel_ends_twice(self: Exports, conn: str, cancel: wire.Cancel) -> None:
    export = self._find(conn, cancel.transfer_id)
    if export is not None:
        self._ended(export.request, "cancelled")


def layers_are_shipped_before_they_are_written(self: Exports, num_layers: int) -> None:
    for export in self._step:
        if export.state is ExportState.STREAMING:
            self._ship_layers(export, min(num_layers + 1, self._num_layers))


def confirmed_without_taking_it_out(self: Held, conn: str, transfer_id: str) -> bool:
    return (conn, transfer_id) in self._held


def expiry_revokes_what_was_handed_over(self: Exports) -> None:
    for export in [e for e in self._exports.values() if e.state is not ExportState.STREAMING]:
        limit_s = 10 if export.state is ExportState.OFFERED else 30
        if self._clock() - max(export.since_s, self._ports.progress_s(export.conn)) > limit_s:
            self._ports.send(export.conn, wire.Revoke(export.request.transfer_id))
            self._give_up(export, "late")


def replays_are_opened(self: Opener, frame: wire.KVFrame) -> str:
    return "out of order" if frame.sequence > self.next_sequence else ""


def credit_without_blocks_for_the_prompt(self: Imports) -> None:
    for waiting in [i for i in self._imports.values() if i.state is ImportState.QUEUED]:
        assert waiting.request is not None
        if not self._scheduler.can_land(waiting.request, waiting.num_tokens - 1):
            return
        first = self._scheduler.land(waiting.request, waiting.num_tokens - 1)
        waiting.state = ImportState.LANDING
        table = waiting.request.block_table
        self._ports.begin(waiting.conn, waiting.transfer_id, table, first, waiting.num_tokens)
        self._ports.send(waiting.conn, wire.Credit(waiting.transfer_id, first))


def credit_without_pinning(self: StepScheduler, request: Request, num_tokens: int) -> int:
    """Believes that what is cached now will be there when the rest has landed."""
    found = self._holdings.cached(request, len(request.prompt_token_ids))
    request.block_table = self.blocks.take(self.num_blocks_for(num_tokens))
    self._take_in(request)
    request.status = Status.LANDING
    return len(found) * self.block_size


def drained_while_copies_are_under_way(self: Lander, transfer_id: str) -> Drained:
    self._landings.pop(transfer_id, None)
    return Drained(transfer_id)


land = Lander.land


def landed_while_copies_are_under_way(
    self: Lander, sequence: int, header: wire.KVChunk | wire.KVEnd
) -> Arrived | Landed | LandFault | None:
    copies = self._receiver.copies
    if isinstance(header, wire.KVEnd):
        self._receiver.copies = Copies(CPU)
    try:
        return land(self, sequence, header)
    finally:
        self._receiver.copies = copies


def who_has_no_room_comes_by_itself(self: Imports, batch: str) -> int:
    return len(self)


MUTATIONS: list[tuple[type, str, Callable[..., None]]] = [
    (Imports, "on_landed", commit_without_asking),
    (Imports, "_give_up", release_before_drained),
    (Imports, "on_drained", drain_is_ignored),
    (Imports, "credit", credit_without_blocks_for_the_prompt),
    (StepScheduler, "land", credit_without_pinning),
    (Exports, "on_cancel", cancel_ends_twice),
    (Exports, "layers_done", layers_are_shipped_before_they_are_written),
    (Held, "take", confirmed_without_taking_it_out),
    (Opener, "_reason_to_drop", replays_are_opened),
    (Lander, "forget", drained_while_copies_are_under_way),
    (Lander, "land", landed_while_copies_are_under_way),
    (Exports, "expire", expiry_revokes_what_was_handed_over),
    (Imports, "num_on_their_way", who_has_no_room_comes_by_itself),
]


@pytest.mark.parametrize(("owner", "name", "broken"), MUTATIONS, ids=[m[2].__name__ for m in MUTATIONS])
def test_a_broken_state_machine_is_noticed(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Callable[..., None]
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError)):
        explore(SEEDS)


class Recorder:
    """Ports of both sides that write down what they are asked."""

    def __init__(self) -> None:
        self.sent: list[wire.Body] = []
        self.ended: list[str | None] = []
        self.joined: list[Request] = []
        self.sequences: list[Request] = []
        self.tail_s = 0.0

    def link_to(self, peer: str) -> str | None:
        return "c"

    def send(self, conn: str, body: wire.Body) -> None:
        self.sent.append(body)

    def limits(self, conn: str) -> ShipLimits:
        return ShipLimits(4, 1000)

    def precision(self, conn: str) -> str:
        return "int8"

    def ship(self, conn: str, transfer_id: str, index: int, piece: wire.KVPiece) -> None: ...
    def ship_end(self, conn: str, end: wire.KVEnd) -> None: ...
    def drop(self, conn: str, transfer_id: str) -> None: ...
    def begin(self, conn: str, transfer_id: str, block_ids: list[int], first_token: int, num_tokens: int) -> None: ...
    def forget(self, conn: str, transfer_id: str) -> None: ...

    def progress_s(self, conn: str) -> float:
        return 0.0

    def left_s(self, transfer_id: str) -> float:
        return self.tail_s

    def join(self, request: Request, sequences: list[Request], tokens: list[TokenOutput]) -> None:
        self.joined.append(request)
        self.sequences += sequences

    def end(self, request: Request, error: str | None) -> None:
        self.ended.append(error)


def make_request(leg: Leg, sampling: Sampling | None = None) -> Request:
    return Request("r", Order([1] * 8, sampling or Sampling(max_tokens=4)), leg=leg, transfer_id="t", peer="decode")


@pytest.mark.parametrize("first_token", [-(2**62), -1, 3, 9, 12, 2**62])
def test_a_credit_that_makes_no_sense_ends_the_transfer(first_token: int) -> None:
    world = Recorder()
    scheduler = StepScheduler(BlockPool(8), 4, 4, 16)
    exports = Exports(scheduler, world, world.end, lambda: 0.0, Timeouts(), 2, 64)
    request = make_request("prefill")
    scheduler.add(request)
    scheduler.plan()
    exports.admitted(request)
    exports.on_credit("c", wire.Credit("t", first_token))
    assert world.ended == [f"decode wants KV cache from token {first_token} on"]
    assert world.sent[-1] == wire.Revoke("t")
    assert not len(exports)


def landing(sampling: Sampling | None = None, clock: Callable[[], float] = lambda: 0.0) -> tuple[Imports, Recorder]:
    world = Recorder()
    scheduler = StepScheduler(BlockPool(8), 4, 4, 16)
    imports = Imports(
        scheduler,
        world,
        world.end,
        world.join,
        clock,
        Timeouts(),
        growth_tokens=4,
        vocab_size=100,
    )
    imports.submit(make_request("decode", sampling))
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
        [TokenOutput("r", 0, 0, 0, -1)],
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
    imports.await_no_longer()  # of this one nobody has expected anything yet
    assert imports.imminent_s == 0.5
    imports.on_landed("t", [TokenOutput("r", 0, 0, 0, 5)])
    world.tail_s = 0.0
    assert imports.imminent_s == 0
    imports.await_no_longer()
    assert imports.imminent_s is None
    imports.on_confirmed("c", wire.Confirmed("t", True))
    given_up, _ = landing()
    given_up.on_arrived("t")
    given_up.on_link_down("c", "gone")
    assert given_up.imminent_s is None


def test_blocks_in_quarantine_are_counted_and_bounded() -> None:
    """Those of a transfer that was given up, until it is drained; they count against the bound once they are late."""
    now_s = [0.0]
    imports, _ = landing(clock=lambda: now_s[0])
    assert imports.num_quarantined_blocks == 0
    imports.on_link_down("c", "the peer stands still")
    num_blocks = imports.num_quarantined_blocks
    assert num_blocks >= 2  # of 8 tokens, and growth
    imports.check_quarantine(0)
    now_s[0] = Timeouts().transfer_timeout_s
    imports.check_quarantine(num_blocks)
    with pytest.raises(QuarantineFull, match=rf"^{num_blocks} KV blocks .* more than the 1 of --kv-max-quarantine"):
        imports.check_quarantine(1)
    imports.on_drained("t")
    assert imports.num_quarantined_blocks == 0
    imports.check_quarantine(0)


def test_candidates_of_a_beam_search_are_checked() -> None:
    """Those of another request end the transfer; the right ones become beams, which hold the prompt together."""
    for name, is_right in (("other", False), ("r", True)):
        imports, world = landing(Sampling(max_tokens=4, n=2, beam_width=2, temperature=0.0))
        imports.on_landed("t", [TokenOutput(name, 0, at, 0, 5 + at, score=-1.0 - at) for at in range(3)])
        imports.on_confirmed("c", wire.Confirmed("t", True))
        assert world.ended == ([] if is_right else ["the first-token outputs do not belong to this request"])
        assert [beam.output_token_ids for beam in world.sequences] == ([[5], [6]] if is_right else [])
        assert len({tuple(beam.block_table) for beam in world.sequences}) == (1 if is_right else 0)


def test_what_lands_is_known_by_the_precision_of_its_link() -> None:
    imports, world = landing()
    imports.on_landed("t", [TokenOutput("r", 0, 0, 0, 5)])
    imports.on_confirmed("c", wire.Confirmed("t", True))
    assert [request.kv_precision for request in world.joined] == ["int8"]


def test_an_offer_of_another_instance_than_the_one_expected_is_ignored() -> None:
    world = Recorder()
    imports = Imports(
        StepScheduler(BlockPool(8), 4, 4, 16), world, world.end, lambda r, s, t: None, lambda: 0.0, Timeouts(), 4, 100
    )
    imports.submit(make_request("decode"))
    imports.on_offer("c", wire.Offer("t", 8), "another@1")
    imports.credit()
    assert not world.sent
    imports.on_offer("d", wire.Offer("t", 8), "decode")
    imports.credit()
    assert world.sent == [wire.Credit("t", 0)]


def test_a_transfer_is_not_submitted_twice() -> None:
    imports, world = landing()
    imports.submit(make_request("decode"))
    assert world.ended == ["transfer t is under way for another request"]
    imports.on_landed("t", [TokenOutput("r", 0, 0, 0, 5)])
    imports.on_confirmed("c", wire.Confirmed("t", True))
    assert len(world.joined) == 1


def test_an_offer_of_another_length_is_refused() -> None:
    world = Recorder()
    scheduler = StepScheduler(BlockPool(8), 4, 4, 16)
    fresh = Imports(scheduler, world, world.end, lambda r, s, t: None, lambda: 0.0, Timeouts(), 4, 100)
    fresh.submit(make_request("decode"))
    fresh.on_offer("c", wire.Offer("t", 2**60))
    assert world.ended == [f"offered {2**60} tokens for a prompt of 8"]
    assert not len(fresh)


# ---- P's steps ahead of its host


def test_random_orders_of_events_with_a_link_that_rests() -> None:
    """A link that rests wakes for its next transfer; what waits for it is handed over, or ends when it is lost."""
    seen = explore(range(180), RestingWorld)
    for outcome in ("P handed over", "P died", "P the link to decode did not open", "D finished", "rests", "wakes"):
        assert seen[outcome] > 8, f"{outcome!r} was hardly seen: {seen}"


def offers_before_the_link_is_up(self: Exports, peer: str, conn: str) -> None:
    for export in self._awaiting(peer):
        export.conn = conn


def rests_under_way(self: Exports, conn: str) -> bool:
    return False


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("link_up", offers_before_the_link_is_up),
        ("uses", rests_under_way),
    ],
)
def test_a_fault_with_a_link_that_rests_is_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Callable[..., object]
) -> None:
    monkeypatch.setattr(Exports, name, broken)
    with pytest.raises((AssertionError, KeyError)):
        explore(range(60), RestingWorld)


def test_random_orders_of_events_with_steps_ahead_of_the_host() -> None:
    """Prompts that are handed over are launched before the host has seen the end of the step before."""
    seen = explore(SEEDS, AheadWorld)
    for outcome in (
        "P handed over",
        "P died",
        "P the link to decode is down",
        "D finished",
        "D aborted",
        "steps ahead",
    ):
        assert seen[outcome] > 25, f"{outcome!r} was hardly seen: {seen}"


def a_prompt_that_is_handed_over_goes_on(request: Request) -> bool:
    return len(request.output_token_ids) + 1 >= request.sampling.max_tokens


def a_link_waits_for_no_launch(self: AheadWorld) -> None:
    World._send_job(self)


def steps_ahead_are_not_begun(self: AheadWorld, plan: StepPlan) -> OnLayer | None:
    return begins(self, plan) if not self.device.num_launched else None


begins = AheadWorld._begins


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (ahead, "ends_with", a_prompt_that_is_handed_over_goes_on),
        (AheadWorld, "_send_job", a_link_waits_for_no_launch),
        (AheadWorld, "_begins", steps_ahead_are_not_begun),
        *[m for m in MUTATIONS if m[2] is not credit_without_blocks_for_the_prompt],
    ],
    ids=lambda given: getattr(given, "__name__", None),
)
def test_a_fault_in_steps_ahead_of_the_host_is_noticed(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, broken: Callable[..., object]
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError)):
        explore(SEEDS, AheadWorld)
