"""A worker with a recording mailbox in place of sockets, for tests/unit/test_worker*.py."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from pd_cluster import wire
from pd_cluster.engine.handover.engine_events import ConnOpened, Event, Mail
from pd_cluster.engine.handover.handover import HandoverTerms
from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.handover.links.link_ends import LocalEndpoint, ReceiveEnd, SendEnd
from pd_cluster.engine.handover.shipping import ShipLimits
from pd_cluster.engine.leg_trace import Tracer
from pd_cluster.engine.legs.legs import Legs
from pd_cluster.engine.lifecycle.availability import Availability
from pd_cluster.engine.lifecycle.engine_sleep import EngineSleep
from pd_cluster.engine.lifecycle.worker_drain import WorkerDrain
from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.stages.cache_reports import CacheReports
from pd_cluster.engine.stages.stage import Stage
from pd_cluster.engine.step.drafting import Drafting
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.engine.step.engine_limits import EngineLimits
from pd_cluster.engine.worker.worker import Cores, Worker
from pd_cluster.engine.worker.worker_loop import Loop
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.prefix_index import PrefixScope
from pd_cluster.model.layers.rope.rope_limit import RopeLimit
from pd_cluster.numerics import Numerics
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import LegEnd, RequestSpec, Resumed, Role, Sampling
from tests.support.mail import RecordedMail
from tests.support.toy_model import VOCAB_SIZE, ToyRunner

BLOCK_SIZE, NUM_BLOCKS = 4, 16
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, planes=keys_and_values(8), block_size=BLOCK_SIZE, dtype="float32")
CONN = "scheduler-conn"


class Post(RecordedMail):
    """Records the worker's messages to its scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.ended: list[LegEnd] = []
        self.messages: list[tuple[str, wire.Outputs]] = []

    def connect(self, *_: object) -> str:
        raise AssertionError("the worker must not connect to a peer")

    def send(self, conn: str, body: wire.Body) -> None:
        if isinstance(body, wire.CacheKeys):
            return
        assert isinstance(body, wire.Outputs)
        super().send(conn, body)
        self.messages.append((conn, body))
        assert conn == CONN or not (body.tokens or body.prompts)
        self.ended += body.ended
        for token in [each for told in body.tokens for each in told.apart()]:
            known = self.tokens[token.request_id][token.index]
            assert token.position == len(known)
            known.append(token.token_id)


@dataclass
class Shipped:
    sent: list[wire.Body] = field(default_factory=list)
    pieces: list[tuple[wire.KVPiece, int]] = field(default_factory=list)  # pieces, and the steps ended by then
    ends: list[wire.KVEnd] = field(default_factory=list)


class NoLinks:
    """LaneEnds whose use fails the test."""

    def send_end(self, *_: object) -> SendEnd:
        raise AssertionError("no link is opened")

    def receive_end(self, *_: object) -> ReceiveEnd:
        raise AssertionError("no link is opened")


StagesOf = Callable[[StepScheduler, Legs, Callable[[], float]], list[Stage]]


class World:
    """`stages_of` makes stages that delay legs; `go_to_level` puts the engine to sleep."""

    def __init__(
        self,
        shares_cores: bool = True,
        drain_timeout_s: float = 30.0,
        stages_of: StagesOf = lambda scheduler, legs, clock: [],
        go_to_level: Callable[[wire.SleepLevel], None] | None = None,
        drafting_of: Callable[[StepScheduler], Drafting] | None = None,
    ) -> None:
        self.now_s = 0.0
        self.post = Post()
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        prefix = PrefixScope("model", Numerics())
        scheduler = StepScheduler([LayerGroup(BlockPool(NUM_BLOCKS))], StepSizes(BLOCK_SIZE, 4, 16), prefix)
        times = Timeouts(drain_timeout_s=drain_timeout_s)
        endpoint = LocalEndpoint("decode-0@1", b"", "model", Numerics(), (LAYOUT,), (NUM_BLOCKS,), wire.KVOptions())
        clock, lanes = (lambda: self.now_s), cast(Any, NoLinks())
        self.tracer = Tracer(clock)
        context = HandoverContext(endpoint, self.post, lanes, self.inbox.put, times, clock, self.tracer)
        drafting = drafting_of(scheduler) if drafting_of is not None else None
        core = EngineCore(ToyRunner(NUM_BLOCKS, BLOCK_SIZE), scheduler, drafting=drafting)
        terms = HandoverTerms(
            is_prefill=False, growth_tokens=EngineConfig(model="").growth_tokens, vocab_size=VOCAB_SIZE
        )
        legs = Legs.of(context, core, EngineLimits(VOCAB_SIZE, 40, RopeLimit()), terms)
        sleep = EngineSleep(go_to_level, scheduler.forget)
        state = Availability(WorkerDrain(drain_timeout_s, clock), sleep)
        self.stages = [*stages_of(scheduler, legs, clock), CacheReports(self.post, scheduler.known)]
        self.worker = Worker(core, legs, self.stages, state, context, Cores(shares_cores))
        self.loop = Loop(self.inbox, self.worker)
        self.inbox.put(ConnOpened(CONN, "scheduler@1", "scheduler"))

    def submit(
        self, name: str, prompt: list[int], sampling: Sampling, deadline_s: float = 0.0, gathers: bool = False
    ) -> None:
        self.order(name, RequestSpec(prompt, sampling, gathers=gathers), deadline_s=deadline_s)

    def order(self, name: str, order: RequestSpec, attempt: int = 0, deadline_s: float = 0.0, **more: Any) -> None:
        self.mail(wire.Submit(name, attempt, name, "hybrid", "", order, deadline_s, **more))

    def another_scheduler(self) -> None:
        self.inbox.put(ConnOpened("other-conn", "other@1", "scheduler"))

    def resume(self, name: str, order: RequestSpec, told: dict[int, list[int]]) -> None:
        """Submits a request that another worker began. `told`: sequence -> tokens already sent to the client."""
        resumed = [Resumed(index, token_ids) for index, token_ids in told.items()]
        self.mail(wire.Submit(name, 1, f"{name}-1", "hybrid", "", order, 0.0, resumed))
        self.post.tokens[name].update({index: list(token_ids) for index, token_ids in told.items()})

    def take_links(self, monkeypatch: pytest.MonkeyPatch) -> Shipped:
        """Gives the engine a link, called `link`, to every peer, and records everything shipped over it."""
        links, shipped = self.worker.handover.out_links.table, Shipped()
        monkeypatch.setattr(links, "link_to", lambda peer: "link")
        monkeypatch.setattr(links, "limits", lambda conn, group: ShipLimits(BLOCK_SIZE, 1 << 20, LAYOUT.num_layers))
        monkeypatch.setattr(links, "send", lambda conn, body: shipped.sent.append(body))
        monkeypatch.setattr(
            links,
            "ship",
            lambda conn, group, name, at, piece: shipped.pieces.append((piece, self.worker.core.num_steps)),
        )
        monkeypatch.setattr(links, "ship_end", lambda conn, group, end: shipped.ends.append(end))
        return shipped

    def mail(self, body: wire.Body) -> None:
        self.inbox.put(Mail(CONN, "scheduler@1", body))

    def step(self) -> None:
        self.loop.turn(wait_s=0.0)
        self.worker.core.scheduler.check()
        self.now_s += 0.2

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def run(self, num_steps: int = 400) -> None:
        for _ in range(num_steps):
            self.step()
            if not self.worker.core.scheduler.requests and self.inbox.empty():
                return
        raise AssertionError("not ended")

    def assert_home(self) -> None:
        assert self.worker.core.scheduler.blocks.num_held == 0
        assert not self.worker.legs.table.sequences
        assert not self.worker.legs.table.deadlines


def sampling(n: int = 3, **changes: Any) -> Sampling:
    return Sampling(**{"n": n, "max_tokens": 8, "temperature": 1.0, "seed": 4, "ignore_eos": True, **changes})


PROMPT = [5, 6, 7, 8, 9]


def found(world: World, name: str) -> list[list[int]]:
    return [world.post.tokens[name][index] for index in range(3)]


def peer(name: str, epoch: int, role: Role) -> wire.PeerInfo:
    return wire.PeerInfo(name=name, epoch=epoch, role=role, host=f"of {name}", control_port=1, public_key=b"k" * 32)
