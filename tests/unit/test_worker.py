"""A worker without sockets or a model: legs of several sequences come, end one by one, are aborted and time out."""

from __future__ import annotations

import queue
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from pd_cluster import wire
from pd_cluster.engine import outbox
from pd_cluster.engine.handover.events import (
    ConnClosed,
    ConnOpened,
    Event,
    HandedOver,
    Mail,
    StartDrain,
    StopEngine,
    handle_all,
)
from pd_cluster.engine.handover.exports import ShipLimits
from pd_cluster.engine.handover.links import ReceiveEnd, SendEnd, Side
from pd_cluster.engine.legs import ENDING, LEAST_WAITING, OTHERS
from pd_cluster.engine.step.beams import are_first_tokens
from pd_cluster.engine.step.core import EngineCore, StepResult
from pd_cluster.engine.step.limits import EngineLimits
from pd_cluster.engine.step.patience import Patience
from pd_cluster.engine.step.plan import StepPlan
from pd_cluster.engine.step.scheduler import StepScheduler
from pd_cluster.engine.tiers import EngineTiers
from pd_cluster.engine.worker import Worker
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.kv.host_tier import HostTier, LoadCost
from pd_cluster.kv.layout import KVLayout, keys_and_values
from pd_cluster.kv.lower_tier import LowerTier
from pd_cluster.kv.prefix import PrefixScope
from pd_cluster.model.batch import RunnerOutput
from pd_cluster.model.rope_limit import RopeLimit
from pd_cluster.numerics import Numerics
from pd_cluster.settings.config import Credentials, WorkerConfig
from pd_cluster.settings.engine import EngineConfig
from pd_cluster.settings.processes import PortRange
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import MAX_GUIDE_NUM_CHARS, Guide, Leg, LegEnd, Order, Request, Resumed, Role, Sampling
from tests.support.toy_model import VOCAB_SIZE, ToyRunner, generate_alone

BLOCK_SIZE, NUM_BLOCKS = 4, 16
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, planes=keys_and_values(8), block_size=BLOCK_SIZE, dtype="float32")
CONN = "scheduler-conn"


class Post:
    """Keeps what the worker sends to its scheduler."""

    def __init__(self) -> None:
        self.tokens: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.ended: list[LegEnd] = []
        self.messages: list[tuple[str, wire.Outputs]] = []
        self.num_beats = 0

    def connect(self, name: str, epoch: int, host: str, port: int, key: bytes) -> str:
        raise AssertionError("nobody to connect to")

    def disconnect(self, conn: str) -> None: ...
    def beat(self) -> None: ...

    def beat_soon(self) -> None:
        self.num_beats += 1

    def send(self, conn: str, body: wire.Body) -> None:
        if isinstance(body, wire.CacheKeys):
            return
        assert isinstance(body, wire.Outputs)
        wire.encode_body(body)
        self.messages.append((conn, body))
        assert conn == CONN or not (body.tokens or body.ended or body.prompts)
        self.ended += body.ended
        for token in [each for told in body.tokens for each in told.apart()]:
            known = self.tokens[token.request_id][token.index]
            assert token.position == len(known)
            known.append(token.token_id)


class NoLinks:
    """LaneEnds that must not be used."""

    def send_end(self, *_: object) -> SendEnd:
        raise AssertionError("no link is opened")

    def receive_end(self, *_: object) -> ReceiveEnd:
        raise AssertionError("no link is opened")


class MidStepCredit(ToyRunner):
    """D's credit comes while the step runs, between two layers."""

    worker: Worker
    credit = wire.Credit("r", 0)

    def forward(self, chunks: list[tuple[Request, int]], on_layer: Callable[[int], None] | None = None) -> RunnerOutput:
        output = super().forward(chunks)
        if on_layer is not None:
            self.worker.handover.credits.put(("link", self.credit))
            on_layer(1)
        return output


class World:
    def __init__(self, shares_cores: bool = True) -> None:
        self.now_s = 0.0
        self.post = Post()
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        prefix = PrefixScope("model", Numerics())
        scheduler = StepScheduler(BlockPool(NUM_BLOCKS), BLOCK_SIZE, 4, 16, prefix)
        config = WorkerConfig(
            name="decode-0",
            role="decode",
            server_ip="127.0.0.1",
            bind_address="127.0.0.1",
            device_ids=["0"],
            epoch=1,
            credentials=Credentials(b""),
            num_threads=1,
            kv_transport="auto",
            kv_port_range=PortRange(),
            engine=EngineConfig(model="m"),
            timeouts=Timeouts(),
        )
        self.worker = Worker(
            config,
            EngineCore(ToyRunner(NUM_BLOCKS, BLOCK_SIZE), scheduler),
            Side("decode-0@1", b"", "model", Numerics(), LAYOUT, NUM_BLOCKS, 0, wire.KVOptions()),
            EngineLimits(VOCAB_SIZE, 40, RopeLimit()),
            self.post,
            NoLinks(),
            self.inbox,
            clock=lambda: self.now_s,
            shares_cores=shares_cores,
        )
        self.inbox.put(ConnOpened(CONN, "scheduler@1", "scheduler"))

    def submit(
        self, name: str, prompt: list[int], sampling: Sampling, deadline_s: float = 0.0, gathers: bool = False
    ) -> None:
        self.mail(wire.Submit(name, 0, name, "hybrid", "", Order(prompt, sampling, gathers=gathers), deadline_s))

    def mail(self, body: wire.Body) -> None:
        self.inbox.put(Mail(CONN, "scheduler@1", body))

    def read_mail(self) -> None:
        handle_all(self.worker.inbox, self.worker._handle, wait_s=0.0)

    def step(self) -> None:
        self.read_mail()
        self.worker._tick()
        self.worker._step()
        self.worker._publish_load()
        self.worker._outbox.flush()
        self.worker.core.scheduler.check()
        self.now_s += 0.2

    def run(self, num_steps: int = 400) -> None:
        for _ in range(num_steps):
            self.step()
            if not self.worker.core.scheduler.requests and self.inbox.empty():
                return
        raise AssertionError("not ended")

    def assert_home(self) -> None:
        assert self.worker.core.scheduler.blocks.num_held == 0
        assert not self.worker.legs.sequences
        assert not self.worker.legs.deadlines


def sampling(n: int = 3, **changes: Any) -> Sampling:
    return Sampling(**{"n": n, "max_tokens": 8, "temperature": 1.0, "seed": 4, "ignore_eos": True, **changes})


def beams(width: int, **changes: Any) -> Sampling:
    return sampling(**{"n": width, "beam_width": width, "temperature": 0.0, **changes})


PROMPT = [5, 6, 7, 8, 9]


def found(world: World, name: str) -> list[list[int]]:
    return [world.post.tokens[name][index] for index in range(3)]


def peer(name: str, epoch: int, role: Role) -> wire.PeerInfo:
    return wire.PeerInfo(
        name=name, epoch=epoch, role=role, host=f"host of {name}", control_port=1, public_key=b"k" * 32
    )


def test_the_scheduler_says_which_role_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    links: list[list[str]] = []
    monkeypatch.setattr(
        world.worker.handover.out_links, "set_peers", lambda peers: links.append([p.name for p in peers])
    )
    others = [peer("prefill-0", 2, "prefill"), peer("decode-1", 3, "decode"), peer("prefill-1", 4, "decode")]
    for role in ("decode", "prefill", "decode"):
        world.mail(wire.Peers([peer("decode-0", 1, role), *others]))  # type: ignore[arg-type]
    world.mail(wire.Peers([peer("decode-0", 1, "prefill"), *others]))
    world.mail(wire.Peers([peer("decode-0", 99, "decode"), *others]))  # another life of its name
    world.mail(wire.Peers([]))
    world.step()
    both = ["decode-1", "prefill-1"]
    assert links == [[], both, [], both, ["decode-0", *both], []]


def test_links_are_taken_from_those_that_the_scheduler_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    opened = wire.LinkOpen("l", "model", Numerics(), LAYOUT.to_info(), NUM_BLOCKS, wire.KVOptions(), [])
    told: list[bool] = []
    monkeypatch.setattr(
        world.worker.handover.in_links, "on_open", lambda conn, peer, opened, is_told: told.append(is_told)
    )
    world.mail(wire.Peers([peer("decode-0", 1, "decode"), peer("prefill-0", 2, "prefill")]))
    for name in ("prefill-0@2", "prefill-0@3", "prefill-9@2"):
        world.inbox.put(Mail("link", name, opened))
    world.step()
    assert told == [True, False, False]


def test_all_sequences_come_to_their_end() -> None:
    world = World()
    world.submit("r", PROMPT, sampling())
    world.run()
    assert found(world, "r") == generate_alone(PROMPT, sampling())
    world.assert_home()


def test_what_metrics_show_is_reported_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there before the step that an admitted request begins with, and nothing is reported without a change."""
    world = World()
    worker = world.worker
    for _ in range(3):
        world.step()
    assert world.post.num_beats <= 1  # of the pool's size
    before, seen = world.post.num_beats, []
    run = worker.core.run

    def note(plan: StepPlan) -> StepResult:
        seen.append((worker.load.num_running, world.post.num_beats - before))
        return run(plan)

    monkeypatch.setattr(worker.core, "run", note)
    world.submit("r", PROMPT, sampling(n=1, max_tokens=2))
    world.run()
    assert seen[0] == (1, 1)
    assert worker.load.num_running == 0
    assert worker.load.step_tokens == wire.Tally((1, 1, *[0] * 12), len(PROMPT) + 1)
    assert worker.load.preemptions == wire.Tally((1, *[0] * 7), 0)
    before = world.post.num_beats
    for _ in range(5):
        world.step()
    assert world.post.num_beats == before


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_one_sequence_is_aborted_and_the_others_go_on(index: int, num_steps: int) -> None:
    """It happens before they are forked, just after, and later.

    The token of the fork itself is reported in any case.
    """
    world = World()
    world.submit("r", PROMPT, sampling())
    for _ in range(num_steps):
        world.step()
    world.mail(wire.Abort("r", 0, index))
    world.run()
    expected = generate_alone(PROMPT, sampling())
    for at, tokens in enumerate(found(world, "r")):
        assert tokens == (expected[at][: max(1, num_steps)] if at == index else expected[at])
    world.assert_home()


@pytest.mark.parametrize("lens", [{0: 3}, {0: 0, 1: 2, 2: 7}, {1: 1, 2: 1}, {0: 0, 2: 0}])
def test_sequences_go_on_after_what_was_told_elsewhere(lens: dict[int, int]) -> None:
    """Some have ended elsewhere and are not sent; for some nothing was reported yet."""
    world = World()
    expected = generate_alone(PROMPT, sampling())
    resumed = [Resumed(index, expected[index][:num_told]) for index, num_told in lens.items()]
    world.mail(wire.Submit("r", 1, "r-1", "hybrid", "", Order(PROMPT, sampling()), 0.0, resumed))
    for index, num_told in lens.items():
        world.post.tokens["r"][index] = list(expected[index][:num_told])
    world.run()
    assert dict(world.post.tokens["r"]) == {index: expected[index] for index in lens}
    world.assert_home()


@pytest.mark.parametrize("seed", range(20))
def test_sequences_that_go_on_do_not_take_each_others_blocks(seed: int) -> None:
    """They recompute reported tokens, and by then the prefix cache has blocks of siblings."""
    world, rng = World(), random.Random(seed)
    prompt = [rng.randrange(5, VOCAB_SIZE) for _ in range(rng.randrange(1, 12))]
    params = sampling(max_tokens=24, seed=seed)
    expected = generate_alone(prompt, params)
    told = {index: expected[index][: rng.choice([1, 9, 15, rng.randrange(24)])] for index in range(3)}
    resumed = [Resumed(index, token_ids) for index, token_ids in told.items()]
    gathers = rng.random() < 0.5
    world.mail(wire.Submit("r", 1, "r-1", "hybrid", "", Order(prompt, params, gathers=gathers), 0.0, resumed))
    world.post.tokens["r"].update({index: list(token_ids) for index, token_ids in told.items()})
    world.run()
    assert found(world, "r") == expected
    world.assert_home()


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_one_of_the_sequences_that_go_on_is_aborted(num_steps: int) -> None:
    world = World()
    expected = generate_alone(PROMPT, sampling())
    resumed = [Resumed(index, expected[index][:2]) for index in range(3)]
    world.mail(wire.Submit("r", 1, "r-1", "hybrid", "", Order(PROMPT, sampling()), 0.0, resumed))
    for index in range(3):
        world.post.tokens["r"][index] = list(expected[index][:2])
    for _ in range(num_steps):
        world.step()
    world.mail(wire.Abort("r", 1, 1))
    world.run()
    tokens = found(world, "r")
    assert (tokens[0], tokens[2]) == (expected[0], expected[2])
    assert len(tokens[1]) < len(expected[1])
    world.assert_home()


@pytest.mark.parametrize(
    ("leg", "resumed"),
    [
        ("prefill", [Resumed(0, [1])]),
        ("hybrid", [Resumed(0, [1]), Resumed(0, [2])]),
        ("hybrid", [Resumed(3, [1])]),
        ("hybrid", [Resumed(0, [1] * 8)]),
        ("hybrid", [Resumed(0, [VOCAB_SIZE])]),
    ],
)
def test_what_cannot_go_on_is_refused(leg: Leg, resumed: list[Resumed]) -> None:
    world = World()
    world.mail(wire.Submit("r", 1, "r-1", leg, "decode-0@2", Order(PROMPT, sampling()), 0.0, resumed))
    world.step()
    (end,) = [ended for _, outputs in world.post.messages for ended in outputs.ended]
    assert "resumed" in (end.error or "")
    assert not end.is_fault
    world.assert_home()


def test_beams_leave_all_at_once() -> None:
    """In one message; no token before it, and an abort of one of them is none."""
    world = World()
    world.submit("r", PROMPT, beams(3))
    for _ in range(4):
        world.step()
    assert not world.post.tokens
    assert len(world.worker.legs.sequences["r#0"]) == 3
    world.mail(wire.Abort("r", 0, 1))
    world.run()
    assert found(world, "r") == generate_alone(PROMPT, beams(3))
    (message,) = [outputs for _, outputs in world.post.messages if outputs.tokens]
    assert [t.finish_reason for t in message.tokens if t.finish_reason is not None] == ["length"] * 3
    assert len(message.tokens) == 24
    world.assert_home()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_aborted_beams_leave_nothing(num_steps: int) -> None:
    world = World()
    world.submit("r", PROMPT, beams(4))
    for _ in range(num_steps):
        world.step()
    world.mail(wire.Abort("r", 0))
    world.run()
    assert not world.post.tokens
    world.assert_home()


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_candidates_are_handed_over_and_not_told(monkeypatch: pytest.MonkeyPatch, max_tokens: int) -> None:
    """A search of one token ends where the prompt was computed."""
    world = World()
    worker, links = world.worker, world.worker.handover.out_links
    ends: list[wire.KVEnd] = []
    sent: list[wire.Body] = []
    monkeypatch.setattr(links, "link_to", lambda peer: "link")
    monkeypatch.setattr(links, "limits", lambda conn: ShipLimits(BLOCK_SIZE, 1 << 20))
    monkeypatch.setattr(links, "send", lambda conn, body: sent.append(body))
    monkeypatch.setattr(links, "ship", lambda *_: None)
    monkeypatch.setattr(links, "ship_end", lambda conn, end: ends.append(end))
    params = beams(3, max_tokens=max_tokens)
    world.mail(wire.Submit("r", 0, "r", "prefill", "decode-0@2", Order(PROMPT, params), 0.0))
    world.step()
    if max_tokens > 1:
        world.inbox.put(Mail("link", "decode-0@2", wire.Credit("r", 0)))
        worker.handover.credits.put(("link", wire.Credit("r", 0)))
        world.step()
        assert not world.post.tokens
        (end,) = ends
        assert are_first_tokens(Request("r", Order(PROMPT, params)), end.first_tokens, VOCAB_SIZE)
        world.mail(wire.Abort("r", 0))
        world.step()
    else:
        assert found(world, "r") == generate_alone(PROMPT, params)
        assert not ends
    assert sent[-1] == wire.Revoke("r")
    world.assert_home()


def test_tokens_with_many_logprobs_are_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message has a limited size. The prompts come first and the ends last."""
    monkeypatch.setattr(outbox, "MOST_LOGPROBS", 10)
    world = World()
    many = sampling(n=1, max_tokens=3, logprobs=6)
    for name in "abc":
        world.submit(name, PROMPT, many)
    world.run()
    numbers = [[len(token.logprobs.top) for token in each.tokens if token.logprobs] for _, each in world.post.messages]
    assert max(map(sum, numbers)) <= 10
    assert sum(map(sum, numbers)) == 3 * 3 * 6
    for name in "abc":
        assert world.post.tokens[name][0] == generate_alone(PROMPT, many)[0]
        told = [{each.request_id for each in message.prompts} for _, message in world.post.messages]
        tokens = [{each.request_id for each in message.tokens} for _, message in world.post.messages]
        prompted, first = ([name in each for each in found].index(True) for found in (told, tokens))
        assert prompted <= first


def test_the_only_sequence_is_aborted_by_its_index() -> None:
    world = World()
    world.submit("r", PROMPT, sampling(n=1))
    world.mail(wire.Abort("r", 0, 0))
    world.run()
    world.assert_home()


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_deadline_ends_all_sequences_once(num_steps: int) -> None:
    world = World()
    world.submit("r", PROMPT, sampling(), deadline_s=0.1 + 0.2 * num_steps)
    world.run()
    assert [(e.request_id, e.error) for e in world.post.ended] == [("r", "the request's deadline has passed")]
    world.assert_home()


@pytest.mark.parametrize("n", [1, 3])
def test_a_guide_that_cannot_be_followed_ends_its_request_only(n: int) -> None:
    world = World()
    world.submit("r", PROMPT, sampling())
    world.submit("guided", PROMPT, sampling(n=n, guide=Guide("regex", "a+")))
    world.submit("too long", PROMPT, sampling(n=n, guide=Guide("regex", "a" * (MAX_GUIDE_NUM_CHARS + 1))))
    world.run()
    why = "its guide cannot be followed: this engine has no tokenizer to follow a guide with"
    ended = {each.request_id: each.error for each in world.post.ended}
    assert ended == {"guided": why, "too long": "a guide of 262145 characters; at most 262144 are allowed"}
    assert len(world.post.ended) == 2
    assert found(world, "r") == generate_alone(PROMPT, sampling())
    world.assert_home()


def test_a_scheduler_that_is_gone_leaves_nothing_behind() -> None:
    world = World()
    world.submit("r", PROMPT, sampling())
    world.submit("s", PROMPT, sampling(n=1))
    world.step()
    world.step()
    world.inbox.put(ConnClosed(CONN, "scheduler@1", "cut"))
    world.run()
    world.assert_home()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"n": 0}, "n 0 must be in 1 to 1024"),
        ({"temperature": float("nan")}, "temperature nan must be in [0, inf)"),
        ({"min_p": 1.5}, "min_p 1.5 must be in [0, 1]"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias must be finite numbers"),
        ({"top_p": 0.0}, "top_p 0.0 must be in (0, 1]"),
        ({"repetition_penalty": -1.0}, "repetition_penalty -1.0 must be in (0, inf)"),
        ({"logit_bias": ((VOCAB_SIZE, 1.0),)}, "token ids in sampling parameters must be in 0 to"),
        ({"allowed_token_ids": (-1,)}, "token ids in sampling parameters must be in 0 to"),
        ({"bad_words": ((),)}, "token ids in sampling parameters must be in 0 to"),
        ({"logprobs": -1}, "logprobs, prompt_logprobs and min_tokens must not be negative"),
        ({"prompt_logprobs": 10**6}, "prompt_logprobs 1000000 for 5 tokens are too many to tell"),
        ({"max_tokens": 36}, "5 prompt tokens and max_tokens 36 exceed max_model_len 40"),
    ],
)
def test_what_the_engine_cannot_do_ends_that_leg_only(changes: dict[str, Any], problem: str) -> None:
    world = World()
    world.submit("good", PROMPT, sampling())
    world.submit("bad", PROMPT, sampling(**changes))
    world.run()
    assert [e.request_id for e in world.post.ended] == ["bad"]
    assert (world.post.ended[0].error or "").startswith(problem)
    assert found(world, "good") == generate_alone(PROMPT, sampling())
    world.assert_home()


@pytest.mark.parametrize("seed", range(60))
def test_random_aborts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MOST_UNTOLD", 3)
    rng = random.Random(seed)
    world = World()
    wanted: dict[str, tuple[list[int], Sampling]] = {}
    touched: set[tuple[str, int]] = set()
    for at in range(200):
        if at < 60 and rng.random() < 0.4:
            name = f"r{at}"
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 14))]
            wanted[name] = prompt, sampling(n=rng.randrange(1, 7), max_tokens=rng.randrange(1, 12), seed=at)
            if rng.random() < 0.3:
                wanted[name] = (
                    prompt,
                    beams(rng.randrange(2, 7), n=rng.choice([1, 2]), max_tokens=rng.randrange(1, 12)),
                )
            world.submit(name, *wanted[name], deadline_s=0.0, gathers=rng.random() < 0.5)
        if wanted and rng.random() < 0.2:
            name, index = rng.choice(list(wanted)), rng.randrange(-1, 7)
            world.mail(wire.Abort(name, 0, index))
            touched |= {(name, i) for i in range(7) if index in (-1, i)}
        world.step()
    world.run()
    world.assert_home()
    for name, (prompt, params) in wanted.items():
        for index, expected in enumerate(generate_alone(prompt, params)):
            tokens = world.post.tokens[name][index]
            assert tokens == expected[: len(tokens)]
            assert len(tokens) == len(expected) or (name, index) in touched, f"{name}/{index} never ended"


def test_the_loop_says_that_it_came_round_between_steps() -> None:
    world, steps = World(), []
    world.submit("r", PROMPT, sampling(1))

    def came_round() -> None:
        steps.append(world.worker.core.num_steps)
        if not world.worker.legs.sequences:
            world.inbox.put(StopEngine())

    world.worker.run(came_round)
    assert steps == list(range(len(steps)))
    assert len(steps) > sampling(1).max_tokens
    world.assert_home()


# ---- answers that nobody wants early


def test_batches_are_told_apart_by_name_and_priority() -> None:
    world = World()
    for name, batch, priority in (("a", "x", 0), ("b", "x", 1), ("c", "", 0)):
        submit = wire.Submit(
            name, 0, name, "hybrid", "", Order(PROMPT, sampling(1), priority=priority, batch=batch), 0.0
        )
        world.mail(submit)
    world.step()
    batches = {key: request.batch for key, request in world.worker.core.scheduler.requests.items()}
    assert len({batches["a#0"], batches["b#0"], ""}) == 3
    assert batches["c#0"] == ""
    world.run()


def test_a_step_waits_until_there_is_no_more_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world, waits = World(), [True]
    monkeypatch.setattr(Patience, "waits", property(lambda self: waits[0]))
    world.submit("r", PROMPT, sampling(1))
    for _ in range(3):
        world.step()
    assert world.worker.core.num_steps == 0
    waits[0] = False
    world.run()
    assert found(world, "r")[:1] == generate_alone(PROMPT, sampling(1))[:1]


@pytest.mark.parametrize("shares_cores", [False, True])
def test_on_a_device_of_its_own_and_when_it_drains_no_step_waits(
    shares_cores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Patience, "waits", property(lambda self: True))
    world = World(shares_cores)
    world.submit("r", PROMPT, sampling(1))
    world.step()
    if shares_cores:
        assert world.worker.core.num_steps == 0
        world.inbox.put(StartDrain())
    world.run()
    assert len(found(world, "r")[0]) == sampling(1).max_tokens


def test_heartbeats_hear_at_once_that_nothing_runs_any_more() -> None:
    world = World()
    world.submit("r", PROMPT, sampling(1))
    ends, monotonic_s = [], 0.0

    def came_round() -> None:
        nonlocal monotonic_s
        monotonic_s += 1e-6  # far less than what a load may be old
        if not world.worker.legs.sequences and world.worker.core.num_steps:
            ends.append(world.worker.load.num_running)
            if len(ends) == 2:
                world.inbox.put(StopEngine())

    world.worker._clock = lambda: monotonic_s
    world.worker.run(came_round)
    assert ends[-1] == 0


# ---- tokens that nobody reads one by one


def positions_told(world: World, index: int = 0) -> list[list[int]]:
    """Returns which tokens of one sequence came together."""
    tokens = [token for _, outputs in world.post.messages for token in outputs.tokens if token.index == index]
    return [[each.position for each in token.apart()] for token in tokens]


@pytest.mark.parametrize("n", [1, 3])
def test_after_the_first_many_tokens_are_told_together(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MOST_UNTOLD", 2)
    world = World()
    world.submit("r", PROMPT, sampling(n), gathers=True)
    world.run()
    assert found(world, "r")[:n] == generate_alone(PROMPT, sampling(n))
    assert [positions_told(world, index) for index in range(n)] == [[[0], [1, 2, 3], [4, 5, 6], [7]]] * n
    world.assert_home()


def test_a_sequence_that_goes_on_is_told_from_there() -> None:
    world = World()
    (expected,) = generate_alone(PROMPT, sampling(1))
    resumed = [Resumed(0, expected[:3])]
    world.mail(wire.Submit("r", 1, "r-1", "hybrid", "", Order(PROMPT, sampling(1), gathers=True), 0.0, resumed))
    world.post.tokens["r"][0] = expected[:3]
    world.run()
    assert found(world, "r")[0] == expected
    assert positions_told(world) == [[3, 4, 5, 6, 7]]
    world.assert_home()


@pytest.mark.parametrize("changes", [{"logprobs": 1}, {"beam_width": 3, "temperature": 0.0}])
def test_tokens_with_logprobs_and_those_of_beams_are_told_singly(changes: dict[str, Any]) -> None:
    world, params = World(), sampling(1, **changes)
    world.submit("r", PROMPT, params, gathers=True)
    world.run()
    assert found(world, "r")[:1] == generate_alone(PROMPT, params)
    assert positions_told(world) == [[position] for position in range(8)]


def test_what_was_not_told_before_an_abort_never_is() -> None:
    world = World()
    world.submit("r", PROMPT, sampling(2), gathers=True)
    for _ in range(4):
        world.step()
    world.mail(wire.Abort("r", 0, 1))
    world.run()
    expected = generate_alone(PROMPT, sampling(2))
    assert found(world, "r")[:2] == [expected[0], expected[1][:1]]
    world.assert_home()


# ---- reports of its transfers


def told(world: World, conn: str = CONN) -> list[str]:
    return [event.what for to, outputs in world.post.messages if to == conn for event in outputs.events]


def test_events_go_with_tokens() -> None:
    """A leg's first and last; nothing for the tokens between them, and no message of their own."""
    world = World()
    world.submit("r", [1, 2, 3], sampling(n=1))
    world.run()
    assert told(world) == ["submitted", "admitted", "finished"]
    assert [outputs.now_s for _, outputs in world.post.messages] == pytest.approx([0.2 * at for at in range(8)])
    assert all(outputs.tokens for _, outputs in world.post.messages)


def test_events_alone_wait_for_the_next_tick() -> None:
    world = World()
    world.step()
    for at in range(3):
        world.worker.tracer.note("t", "landed", start=at)
        world.step()
        world.now_s -= 0.19  # three steps within one tick
    assert told(world) == ["landed"]
    world.now_s += 0.1
    world.step()
    assert told(world) == ["landed"] * 3
    assert len(world.post.messages) == 2


def test_every_scheduler_is_told() -> None:
    """A scheduler without tokens in this step gets them with the next tick; none gets them twice."""
    world = World()
    world.inbox.put(ConnOpened("other-conn", "other@1", "scheduler"))
    world.submit("r", [1, 2, 3], sampling(n=1))
    world.run()
    world.step()
    assert told(world) == told(world, "other-conn") == ["submitted", "admitted", "finished"]
    world.inbox.put(ConnClosed("other-conn", "other@1", "gone"))
    world.submit("s", [1, 2, 3], sampling(n=1))
    world.run()
    assert len(told(world, "other-conn")) == 3


def test_a_scheduler_that_shares_the_worker_hears_that_it_is_full() -> None:
    """Only legs that may be refused; those that wait are served, and each scheduler's share is reported."""
    world = World()
    world.mail(wire.Peers([peer("decode-0", 1, "decode")], 7))
    world.inbox.put(ConnOpened("other-conn", "other@1", "scheduler"))
    for at in range(LEAST_WAITING + 1):
        world.mail(wire.Submit(f"r{at}", 0, f"r{at}", "hybrid", "", Order([1, 2, 3], sampling(n=1)), 0.0, [], 5, True))
    world.mail(wire.Submit("kept", 0, "kept", "hybrid", "", Order([1, 2, 3], sampling(n=1)), 0.0, [], 5))
    world.read_mail()
    assert world.worker.legs.outstanding() == {CONN: 5 * (LEAST_WAITING + 1)}
    world.worker._publish_load(at_once=True)
    assert world.worker.load.outstanding == {"scheduler@1": 5 * (LEAST_WAITING + 1), "other@1": 0}
    world.run()
    assert [(end.request_id, end.is_full, end.is_fault) for end in world.post.ended] == [
        (f"r{LEAST_WAITING}", True, True)
    ]
    assert world.worker.legs.outstanding() == {}
    world.assert_home()


def test_one_attempt_of_two_schedulers_is_computed_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have the same request, which one of them resumes; neither must wait for ever."""
    world = World()
    ends: list[tuple[str, LegEnd]] = []
    monkeypatch.setattr(world.worker._outbox, "add_end", lambda client, end: ends.append((client, end)))
    submit = wire.Submit("r", 1, "r-1", "hybrid", "", Order(PROMPT, sampling(n=1)), 0.0)
    world.inbox.put(ConnOpened("other-conn", "other@1", "scheduler"))
    for conn in (CONN, CONN, "other-conn"):
        world.inbox.put(Mail(conn, "scheduler", submit))
    world.run()
    assert ends == [("other-conn", LegEnd("r", 1, OTHERS, is_fault=True))]
    assert world.post.tokens["r"][0] == generate_alone(PROMPT, sampling(n=1))[0]
    world.assert_home()


def test_an_attempt_whose_leg_still_ends_can_continue_elsewhere() -> None:
    world = World()
    request = Request("r", Order(PROMPT, sampling(n=1)), attempt=1)
    world.worker.core.scheduler.requests[request.key] = request
    world.mail(wire.Submit("r", 1, "r-1", "hybrid", "", request.order, 0.0))
    world.read_mail()
    world.worker._outbox.flush()
    assert world.post.ended == [LegEnd("r", 1, ENDING, is_fault=True)]


def test_a_whole_answer_of_a_stream_that_moves_has_its_window() -> None:
    """The abort crosses the last token."""
    world = World()
    keep = wire.Keep(b"d" * 32, 30.0, 1 << 20, b"recipe")
    world.mail(wire.Submit("r", 0, "r-0", "hybrid", "", Order(PROMPT, sampling(n=1)), 0.0, keep=keep))
    world.run()
    world.now_s += 100
    world.step()
    assert len(world.worker.legs.records) == 1
    world.mail(wire.Abort("r", 0))
    world.step()
    assert len(world.worker.legs.records) == 1
    world.now_s += 31
    world.step()
    assert not world.worker.legs.records


def test_legs_that_wait_for_blocks_in_a_store_count_as_waiting() -> None:
    world = World()
    scheduler = world.worker.core.scheduler
    host = scheduler.blocks.tier = HostTier(0, 0, LoadCost(BLOCK_SIZE))
    lower = LowerTier("shared", host, 0, 1, BLOCK_SIZE, lambda: world.now_s)
    host.lower = [lower]
    world.worker.take_tiers(
        EngineTiers(scheduler, {"shared": lower}, None, world.worker.begin_leg, lambda: world.now_s)
    )
    world.mail(wire.Peers([peer("decode-0", 1, "decode")], 7))
    world.inbox.put(ConnOpened("other-conn", "other@1", "scheduler"))
    for at in range(LEAST_WAITING + 1):
        order = Order([1, 2, 3, 4, 5], sampling(n=1))
        world.mail(wire.Submit(f"r{at}", 0, f"r{at}", "hybrid", "", order, 0.0, [], 5, True))
    world.read_mail()
    world.worker._publish_load(at_once=True)
    assert len(world.worker.tiers) == world.worker.load.num_waiting == LEAST_WAITING
    assert world.worker.load.outstanding == {"scheduler@1": 5 * LEAST_WAITING, "other@1": 0}
    world.worker._outbox.flush()
    assert [(end.request_id, end.is_full) for end in world.post.ended] == [(f"r{LEAST_WAITING}", True)]
    world.worker.tiers.release_all()
    world.run()
    assert len(world.post.ended) == 1, "the others are served"


def test_only_schedulers_that_share_the_worker_are_told_of_each_others_legs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a fencing number there is one scheduler, and the sums would be made for nobody."""
    world = World()
    world.mail(wire.Peers([peer("decode-0", 1, "decode")]))
    world.inbox.put(ConnOpened("other-conn", "other@1", "scheduler"))
    monkeypatch.setattr(world.worker.legs, "outstanding", lambda: pytest.fail("it is summed for nobody"))
    world.step()
    world.worker._publish_load(at_once=True)
    assert world.worker.load.outstanding == {}


def test_a_leg_that_is_refused_or_late_has_failed() -> None:
    world = World()
    world.submit("long", [1] * 60, sampling(n=1))
    world.submit("late", [1, 2, 3], sampling(n=1, max_tokens=30), deadline_s=0.5)
    world.run()
    events = [(event.transfer_id, event.what) for _, outputs in world.post.messages for event in outputs.events]
    assert [what for name, what in events if name == "long"] == ["submitted", "failed"]
    assert [what for name, what in events if name == "late"] == ["submitted", "admitted", "failed"]


def test_layers_leave_before_the_step_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A credit that arrives during the step counts, too; layers already sent are not sent again."""
    world = World()
    worker, links = world.worker, world.worker.handover.out_links
    runner = MidStepCredit(NUM_BLOCKS, BLOCK_SIZE)
    worker.core.runner, runner.worker = runner, worker
    shipped: list[tuple[wire.KVPiece, int]] = []
    ends: list[wire.KVEnd] = []
    monkeypatch.setattr(links, "link_to", lambda peer: "link")
    monkeypatch.setattr(links, "limits", lambda conn: ShipLimits(BLOCK_SIZE, 1 << 20))
    monkeypatch.setattr(links, "send", lambda conn, body: None)
    monkeypatch.setattr(links, "ship", lambda conn, tid, index, piece: shipped.append((piece, worker.core.num_steps)))
    monkeypatch.setattr(links, "ship_end", lambda conn, end: ends.append(end))
    world.mail(wire.Submit("r", 0, "r", "prefill", "decode-0@2", Order(PROMPT, sampling(n=1)), 0.0))
    world.step()
    (request,) = worker.core.scheduler.requests.values()
    assert shipped == [(wire.KVPiece(0, 5, 0, 1, request.block_table), 0)], "not while the step ran"
    assert [end.num_chunks for end in ends] == [1]
    assert worker.handover.exports.held.take("link", "r")
    world.worker.inbox.put(HandedOver("link", "r"))
    world.step()
    world.assert_home()


def test_a_credit_that_makes_no_sense_waits_for_the_end_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends its request, whose blocks the step still writes."""
    world = World()
    worker, links = world.worker, world.worker.handover.out_links
    runner = MidStepCredit(NUM_BLOCKS, BLOCK_SIZE)
    worker.core.runner, runner.worker, runner.credit = runner, worker, wire.Credit("r", 3)
    sent: list[wire.Body] = []
    monkeypatch.setattr(links, "link_to", lambda peer: "link")
    monkeypatch.setattr(links, "limits", lambda conn: ShipLimits(BLOCK_SIZE, 1 << 20))
    monkeypatch.setattr(links, "send", lambda conn, body: sent.append(body))
    world.mail(wire.Submit("r", 0, "r", "prefill", "decode-0@2", Order(PROMPT, sampling(n=1)), 0.0))
    world.step()
    assert worker.core.scheduler.requests, "it was ended under the running step"
    world.inbox.put(Mail("link", "decode-0@2", wire.Credit("r", 3)))
    world.step()
    assert [end.error for end in world.post.ended] == ["decode-0@2 wants KV cache from token 3 on"]
    assert sent[-1] == wire.Revoke("r")
    world.assert_home()


def test_what_the_mail_brought_leaves_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may take long: a refusal, or the first tokens of a sequence that joins, do not wait for its results."""
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
    world.worker.run()
    assert ended == [["too long"]]
