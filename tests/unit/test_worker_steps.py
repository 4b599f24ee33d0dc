"""When a worker steps, what it waits for, what it sends during a step, and its reports to schedulers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pd_cluster import wire
from pd_cluster.engine.handover.engine_events import ConnClosed, Event, HandedOver, Mail, StartDrain, StopEngine
from pd_cluster.engine.legs import output_batcher
from pd_cluster.engine.legs.leg_table import LegTable
from pd_cluster.engine.legs.legs import ENDING, MIN_WAITING, OTHERS, Legs
from pd_cluster.engine.lifecycle.worker_drain import CLOSES_AFTER_S
from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.scheduling.step_delay import StepDelay
from pd_cluster.engine.stages.stage import Released, Stage
from pd_cluster.engine.stages.tier_stage import EngineTiers
from pd_cluster.engine.worker.worker import Worker
from pd_cluster.kv.host_tier import HostTier, LoadCost
from pd_cluster.kv.lower_tier import LowerTier
from pd_cluster.model.inputs.forward_batch import RunnerOutput
from pd_cluster.model.inputs.step_input import NO_DRAFTS, Drafts
from pd_cluster.types import LegEnd, Request, RequestSpec, StateCopy
from tests.support.toy_model import ToyRunner, generate_alone
from tests.support.worker_world import BLOCK_SIZE, CONN, NUM_BLOCKS, PROMPT, Shipped, World, found, peer, sampling


class MidStepCredit(ToyRunner):
    """A runner during whose step D's credit arrives, between two layers."""

    worker: Worker
    credit = wire.Credit("r", [0])

    def forward(
        self,
        chunks: list[tuple[Request, int]],
        on_layer: Callable[[int], None] | None = None,
        drafts: Drafts = NO_DRAFTS,
        keeps: Sequence[StateCopy] = (),
    ) -> RunnerOutput:
        output = super().forward(chunks, None, drafts)
        if on_layer is not None:
            self.worker.handover.credits.put(("link", self.credit))
            on_layer(1)
        return output


def test_the_loop_says_that_it_came_round_between_steps(world: World) -> None:
    """The loop notes each pass between steps, so heartbeats report at once when nothing runs."""
    steps, running = list[int](), list[int]()
    world.submit("r", PROMPT, sampling(1))

    def on_round() -> None:
        world.now_s += 1e-6  # much less than a load's maximum age
        steps.append(world.worker.core.num_steps)
        if not world.worker.legs.table.sequences:
            running.append(world.worker.load.num_running)
            if len(running) == 2:
                world.inbox.put(StopEngine())

    world.loop.run(on_round)
    assert sorted(set(steps)) == list(range(sampling(1).max_tokens + 1)) == steps[: sampling(1).max_tokens + 1]
    assert running[-1] == 0


# ---- tokens that readers gather


def test_batches_are_told_apart_by_name_and_priority(world: World) -> None:
    for name, batch, priority in (("a", "x", 0), ("b", "x", 1), ("c", "", 0)):
        world.order(name, RequestSpec(PROMPT, sampling(1), priority=priority, batch=batch))
    world.step()
    batches = {key: request.batch for key, request in world.worker.core.scheduler.requests.items()}
    assert len({batches["a#0"], batches["b#0"], ""}) == 3
    assert batches["c#0"] == ""
    world.run()


@pytest.mark.parametrize("how", ["the wait ends", "it drains", "it has a device of its own"])
def test_a_step_waits_until_there_is_no_more_to_wait_for(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, waits = World(shares_cores=how != "it has a device of its own"), [True]
    monkeypatch.setattr(StepDelay, "waits", property(lambda self: waits[0]))
    world.submit("r", PROMPT, sampling(1))
    if how != "it has a device of its own":
        world.steps(3)
        assert world.worker.core.num_steps == 0
        waits[0] = how != "the wait ends"
        if how == "it drains":
            world.inbox.put(StartDrain())
    world.run()
    assert found(world, "r")[:1] == generate_alone(PROMPT, sampling(1))[:1]


def test_a_request_that_crosses_the_word_of_a_drain_is_served(world: World) -> None:
    """A request sent before its scheduler learned of the drain is served; later ones are refused; the worker ends."""
    rounds, beats = list[bool](), list[int]()
    world.inbox.put(StartDrain())

    def on_round() -> None:
        beats.append(world.post.num_beats_at_once)
        rounds.append(world.worker.load.is_draining)
        if len(rounds) == 2:
            world.submit("early", PROMPT, sampling(1))
            world.another_scheduler()  # which must be told of the drain at once
        if len(rounds) == 4:
            world.now_s += CLOSES_AFTER_S
            world.submit("late", PROMPT, sampling(1))

    world.loop.run(on_round)
    assert rounds == [True] * len(rounds)
    assert (beats[1], beats[2]) == (1, 2)
    assert len(found(world, "early")[0]) == sampling(1).max_tokens
    assert ["no more requests" in (end.error or "") for end in world.post.ended if end.request_id == "late"] == [True]


@pytest.mark.parametrize("drain_timeout_s", [30.0, 0.5])
def test_what_comes_during_the_last_step_before_a_worker_closes_is_answered(
    drain_timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers a last step longer than the time in which requests are accepted; the worker reports its drain first."""
    world, at_step = World(drain_timeout_s=drain_timeout_s), []
    runner = world.worker.core.runner
    forward = runner.forward

    def compute(*args: Any) -> RunnerOutput:
        at_step.append((world.worker.load.is_draining, world.post.num_beats_at_once, world.worker.state.is_closed))
        world.now_s += drain_timeout_s / 2 if len(at_step) == 1 else 0.0
        if not world.worker.legs.table.sequences or len(at_step) == sampling().max_tokens:
            world.submit("late", PROMPT, sampling())
        return forward(*args)

    monkeypatch.setattr(runner, "forward", compute)
    world.submit("r", PROMPT, sampling(1))
    world.inbox.put(StartDrain())
    left, rounds = iter(range(100)), list[int]()
    world.loop.run(lambda: rounds.append(next(left)))
    assert at_step[:2] == [(True, 1, False), (True, 1, True)]
    assert len(found(world, "r")[0]) == sampling(1).max_tokens
    assert [end.request_id for end in world.post.ended] == ["late"]


def test_a_leg_that_is_held_when_a_worker_closes_is_told_to_go_elsewhere() -> None:
    class Holding(Stage):
        """A stage that holds every leg until all are released."""

        def __init__(self) -> None:
            self.held, self.free = list[Released](), list[Released]()

        def admits(self, conn: str, submit: wire.Submit) -> bool:
            self.held.append(Released(conn, submit))
            return False

        def release_all(self) -> None:
            self.free, self.held = self.held, []

        def released(self) -> list[Released]:
            free, self.free = self.free, []
            return free

    world = World(stages_of=lambda scheduler, legs, clock: [Holding()])
    world.submit("held", PROMPT, sampling())

    def on_round() -> None:
        world.now_s += CLOSES_AFTER_S / 2

    world.inbox.put(StartDrain())
    world.loop.run(on_round)
    assert world.now_s >= CLOSES_AFTER_S
    assert [(end.request_id, end.is_fault) for end in world.post.ended] == [("held", True)]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_worker_whose_scheduler_is_gone_closes_at_once(world: World, is_first: bool) -> None:
    events: list[Event] = [ConnClosed(CONN, "scheduler@1", "gone"), StartDrain()]
    rounds = iter([*events[:: 1 if is_first else -1], None, None])

    def on_round() -> None:
        if (event := next(rounds)) is not None:
            world.inbox.put(event)

    world.loop.run(on_round)
    assert world.now_s == 0


def test_a_worker_that_sleeps_closes_at_once_and_is_not_woken() -> None:
    levels, rounds = list[wire.SleepLevel](), iter(range(3))
    world = World(go_to_level=levels.append)
    world.mail(wire.Sleep(1))

    def on_round() -> None:
        if next(rounds) == 1:
            world.inbox.put(StartDrain())
            world.mail(wire.Sleep(0))

    world.loop.run(on_round)
    assert (next(rounds, "over"), levels) == ("over", [1])


@pytest.fixture
def ships(world: World, monkeypatch: pytest.MonkeyPatch) -> Shipped:
    """Returns what a prefill leg ships if its credit arrives during its step."""
    shipped, runner = world.take_links(monkeypatch), MidStepCredit(NUM_BLOCKS, BLOCK_SIZE)
    world.worker.core.runner, runner.worker = runner, world.worker
    world.mail(wire.Submit("r", 0, "r", "prefill", "decode-0@2", RequestSpec(PROMPT, sampling(n=1)), 0.0))
    return shipped


def test_layers_leave_before_the_step_has_ended(world: World, ships: Shipped) -> None:
    """Layers are sent during the step, also after a credit that arrives in it, and only once."""
    worker = world.worker
    world.step()
    (request,) = worker.core.scheduler.requests.values()
    assert ships.pieces == [(wire.KVPiece(0, 5, 0, 1, request.tables[0]), 0)], "expected layers while the step ran"
    assert [end.num_chunks for end in ships.ends] == [1]
    assert worker.handover.exports.held.take("link", "r")
    world.inbox.put(HandedOver("link", "r", 0.0))
    world.step()


def test_a_credit_that_makes_no_sense_waits_for_the_end_of_the_step(
    world: World, ships: Shipped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An invalid credit ends its request only after the step, which still writes to the request's blocks."""
    monkeypatch.setattr(MidStepCredit, "credit", wire.Credit("r", [3]))
    world.step()
    assert world.worker.core.scheduler.requests, "the request must not end during the step"
    world.inbox.put(Mail("link", "decode-0@2", wire.Credit("r", [3])))
    world.step()
    assert [end.error for end in world.post.ended] == ["decode-0@2 sent a credit with invalid first tokens: 3"]
    assert ships.sent[-1] == wire.Revoke("r")


def test_what_the_mail_brought_leaves_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal of a request is sent before the step of another one, which may take long."""
    world = World()
    runner, ended = world.worker.core.runner, []
    forward = runner.forward

    def compute(*args: Any) -> RunnerOutput:
        ended.append([each.request_id for each in world.post.ended])
        world.inbox.put(StopEngine())
        return forward(*args)

    monkeypatch.setattr(runner, "forward", compute)
    world.submit("r", PROMPT, sampling())
    world.submit("too long", [5] * 41, sampling())
    world.loop.run()
    assert ended == [["too long"]]


def positions_told(world: World, index: int = 0) -> list[list[int]]:
    """Returns the positions of one sequence's tokens in each message."""
    tokens = [token for _, outputs in world.post.messages for token in outputs.tokens if token.index == index]
    return [[each.position for each in token.apart()] for token in tokens]


@pytest.mark.parametrize("n", [1, 3])
def test_after_the_first_many_tokens_are_told_together(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_batcher, "MAX_UNSENT", 2)
    world = World()
    world.submit("r", PROMPT, sampling(n), gathers=True)
    world.run()
    assert found(world, "r")[:n] == generate_alone(PROMPT, sampling(n))
    assert [positions_told(world, index) for index in range(n)] == [[[0], [1, 2, 3], [4, 5, 6], [7]]] * n
    world.assert_home()


def test_a_sequence_that_goes_on_is_told_from_there(world: World) -> None:
    (expected,) = generate_alone(PROMPT, sampling(1))
    world.resume("r", RequestSpec(PROMPT, sampling(1), gathers=True), {0: expected[:3]})
    world.run()
    assert found(world, "r")[0] == expected
    assert positions_told(world) == [[3, 4, 5, 6, 7]]


@pytest.mark.parametrize("changes", [{"logprobs": 1}, {"beam_width": 3, "temperature": 0.0}])
def test_tokens_with_logprobs_and_those_of_beams_are_told_singly(changes: dict[str, Any]) -> None:
    world, params = World(), sampling(1, **changes)
    world.submit("r", PROMPT, params, gathers=True)
    world.run()
    assert found(world, "r")[:1] == generate_alone(PROMPT, params)
    assert positions_told(world) == [[position] for position in range(8)]


def test_what_was_not_told_before_an_abort_never_is(world: World) -> None:
    world.submit("r", PROMPT, sampling(2), gathers=True)
    world.steps(4)
    world.mail(wire.Abort("r", 0, 1))
    world.run()
    expected = generate_alone(PROMPT, sampling(2))
    assert found(world, "r")[:2] == [expected[0], expected[1][:1]]


# ---- trace events of transfers


def told(world: World, conn: str = CONN) -> list[str]:
    return [event.what for to, outputs in world.post.messages if to == conn for event in outputs.events]


def test_events_go_with_tokens(world: World) -> None:
    """A leg's first and last events are sent with tokens; between ticks there is no separate message."""
    world.step()
    world.now_s = 0.0
    world.submit("r", [1, 2, 3], sampling(n=1))
    for _ in range(8):
        world.step()
        world.now_s -= 0.19
    assert told(world) == ["submitted", "admitted", "finished"]
    assert [outputs.now_s for _, outputs in world.post.messages] == pytest.approx([0.01 * at for at in range(8)])
    assert all(outputs.tokens for _, outputs in world.post.messages)


def test_events_alone_wait_for_the_next_tick(world: World) -> None:
    world.step()
    for at in range(3):
        world.tracer.note("t", "landed", start=at)
        world.step()
        world.now_s -= 0.19  # three steps within one tick
    assert told(world) == ["landed"]
    world.now_s += 0.1
    world.step()
    assert told(world) == ["landed"] * 3
    assert len(world.post.messages) == 2


def test_every_scheduler_is_told(world: World) -> None:
    """Schedulers without tokens in a step get events at the next tick; none gets them twice."""
    world.another_scheduler()
    world.submit("r", [1, 2, 3], sampling(n=1))
    world.run()
    world.step()
    assert told(world) == told(world, "other-conn") == ["submitted", "admitted", "finished"]
    world.inbox.put(ConnClosed("other-conn", "other@1", "gone"))
    world.submit("s", [1, 2, 3], sampling(n=1))
    world.run()
    assert len(told(world, "other-conn")) == 3


def share(world: World, prompt: list[int]) -> None:
    """Makes two schedulers share the worker; one sends one leg more than may wait, each with 5 outstanding tokens."""
    world.mail(wire.Peers([peer("decode-0", 1, "decode")], 7))
    world.another_scheduler()
    for at in range(MIN_WAITING + 1):
        world.order(f"r{at}", RequestSpec(prompt, sampling(n=1)), weight=5, may_be_full=True)


def test_a_scheduler_that_shares_the_worker_hears_that_it_is_full(world: World) -> None:
    """Legs beyond the limit are refused; waiting ones are served, and each scheduler's share is reported."""
    share(world, [1, 2, 3])
    world.order("kept", RequestSpec([1, 2, 3], sampling(n=1)), weight=5)
    world.step()
    assert world.worker.legs.table.outstanding() == {CONN: 5 * (MIN_WAITING + 1)}
    assert world.worker.load.outstanding == {"scheduler@1": 5 * (MIN_WAITING + 1), "other@1": 0}
    world.run()
    ended = [(end.request_id, end.is_full, end.is_fault) for end in world.post.ended]
    assert ended == [(f"r{MIN_WAITING}", True, True)]
    assert world.worker.legs.table.outstanding() == {}


def test_one_attempt_of_two_schedulers_is_computed_for_the_first(world: World) -> None:
    """If one scheduler resumes the other's request with the same attempt, neither may wait forever."""
    submit = wire.Submit("r", 1, "r-1", "hybrid", "", RequestSpec(PROMPT, sampling(n=1)), 0.0)
    world.another_scheduler()
    for conn in (CONN, CONN, "other-conn"):
        world.inbox.put(Mail(conn, "scheduler", submit))
    world.run()
    ends = [(conn, body.ended) for conn, body in world.post.messages if body.ended]
    assert ends == [("other-conn", [LegEnd("r", 1, OTHERS, is_fault=True)])]
    assert world.post.tokens["r"][0] == generate_alone(PROMPT, sampling(n=1))[0]


def test_an_attempt_whose_leg_still_ends_can_continue_elsewhere(world: World) -> None:
    request = Request("r", RequestSpec(PROMPT, sampling(n=1)), attempt=1)
    world.worker.core.scheduler.requests[request.key] = request
    world.order("r", request.order, attempt=1)
    world.loop.turn(wait_s=0.0)
    assert world.post.ended == [LegEnd("r", 1, ENDING, is_fault=True)]


def test_a_whole_answer_of_a_stream_that_moves_has_its_window(world: World) -> None:
    """The record of an ended stream stays for its window, also if an abort crosses the last token."""
    world.order("r", RequestSpec(PROMPT, sampling(n=1)), keep=wire.Keep(b"d" * 32, 30.0, 1 << 20, b"recipe"))
    world.run()
    for passes_s, num_records in ((100, 1), (0, 1), (31, 0)):
        if not passes_s:
            world.mail(wire.Abort("r", 0))
        world.now_s += passes_s
        world.step()
        assert len(world.worker.legs.records) == num_records


def tiers_of(scheduler: StepScheduler, legs: Legs, clock: Callable[[], float]) -> list[Stage]:
    host = scheduler.blocks.tier = HostTier(0, 0, LoadCost(BLOCK_SIZE))
    lower = LowerTier("shared", host, 0, 1, BLOCK_SIZE, clock)
    host.lower = [lower]
    return [EngineTiers(scheduler, {"shared": lower}, None, clock)]


def test_legs_that_wait_for_blocks_in_a_store_count_as_waiting() -> None:
    world = World(stages_of=tiers_of)
    (tiers, _) = world.stages
    share(world, [1, 2, 3, 4, 5])
    world.step()
    assert tiers.num_held == world.worker.load.num_waiting == MIN_WAITING
    assert world.worker.load.outstanding == {"scheduler@1": 5 * MIN_WAITING, "other@1": 0}
    assert [(end.request_id, end.is_full) for end in world.post.ended] == [(f"r{MIN_WAITING}", True)]
    tiers.release_all()
    world.run()
    assert len(world.post.ended) == 1, "the others must be served"


def test_only_schedulers_that_share_the_worker_are_told_of_each_others_legs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a fencing term there is a single scheduler, which does not need the sums."""
    world.mail(wire.Peers([peer("decode-0", 1, "decode")]))
    world.another_scheduler()
    monkeypatch.setattr(LegTable, "outstanding", lambda self: pytest.fail("it is summed for nobody"))
    world.step()
    assert world.worker.load.outstanding == {}


def test_a_leg_that_is_refused_or_late_has_failed(world: World) -> None:
    world.submit("long", [1] * 60, sampling(n=1))
    world.submit("late", [1, 2, 3], sampling(n=1, max_tokens=30), deadline_s=0.5)
    world.run()
    events = [(event.transfer_id, event.what) for _, outputs in world.post.messages for event in outputs.events]
    assert [what for name, what in events if name == "long"] == ["submitted", "failed"]
    assert [what for name, what in events if name == "late"] == ["submitted", "admitted", "failed"]
