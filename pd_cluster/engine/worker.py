"""The engine of one worker among its peers: mail in, steps, mail out. Read `run` first.

Everything that changes a request or a block happens on the thread that calls `run`; the mailbox and the links'
threads only put events into `inbox`. Knows nothing of HTTP or of routing.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import defaultdict
from collections.abc import Callable

from pd_cluster import wire
from pd_cluster.admission import peer_key
from pd_cluster.config import WorkerConfig
from pd_cluster.engine.cache_news import CacheNews
from pd_cluster.engine.core import EngineCore
from pd_cluster.engine.events import Closed, Drain, Event, HandedOver, Mail, Offered, OfLane, Opened, Stop
from pd_cluster.engine.exports import Exports
from pd_cluster.engine.imports import Imports
from pd_cluster.engine.in_links import InLinks
from pd_cluster.engine.limits import Limits
from pd_cluster.engine.links import LaneEnds, Post, Progress, Side
from pd_cluster.engine.load import load_of
from pd_cluster.engine.out_links import OutLinks
from pd_cluster.engine.outbox import Outbox
from pd_cluster.engine.pace import Pace
from pd_cluster.engine.patience import Patience
from pd_cluster.engine.trace import LegNotes, Tracer
from pd_cluster.transport.events import Drained, Landed, LandFault, LinkFailed
from pd_cluster.types import LegEnd, Request, Status, TokenOutput, resume

log = logging.getLogger(__name__)

TICK_S = 0.1  # how often deadlines are looked at
LOAD_S = 0.02  # how old what heartbeats tell may be
IDLE_WAIT_S = 0.05


class Worker:
    def __init__(
        self,
        config: WorkerConfig,
        core: EngineCore,
        side: Side,
        limits: Limits,
        post: Post,
        ends: LaneEnds,
        inbox: queue.SimpleQueue[Event],
        clock: Callable[[], float] = time.monotonic,
        shares_cores: bool = True,
    ) -> None:
        """`shares_cores`: with prefill instances, which compute where this one would."""
        self.core = core
        self.inbox = inbox
        self.credits: queue.SimpleQueue[tuple[str, wire.Credit]] = queue.SimpleQueue()  # read while a step runs, too
        self.load = wire.Load()  # read by the mailbox's thread; replaced, never changed
        self._limits = limits
        self._key = side.own
        self._is_prefill = config.role == "prefill"  # until the scheduler says otherwise
        self._hosts: dict[str, str] = {}  # of the live workers, by name@epoch
        self._post = post
        self._clock = clock
        self._timeouts = config.timeouts
        self._legs: dict[str, list[Request]] = {}  # the sequences of each leg that have not ended
        self._deadlines: dict[str, float] = {}
        self._schedulers: dict[str, str] = {}  # conn -> name@epoch
        self._next_tick_s = self._next_load_s = 0.0
        self._is_draining = False
        self.tracer = Tracer(clock)
        self._outbox = Outbox(post, self.tracer, clock)
        self._cache_news = CacheNews(post, core.scheduler.blocks)
        self._pace = Pace()
        self._notes = LegNotes(self.tracer.note, clock)
        progress = Progress(clock)
        self._progress = progress
        self.out_links = OutLinks(
            side,
            post,
            ends,
            inbox.put,
            self._out_down,
            progress,
            clock,
            config.timeouts,
            self.tracer.note,
        )
        self.in_links = InLinks(side, post, ends, inbox.put, self._in_down, progress, self.tracer.note)
        self.exports = Exports(
            core.scheduler,
            self.out_links,
            self._export_ended,
            clock,
            config.timeouts,
            side.layout.num_layers,
            side.layout.block_nbytes,
            note=self.tracer.note,
        )
        self.imports = Imports(
            core.scheduler,
            self.in_links,
            self._import_ended,
            self._joined,
            clock,
            config.timeouts,
            config.engine.growth_tokens,
            limits.vocab_size,
            self.tracer.note,
        )
        self._shares_cores = shares_cores
        self._patience = Patience(core.scheduler, self.imports, clock)

    def run(self, came_round: Callable[[], None] = lambda: None) -> None:
        """Until `Stop`, or until nothing is left after `Drain`. Raises what the mailbox or a step raised.

        `came_round` is called between steps, several times a second while none runs.
        """
        busy = False
        while self._read_inbox(wait_s=0.0 if busy else IDLE_WAIT_S):
            came_round()
            self._tick()
            was_busy, busy = busy, self._step()
            self._publish_load(at_once=was_busy and not busy)
            self._outbox.flush()
            if self._is_draining and not self._legs and not self.core.scheduler.requests:
                return

    # ---- a step

    def _step(self) -> bool:
        """One step of the engine and what follows from it; False when there was nothing to compute."""
        self.imports.credit()
        if self._shares_cores and not self._is_draining and self._patience.waits:
            return False
        plan = self.core.plan()
        for request in plan.admitted:
            if request.leg != "decode" and not request.output_token_ids:
                self._notes.admitted(request)
            if request.leg == "prefill":
                self.exports.admitted(request)
        plan.chunks = [chunk for chunk in plan.chunks if chunk[0].status is Status.RUNNING]
        hands_over = self.exports.computing(plan.chunks)
        started_s = self._clock()
        result = self.core.run(plan, self._layers_done if hands_over else None)
        self._pace.computed(plan.chunks, self._clock() - started_s)
        if self._is_prefill:
            self._notes.computed(plan.chunks, started_s)
        for request in result.forked:
            self._legs[request.leg_key].append(request)
        for request, prompt in result.prompts:
            self._outbox.add_prompt(request.client, prompt)
        first_tokens: dict[str, list[TokenOutput]] = defaultdict(list)
        for request, token in result.sampled:
            self._outbox.add_token(request, token)
            if request.leg == "prefill":
                first_tokens[request.key].append(token)
            if request.status is Status.FINISHED:
                self._forget(request)
        for request, token in result.candidates:  # clients hear of a beam search at its end
            first_tokens[request.key].append(token)
        for request in result.ended:
            self._forget(request)
        for request, _ in plan.chunks:
            if request.leg == "prefill":
                self.exports.computed(request, first_tokens[request.key])
        for request, error in result.failed:
            if request.leg_key in self._legs:  # not ended with another of its sequences already
                self._end(request.leg_key, error, is_refusal=True)
        return bool(plan.chunks)

    def _layers_done(self, num_layers: int) -> None:
        """While a step runs: finished layers leave, also for a credit that has just come."""
        odd = []
        while not self.credits.empty():
            conn, credit = self.credits.get_nowait()
            if self.exports.makes_sense(conn, credit):
                self.exports.on_credit(conn, credit)
            else:
                odd.append((conn, credit))
        for each in odd:
            self.credits.put(each)
        self.exports.layers_done(num_layers)

    def _read_credits(self) -> None:
        while not self.credits.empty():
            self.exports.on_credit(*self.credits.get_nowait())

    def _publish_load(self, at_once: bool = False) -> None:
        """Heartbeats read it, so it need not be newer than they can tell; of links they are to tell at once."""
        has_news = (self.out_links.states(), self._is_draining) != (self.load.links, self.load.is_draining)
        now_s = self._clock()
        if not has_news and not at_once and now_s < self._next_load_s:
            return
        self._next_load_s = now_s + LOAD_S
        self.load = load_of(
            self.core, self.exports, self.imports, self.out_links, self.in_links, self._pace, self._is_draining
        )
        if has_news:
            self._post.beat()

    def _tick(self) -> None:
        now_s = self._clock()
        if now_s < self._next_tick_s:
            return
        self._next_tick_s = now_s + TICK_S
        self._outbox.tick()
        self._cache_news.tick()
        self.out_links.tick()
        self.exports.expire()
        self.imports.expire()
        for key in [key for key, deadline_s in self._deadlines.items() if now_s > deadline_s]:
            self._end(key, "the request's deadline has passed")

    # ---- events

    def _read_inbox(self, wait_s: float) -> bool:
        """Handles everything that is there, waiting for a first event at most `wait_s`. False: stop."""
        try:
            event = self.inbox.get(timeout=wait_s) if wait_s else self.inbox.get_nowait()
            while True:
                if isinstance(event, Stop):
                    if event.error is not None:
                        raise event.error
                    return False
                self._handle(event)
                event = self.inbox.get_nowait()
        except queue.Empty:
            return True

    def _handle(self, event: Event) -> None:
        match event:
            case Mail(conn, peer, body):
                self._read(conn, peer, body)
            case Landed(transfer_id, first_tokens):
                self.imports.on_landed(transfer_id, first_tokens)
            case LandFault(transfer_id, reason):
                self.imports.on_fault(transfer_id, reason)
            case Drained(transfer_id):
                self.imports.on_drained(transfer_id)
            case HandedOver(conn, transfer_id):
                self.exports.on_handed_over(conn, transfer_id)
            case Drain():
                self._is_draining = True
            case OfLane(gather, lane, of_lane):
                whole = gather.add(lane, of_lane)
                if whole is not None:
                    self._handle(whole)
            case Offered(conn):
                self.out_links.on_offered(conn)
            case LinkFailed(conn, reason):
                self.out_links.on_down(conn, reason)
                self.in_links.on_failed(conn, reason)
            case Opened(conn, peer, kind):
                self._opened(conn, peer, kind)
            case Closed(conn, _, reason):
                self._closed(conn, reason)

    def _read(self, conn: str, peer: str, body: wire.Body) -> None:
        match body:
            case wire.Submit() if conn in self._schedulers:
                self._submit(conn, body)
            case wire.Abort() if conn in self._schedulers:
                self._abort(conn, f"{body.request_id}#{body.attempt}", body.index)
            case wire.Peers() if conn in self._schedulers:
                self._set_peers(body.peers)
            case wire.Heartbeat(load):
                if load is not None and (self.in_links.is_open(conn) or self.out_links.knows(conn)):
                    self._progress.heard(conn, load)
            case wire.LinkOpen() if not self.out_links.knows(conn):
                self.in_links.on_open(conn, peer, body, self._hosts.get(peer))
            case wire.LinkAnswer():
                self.out_links.on_answer(conn, body)
            case wire.LinkReady():
                self.out_links.on_ready(conn, body)
            case wire.LinkRefused():
                self.out_links.on_refused(conn, body)
            case wire.Offer():
                if self.in_links.is_open(conn):  # else it has failed here, and the peer hears of it
                    self.imports.on_offer(conn, body, peer)
            case wire.Credit():
                self._read_credits()
            case wire.Revoke():
                self.imports.on_revoke(conn, body.transfer_id)
            case wire.Cancel():
                self.exports.on_cancel(conn, body)
            case wire.Confirmed():
                self.imports.on_confirmed(conn, body)
            case _:
                log.warning("%s sent a %s, which is not for a worker", peer, type(body).__name__)

    def _set_peers(self, peers: list[wire.PeerInfo]) -> None:
        """Who is there, and what everybody is now, this worker included."""
        self._hosts = {peer_key(each.name, each.epoch): each.host for each in peers}
        for own in [each for each in peers if peer_key(each.name, each.epoch) == self._key]:
            if self._is_prefill != (own.role == "prefill"):
                log.info("this instance is %s now", own.role)
            self._is_prefill = own.role == "prefill"
        self.out_links.set_peers([each for each in peers if each.role == "decode"] if self._is_prefill else [])

    def _opened(self, conn: str, peer: str, kind: str) -> None:
        if kind != "scheduler":
            self.out_links.on_opened(conn)
            return
        name = peer.partition("@")[0]
        for other, other_peer in list(self._schedulers.items()):
            if other_peer.partition("@")[0] == name:  # its predecessor, or an earlier connection of the same life
                self._closed(other, f"{peer} took its place")
        self._schedulers[conn] = peer
        self._outbox.opened(conn)
        self._cache_news.opened(conn)
        log.info("scheduler %s is here", peer)

    def _closed(self, conn: str, reason: str) -> None:
        peer = self._schedulers.pop(conn, None)
        self._outbox.closed(conn)
        self._cache_news.closed(conn)
        if peer is not None:
            orphans = [key for key, sequences in self._legs.items() if sequences[0].client == conn]
            log.warning("scheduler %s is gone (%s); %d requests of it end", peer, reason, len(orphans))
            for key in orphans:
                self._drop(key)
        self.out_links.on_down(conn, reason)
        self.in_links.on_down(conn, reason)

    # ---- a leg comes and goes

    def _submit(self, conn: str, submit: wire.Submit) -> None:
        request = Request(
            submit.request_id,
            submit.prompt_token_ids,
            submit.sampling,
            attempt=submit.attempt,
            priority=submit.priority,
            arrival_s=self._clock(),
            leg=submit.leg,
            transfer_id=submit.transfer_id,
            peer=submit.peer,
            client=conn,
            cache_salt=submit.cache_salt,
            gathers=submit.gathers and submit.sampling.logprobs is None and not submit.sampling.beam_width,
            batch=f"{submit.batch} {submit.priority}" if submit.batch else "",
        )
        key, problem = request.leg_key, self._limits.problem(request, submit.resumed)
        if key in self._legs:
            return
        sequences = [resume(request, resumed) for resumed in submit.resumed] or [request]
        if problem is None and any(each.key in self.core.scheduler.requests for each in sequences):
            problem = "an earlier leg of this attempt is still ending here"
        if is_fault := problem is None and self._is_draining:
            problem = "this instance takes nothing more, because it stops"
        self._notes.submitted(request, problem)
        if problem is not None:
            self._outbox.add_end(conn, LegEnd(request.request_id, request.attempt, problem, is_fault))
            return
        self._legs[key] = sequences
        if submit.deadline_s:
            self._deadlines[key] = request.arrival_s + submit.deadline_s
        for each in sequences:
            self.core.guides.prepare(each)
            if each.leg == "decode":
                self.imports.submit(each)
            else:
                self.core.scheduler.add(each)

    def _joined(self, request: Request, sequences: list[Request], first_tokens: list[TokenOutput]) -> None:
        self._patience.landed()
        if not request.sampling.beam_width:
            self._outbox.add_tokens(request.client, first_tokens)
        if sequences:
            self._notes.joined(request, max(0, request.sampling.n - len(sequences)))
            self._legs[request.leg_key] = list(sequences)
        else:
            self._forget(request)

    def _export_ended(self, request: Request, error: str | None) -> None:
        self._report(request, error, is_fault=error is not None)
        self._forget(request)
        self.core.scheduler.finish(request)

    def _import_ended(self, request: Request, error: str | None) -> None:
        if error is not None:
            self._report(request, error, is_fault=True)
        self._forget(request)

    def _end(self, key: str, error: str, is_refusal: bool = False) -> None:
        self._report(self._legs[key][0], error, is_refusal=is_refusal)
        self._drop(key)

    def _abort(self, conn: str, key: str, index: int) -> None:
        """A scheduler does not want a leg any more, or (`index` not -1) one sequence of it."""
        sequences = self._legs.get(key, [])
        if not sequences or sequences[0].client != conn:
            return
        leader = sequences[0]
        if index == -1 or (leader.sampling.n == 1 and index == 0):
            self._drop(key)
        elif leader.sampling.beam_width:
            return  # hypotheses leave all at once
        elif not leader.output_token_ids and not leader.is_resumed:  # its sequences are not told apart yet
            leader.dropped.add(index)
        elif leader.leg != "prefill":
            for request in [r for r in sequences if r.index == index]:
                self._forget(request)
                self.core.scheduler.finish(request)

    def _drop(self, key: str) -> None:
        """Whatever it was doing, it stops; its blocks come home, landing blocks as soon as nobody writes them."""
        for request in list(self._legs[key]):
            self._forget(request)
            self.exports.abort(request)
            self.imports.abort(request)
            if request.key in self.core.scheduler.requests and request.status is not Status.LANDING:
                self.core.scheduler.finish(request)

    def _report(self, request: Request, error: str | None, is_fault: bool = False, is_refusal: bool = False) -> None:
        if error is not None:
            self._notes.failed(request)
        ended = LegEnd(request.request_id, request.attempt, error, is_fault, is_refusal)
        self._outbox.add_end(request.client, ended)

    def _forget(self, request: Request) -> None:
        """A sequence has ended; with the last one of its leg, the leg has."""
        sequences = self._legs.get(request.leg_key)
        if sequences is not None and request in sequences:
            sequences.remove(request)
            self._notes.ended(request, is_last=not sequences)
            if not sequences:
                del self._legs[request.leg_key]
                self._deadlines.pop(request.leg_key, None)

    def _out_down(self, conn: str, reason: str) -> None:
        self.exports.on_link_down(conn, reason)

    def _in_down(self, conn: str, reason: str) -> None:
        self.imports.on_link_down(conn, reason)
