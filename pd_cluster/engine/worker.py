"""The engine of one worker among its peers: mail in, steps, mail out. Start reading at `run`.

Only the thread that calls `run` changes requests or blocks; the mailbox (mail.py) and the links' threads only put
events into `inbox`. Knows nothing of HTTP or of routing.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

import msgspec

from pd_cluster import wire
from pd_cluster.engine.adapters import AdapterHost, Keeper, WorkerAdapters, reader_of
from pd_cluster.engine.drain import WorkerDrain
from pd_cluster.engine.encode.encoders import Encoders
from pd_cluster.engine.handover.cache_news import CacheNews
from pd_cluster.engine.handover.events import AdapterLoaded, ConnClosed, ConnOpened, Event, Mail, StartDrain, handle_all
from pd_cluster.engine.handover.handover import Handover, Means
from pd_cluster.engine.handover.links import LaneEnds, Post, Side
from pd_cluster.engine.kv_events import KVEvents
from pd_cluster.engine.legs import Legs
from pd_cluster.engine.load import load_of
from pd_cluster.engine.outbox import Outbox
from pd_cluster.engine.pace import StepPace
from pd_cluster.engine.sleep import EngineSleep
from pd_cluster.engine.step.core import EngineCore, StepResult
from pd_cluster.engine.step.limits import EngineLimits
from pd_cluster.engine.step.plan import StepPlan
from pd_cluster.engine.tiers import EngineTiers
from pd_cluster.engine.trace import LegNotes, Tracer
from pd_cluster.kv.tier_orders import TierContents, TierDone
from pd_cluster.model.batch import OnLayer
from pd_cluster.settings.config import WorkerConfig
from pd_cluster.transport.events import EncoderReached, EncoderUnreached, FeaturesRead
from pd_cluster.types import LegEnd, LinkState, Status, TokenOutput

log = logging.getLogger(__name__)

TICK_S = 0.1  # how often deadlines are checked
LOAD_S = 0.02  # the age that the reported load may have, apart from a step's duration
IDLE_WAIT_S = 0.05


class Worker:
    def __init__(
        self,
        config: WorkerConfig,
        core: EngineCore,
        side: Side,
        limits: EngineLimits,
        post: Post,
        ends: LaneEnds,
        inbox: queue.SimpleQueue[Event],
        clock: Callable[[], float] = time.monotonic,
        shares_cores: bool = True,
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        """`shares_cores`: prefill instances compute on the same cores as this one.

        `rest` is called when nothing is left to compute.
        """
        self.core = core
        self.inbox = inbox
        self.load = wire.Load()  # read by the mailbox's thread; replaced, never changed
        self._post = post
        self._clock = clock
        self._schedulers: dict[str, str] = {}  # conn -> name@epoch
        self._is_shared = False  # by several schedulers: the last order had a fencing number
        self._next_tick_s = self._next_load_s = 0.0
        self._is_load_old = self._is_busy = False
        self._drain = WorkerDrain(config.timeouts.drain_timeout_s, clock)
        self._step_waits_s = 0.0  # for a landing, at most
        self._shares_cores = shares_cores
        self._rest = rest
        self.tracer = Tracer(clock)
        self._outbox = Outbox(post, self.tracer, clock)
        self._cache_news = CacheNews(post, core.scheduler.blocks)
        self._kv_events: KVEvents | None = None
        self._pace = StepPace()
        self._notes = LegNotes(self.tracer.note, clock)
        most = int(config.kv_max_quarantine * core.scheduler.blocks.num_blocks)
        means = Means(side, post, ends, inbox.put, clock, config.timeouts, self.tracer.note, config.kv_open_links, most)
        is_prefill, growth_tokens = config.role == "prefill", config.engine.growth_tokens
        self.legs = Legs(
            core,
            limits,
            self._outbox,
            self._notes,
            clock,
            lambda legs: Handover(means, core.scheduler, legs, is_prefill, growth_tokens, limits.vocab_size),
        )
        self.handover = self.legs.handover
        self.tiers = EngineTiers(core.scheduler, {}, None, self.begin_leg, clock)
        self.encoders: Encoders | None = None  # of a model that takes images
        self._sleep = EngineSleep(None, core.scheduler.blocks.forget)
        self._adapter_settings = config.engine.adapters
        self.adapters = self._adapters_of(None, {})
        core.begins = self._begin

    def take_sleep(self, go_to_level: Callable[[wire.SleepLevel], None]) -> None:
        """Lets the scheduler put the engine to sleep; see EngineSleep."""
        self._sleep = EngineSleep(go_to_level, self.core.scheduler.blocks.forget)

    def take_adapters(self, keeper: Keeper, named: Mapping[str, str]) -> None:
        """Lets the scheduler decide which adapters the model has. `named`: paths by digest of those of the start."""
        self.adapters = self._adapters_of(keeper, named)

    def _adapters_of(self, keeper: Keeper | None, named: Mapping[str, str]) -> WorkerAdapters:
        settings = self._adapter_settings
        host = AdapterHost(
            send=self._post.send,
            put=self.inbox.put,
            used=self.legs.variants,
            begin=self._enter,
            fail=self._fail,
        )
        return WorkerAdapters(keeper, reader_of(settings), host, named, settings.max_cpu_loras, self._clock)

    def take_tiers(self, tiers: EngineTiers) -> None:
        """Lets blocks go to tiers below host memory, and come back before the legs that want them begin."""
        self.tiers = tiers
        self.core.moved = tiers.flush
        self.legs.num_held = self._num_held

    def take_encoders(self, encoders: Encoders) -> None:
        """Lets encoders compute images of legs before these begin."""
        self.encoders = encoders
        self.legs.num_held = self._num_held

    def _num_held(self) -> int:
        """Counts legs that wait for blocks of lower tiers, or for images."""
        return len(self.tiers) + (0 if self.encoders is None else len(self.encoders))

    def take_kv_events(self, events: KVEvents) -> None:
        """Lets others than schedulers know what the prefix cache holds."""
        self._kv_events = events

    def _enter(self, conn: str, submit: wire.Submit, why: str = "") -> None:
        """Begins a leg, or leaves it to another instance for a reason; blocks in lower tiers come first."""
        if self._why_closed or why or self.legs.turns_away(submit) or self.tiers.admits(conn, submit):
            self.begin_leg(conn, submit, why)

    def begin_leg(self, conn: str, submit: wire.Submit, why: str = "") -> None:
        """Begins a leg whose blocks are here; its images come first."""
        if self._why_closed or why or self.encoders is None or self.encoders.admits(conn, submit):
            self.submit(conn, submit, why)

    def submit(self, conn: str, submit: wire.Submit, why: str = "") -> None:
        self.legs.submit(conn, submit, self._why_closed or why)

    def _fail(self, conn: str, submit: wire.Submit, why: str) -> None:
        self._outbox.add_end(conn, LegEnd(submit.request_id, submit.attempt, why))

    def run(self, came_round: Callable[[], None] = lambda: None) -> None:
        """Runs until `StopEngine`, or, after `StartDrain`, until nothing is left. Raises the error of mailbox or step.

        `came_round` is called between steps, and several times a second while there are none.
        """
        try:
            while self.turn(came_round):
                pass
        finally:
            self.adapters.close()
            self.tiers.close()
            self.core.guides.close()
            if self._kv_events is not None:
                self._kv_events.close()

    def turn(self, came_round: Callable[[], None] = lambda: None, wait_s: float | None = None) -> bool:
        """Mail in, one step, mail out; False once the engine has ended. Raises the error of mailbox or step.

        `wait_s`: how long mail is waited for, at most; None: no longer than there is nothing to compute.
        """
        if wait_s is None:
            wait_s = 0.0 if self._is_busy else self._idle_wait_s
        if not handle_all(self.inbox, self._handle, wait_s):
            return False
        came_round()
        self._tick()
        if self._sleep.is_due and not self._drain.has_begun and self.legs.are_over:
            self._sleep.settle()
        self._outbox.flush()  # what the mail brought need not wait for the step
        was_busy, self._is_busy = self._is_busy, self._step()
        if was_busy and not self._is_busy:
            self._rest()
        self._publish_load(at_once=was_busy and not self._is_busy)
        if is_closed := self._is_closed:
            self._release_all()
        self._outbox.flush()
        return not (is_closed and self.legs.are_over and self.inbox.empty())  # otherwise what is there is refused first

    @property
    def _is_closed(self) -> bool:
        """Whether it drains, and no scheduler will send a request because it does not know that, or it sleeps."""
        is_over = not self._schedulers or self._drain.is_heard or bool(self._sleep.closed)
        return self._drain.has_begun and is_over

    @property
    def _why_closed(self) -> str:
        """Returns why no request is taken now; "": they are."""
        return "this instance takes nothing more, because it stops" if self._is_closed else self._sleep.closed

    def _release_all(self) -> None:
        """Begins what is held: nothing more comes."""
        self.adapters.release_all()
        self.tiers.release_all()
        if self.encoders is not None:
            self.encoders.release_all()

    # ---- a step

    def _step(self) -> bool:
        """Runs one step of the engine and handles its results; False when there was nothing to compute."""
        self.handover.imports.credit()
        self._step_waits_s = 0.0
        if self._shares_cores and not self._drain.has_begun and self._waits():
            return False
        plan = self.core.plan()
        if plan.admitted or plan.preempted:
            self._publish_load(at_once=True)  # before the step, which may take long
        started_s = self._clock()
        result = self.core.run(plan)
        self._pace.computed(plan.chunks, self._clock() - started_s)
        if self.handover.is_prefill:
            self._notes.computed(plan.chunks, started_s)
        self._computed(result)
        return bool(plan.chunks)

    def _waits(self) -> bool:
        """Whether the next step waits for sequences that will share it."""
        if self.legs.patience.waits:
            return True
        if num_running := len(self.core.scheduler.running):
            self._step_waits_s = self.legs.landing_wait.left_s(self._pace.decode_step_s, num_running)
        return self._step_waits_s > 0

    def _begin(self, plan: StepPlan) -> OnLayer | None:
        """Offers the transfers of a step's new prompts, and prepares to ship its layers; see ahead.Begins."""
        exports = self.handover.exports
        for request in plan.admitted:
            if request.leg != "decode" and not request.output_token_ids:
                self._notes.admitted(request)
            if request.leg == "prefill":
                exports.admitted(request)
        plan.chunks = [chunk for chunk in plan.chunks if chunk[0].status is Status.RUNNING]
        return self.handover.layers_done if exports.computing(plan.chunks) else None

    def _computed(self, result: StepResult) -> None:
        """Sends a step's tokens, hands prompts over, and forgets what has ended."""
        legs = self.legs
        for request in result.forked:
            legs.sequences[request.leg_key].append(request)
        records = legs.records
        for request, prompt in result.prompts:
            self._outbox.add_prompt(request.client, prompt)
            if records:
                records.note_prompt(prompt)
        first_tokens: dict[str, list[TokenOutput]] = defaultdict(list)
        for request, token in result.sampled:
            self._outbox.add_token(request, token)
            if records:
                records.note(request, [token])
            if request.leg == "prefill":
                first_tokens[request.key].append(token)
            if request.status is Status.FINISHED:
                legs.forget(request)
        for request, token in result.candidates:  # clients receive a beam search at its end
            first_tokens[request.key].append(token)
        for request in result.ended:
            legs.forget(request)
        for request, _ in result.plan.chunks:
            if request.leg == "prefill":
                self.handover.exports.computed(request, first_tokens[request.key])
        for request, pooled in result.pooled:
            self._outbox.add_pooled(request.client, pooled)
            legs.forget(request)
        for request, error in result.failed:
            legs.refuse(request.leg_key, error)
        for request in result.plan.lacking:
            legs.give_up(request.leg_key, "its images' KV was dropped, and computing it again takes their pixels")

    def _publish_load(self, at_once: bool = False) -> None:
        """Refreshes the load that heartbeats read, no more often than they need.

        Changes of links are sent at once, and changes that metrics show soon: heartbeats alone would be too late.
        """
        handover = self.handover
        told = self.load.links, self.load.is_draining, self.load.sleep_level
        has_news = (self._link_states(), self._drain.has_begun, self._sleep.level) != told
        now_s = self._clock()
        self._is_load_old = not has_news and not at_once and now_s < self._next_load_s
        if self._is_load_old:
            return
        self._next_load_s = now_s + LOAD_S
        shown = self.load.shown_now
        self.load = load_of(
            self.core,
            handover.exports,
            handover.imports,
            handover.out_links,
            handover.in_links,
            self._pace,
            self._drain.has_begun,
            self.adapters.in_memory,
            self._sleep.level,
        )
        if self._is_shared:  # otherwise there are no others
            weights = self.legs.outstanding()
            outstanding = {peer: weights.get(conn, 0) for conn, peer in self._schedulers.items()}
            self.load = msgspec.structs.replace(self.load, outstanding=outstanding)
        self.load = self.tiers.counted(self.load, self._schedulers)
        if self._kv_events is not None:
            self.load = self._kv_events.counted(self.load)
        if self.encoders is not None:
            self.load = self.encoders.counted(self.load, self._schedulers)
        if has_news:
            self._post.beat()
        elif shown != self.load.shown_now:
            self._post.beat_soon()

    def _link_states(self) -> dict[str, LinkState]:
        states = self.handover.out_links.states()
        return states if self.encoders is None else {**states, **self.encoders.links.states()}

    @property
    def _idle_wait_s(self) -> float:
        """Returns how long mail may be waited for; shorter while the load may have changed since it was refreshed."""
        longest_s = self._step_waits_s or IDLE_WAIT_S
        return min(longest_s, max(0.001, self._next_load_s - self._clock())) if self._is_load_old else longest_s

    def _tick(self) -> None:
        now_s = self._clock()
        if now_s < self._next_tick_s:
            return
        self._next_tick_s = now_s + TICK_S
        self._outbox.tick()
        changes = self.core.scheduler.blocks.changes()
        self._cache_news.tick(changes)
        if self._kv_events is not None:
            self._kv_events.tick(changes)
        self.handover.tick()
        self.adapters.tick()
        self.tiers.tick()
        if self.encoders is not None:
            self.encoders.tick()
        self.legs.expire(now_s)
        self.legs.records.expire(now_s)

    # ---- events

    def _handle(self, event: Event) -> None:
        match event:
            case Mail(conn, peer, body):
                self._read(conn, peer, body)
            case AdapterLoaded():
                self.adapters.loaded(event)
            case TierDone():
                self.tiers.done(event)
            case TierContents():
                self.tiers.opened(event)
            case StartDrain():
                self._drain.begin(lambda: self._publish_load(at_once=True))  # before the step, which may take long
            case EncoderReached() | EncoderUnreached() | FeaturesRead() if self.encoders is not None:
                self.encoders.handle(event)
            case ConnOpened(conn, peer, kind):
                self._opened(conn, peer, kind)
            case ConnClosed(conn, _, reason):
                self._closed(conn, reason)
            case _:
                self.handover.handle(event)

    def _read(self, conn: str, peer: str, body: wire.Body) -> None:
        match body:
            case wire.Submit() if conn in self._schedulers:
                if self._why_closed or self.adapters.admits(conn, body):
                    self._enter(conn, body)
            case wire.Abort() if conn in self._schedulers:
                self.adapters.abort(conn, body)
                self.tiers.abort(conn, body)
                if self.encoders is not None:
                    self.encoders.abort(conn, body)
                self.legs.abort(conn, body)
            case wire.WantedAdapters() if conn in self._schedulers:
                self.adapters.read(conn, body)
            case wire.ResetCache(is_external) if conn in self._schedulers:
                self.tiers.clear(is_external)  # first: what a tier keeps is news again
                self.core.scheduler.blocks.forget()
            case wire.Release() | wire.Find() | wire.Attach() if conn in self._schedulers:
                self.legs.records.read(conn, body)
            case wire.Sleep(level) if conn in self._schedulers:
                self._sleep.wish(level)
            case wire.Peers() if conn in self._schedulers:
                self._is_shared = body.term > 0
                self.handover.set_peers(body.peers)
                if self.encoders is not None:
                    encoders = [each for each in body.peers if each.role == "encode"]
                    self.encoders.set_peers(encoders if self.handover.is_prefill else [])
            case _:
                if self.encoders is not None and self.encoders.read(conn, body):
                    return
                if not self.handover.read(conn, peer, body):
                    log.warning("%s sent a %s, which is not for a worker", peer, type(body).__name__)

    def _opened(self, conn: str, peer: str, kind: str) -> None:
        if kind != "scheduler":
            self.handover.opened(conn)
            if self.encoders is not None:
                self.encoders.links.on_opened(conn)
            return
        name = peer.partition("@")[0]
        for other, other_peer in list(self._schedulers.items()):
            if other_peer.partition("@")[0] == name:  # its predecessor, or an earlier connection of the same process
                self._closed(other, f"{peer} took its place")
        self._schedulers[conn] = peer
        self._outbox.opened(conn)
        self._cache_news.opened(conn)
        if self._drain.has_begun:
            self._post.beat()
        log.info("scheduler %s is here", peer)

    def _closed(self, conn: str, reason: str) -> None:
        peer = self._schedulers.pop(conn, None)
        self._outbox.closed(conn)
        self._cache_news.closed(conn)
        if peer is not None:
            self.legs.records.closed(conn)
            orphans = self.legs.of_client(conn)
            log.warning("scheduler %s is gone (%s); %d requests of it end", peer, reason, len(orphans))
            for key in orphans:
                self.legs.drop(key)
            self.adapters.closed(conn)
            self.tiers.closed(conn)
            if self.encoders is not None:
                self.encoders.client_closed(conn)
        self.handover.closed(conn, reason)
        if self.encoders is not None:
            self.encoders.links.on_closed(conn, reason)
