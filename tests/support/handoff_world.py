"""Drives one prefill engine (P) and one decode engine (D), without torch or sockets, through random orders of events.

The schedulers, Exports, Imports and the parts named in handoff_link.py are production code. A seeded random number
chooses the next event: a layer of a step, an arriving message, a chunk that is sent or lands, an abort, a broken link,
a repeated or reordered frame, a process that dies and restarts, or passing time.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from pd_cluster import wire
from pd_cluster.engine.handover.exports import Exports
from pd_cluster.engine.handover.imports import Imports
from pd_cluster.engine.handover.shipping import ShipLimits, ShipSizes
from pd_cluster.engine.handover.transfer_terms import TransferTerms
from pd_cluster.engine.scheduling.step_delay import LandingWait, StepDelay
from pd_cluster.engine.scheduling.step_plan import StepPlan
from pd_cluster.kv.kv_layout import COLD
from pd_cluster.kv.layer_groups import first_token_of
from pd_cluster.model.inputs.forward_batch import OnLayer
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.link_events import Arrived, Drained, Landed, LandFault
from pd_cluster.types import Request, RequestSpec, Status, TokenOutput
from tests.support.handoff_engine import (
    Ends,
    Engine,
    Kinds,
    abort,
    decode_step,
    ends_at_once,
    first_tokens,
    layouts_of,
    make_sampling,
)
from tests.support.handoff_link import Link

HURRY_EVENTS = 4000
NUM_STATES = 10
TIMES = Timeouts(credit_timeout_s=10, transfer_timeout_s=30)


class World:
    """`kinds`: the model's groups of layers."""

    kinds: Kinds = ("all",)

    def __init__(self, seed: int, num_requests: int = 12) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.now_s = 0.0
        self.one_sided = rng.random() < 0.6
        self.is_late = random.Random(seed).random() < 0.5
        self.p_size, self.d_size = rng.choice([(4, 4), (4, 4), (4, 2), (2, 4), (4, 3)])
        self.p_shape = (rng.randrange(8, 16) * 4 // self.p_size, rng.randrange(3, 12), rng.random() < 0.7)
        self.d_shape = (rng.randrange(10, 20) * 4 // self.d_size, 16, rng.random() < 0.7)
        self.min_nbytes = rng.choice([1, 1, 2, 5])
        self.max_payload_nbytes = rng.choice([1, 4, 100])
        self._have_heads = random.Random(f"{seed} heads").random() < 0.5
        self.batch_share = random.Random(f"{seed} batch").choice([0.0, 0.8, 1.0, 1.0])
        self.p_ends, self.d_ends = Ends(), Ends()
        self.taken: set[str] = set()  # transfers that P's mailbox has confirmed, so that D may continue
        self.p_life = self.d_life = 0
        self.links: list[Link] = []
        self.start_p()
        self.start_d()
        self.connect()
        self.unsubmitted = [(endpoint, f"r{at}") for at in range(num_requests) for endpoint in "pd"]
        self.rng.shuffle(self.unsubmitted)
        self.half_submitted: set[str] = set()
        self.trouble = True
        self.num_troubles = self.num_waits = self.num_landing_waits = self.num_cold = self.num_spared = 0
        self.num_events = 0
        self.troubles = [self._abort, self._break_link, self._pass_time, self._repeat_frame, self._swap_frames]
        self.troubles += [self._p_dies, self._d_dies]
        self.events = [
            self._submit,
            self._p_step,
            self._p_step,
            self._d_step,
            self._deliver_to_d,
            self._deliver_to_p,
            self._p_mailbox_replies,
            self._send_job,
            self._thread_step,
            self._p_reads_inbox,
            self._d_reads_inbox,
            self._tell_the_other_leg,
            self._notice,
            *self.troubles,
        ]
        # Each seed makes other parts slow or fast, so that otherwise rare orders of events become common.
        weights: list[float] = [rng.choice([0.4, 2.0, 8.0]) for _ in self.events[: -len(self.troubles)]]
        rates = [rng.choice([0.02, 0.1, 0.4]) for _ in self.troubles[:5]] + [rng.choice([0.004, 0.015])] * 2
        self.num_quiet = len(weights)  # harmless events come first
        weights += [rate if rng.random() < 0.4 else 0.0 for rate in rates]
        self.weights = list(accumulate(weights))

    def clock(self) -> float:
        return self.now_s

    def start_p(self) -> None:
        self.p_life += 1
        layouts = layouts_of(self.kinds, self.p_size, self._draft_head("p", self.p_life))
        self.p = Engine(*self.p_shape, layouts, NUM_STATES)
        sizes = ShipSizes.of(layouts)
        groups = tuple(each._replace(layer_nbytes=1) for each in sizes.groups)
        self.exports = Exports(self, self, TransferTerms(self.clock, TIMES), ShipSizes(groups, self.min_nbytes))
        self.p_conn: str | None = None  # the connection as seen by P's mailbox
        self.p_link: str | None = None  # the connection as seen by P's engine
        self.to_p: deque[tuple[str, wire.Body]] = deque()
        self.p_inbox: deque[tuple[str, wire.Body | None]] = deque()  # None: the connection was lost
        self.credits: deque[tuple[str, wire.Credit]] = deque()
        self.replies: deque[tuple[str, wire.Confirmed]] = deque()

    def start_d(self) -> None:
        self.d_life += 1
        layouts = layouts_of(self.kinds, self.d_size, self._draft_head("d", self.d_life))
        self.d = Engine(*self.d_shape, layouts, NUM_STATES)
        self.d_side = endpoint = DecodeSide(self)
        self.imports = Imports(
            self.d.scheduler, endpoint, self, TransferTerms(self.clock, TIMES), growth_tokens=4, vocab_size=999
        )
        self.step_delay = StepDelay(self.d.scheduler, self.imports, self.clock)
        self.landing_wait = LandingWait(self.imports, self.clock)
        self.d_conn: str | None = None
        self.to_d: deque[tuple[str, wire.Body]] = deque()
        self.d_inbox: deque[Arrived | Landed | LandFault | Drained | tuple[str, wire.Body]] = deque()

    def _draft_head(self, endpoint: str, life: int) -> str:
        """Returns the draft head of one life of an endpoint; each life may have a different one."""
        if len(self.kinds) > 1:
            return ""
        return random.Random(f"{self.seed} {endpoint} {life}").choice(["", "a", "a", "b"]) if self._have_heads else ""

    def connect(self) -> None:
        conn = f"link-{len(self.links)}"
        self.links.append(Link(conn, self.p.memories, self.d.memories, self.one_sided, self.is_late))
        self.p_conn = self.p_link = self.d_conn = conn

    def link(self, conn: str) -> Link:
        return self.links[int(conn.removeprefix("link-"))]

    # ---- events

    def run(self, num_events: int = 1500) -> None:
        """Runs random events, then harmless ones until all requests have ended."""
        for at in range(num_events + 20_000):
            self.trouble = at < num_events
            if not (self.unsubmitted or self.p.scheduler.requests or self.d.scheduler.requests or len(self.imports)):
                return
            self._one_event()
            if self.trouble:
                continue
            if self.num_troubles and self.rng.random() < 0.02:  # without faults, nothing may depend on a deadline
                self._pass_time()
        raise AssertionError(f"not ended: P {self._standing(self.p)}, D {self._standing(self.d)}")

    def check(self) -> None:
        """Asserts that every request ended exactly once and that nothing is held."""
        while self.p.plan is not None or self.p_inbox or self.replies:
            self._p_mailbox_replies()
            self._p_step() if self.p.plan is not None else self._p_reads_inbox()
        for engine, ends in ((self.p, self.p_ends), (self.d, self.d_ends)):
            engine.scheduler.check()
            assert not any(each.blocks.num_held for each in engine.scheduler.groups)
            assert set(ends.count.values()) <= {1}, "a request ended twice"
            assert not engine.legs, f"no end for {list(engine.legs)}"
        for name, outcome in self.p_ends.outcome.items():
            lost = outcome == "handed over" and self.d_ends.outcome[name] == "dropped"
            assert not lost, f"{name} was handed over and revoked: its client gets no end"
        assert not len(self.exports)
        assert not len(self.exports.held), "a transfer without an export is held"

    def _one_event(self) -> None:
        """Runs one event, drawn by the cumulative weights."""
        num_kinds = len(self.events) if self.trouble else self.num_quiet
        drawn = self.rng.random()
        if self.num_events > HURRY_EVENTS:  # no part stays slow forever
            at = int(drawn * num_kinds)
        else:
            at = bisect(self.weights, drawn * self.weights[num_kinds - 1], 0, num_kinds - 1)
        self.num_troubles += at >= self.num_quiet
        self.events[at]()
        self.num_events += 1
        if self.num_events % 16 == 0:
            if self.p.plan is None or not self.p.plan.keeps:  # a planned step holds the blocks of its copies
                self.p.scheduler.check()
            self.d.scheduler.check()

    def _submit(self) -> None:
        """Submits one leg of a request; its other leg arrives earlier or later."""
        if not self.unsubmitted:
            return
        endpoint, name = self.unsubmitted.pop()
        self.half_submitted ^= {name}
        rng = random.Random(f"{self.seed} {name}")  # both legs have the same prompt
        request = Request(
            name,
            RequestSpec(
                [1] * rng.choice([0, 4, 9]) + [rng.randrange(50) for _ in range(rng.randrange(1, 13))],
                make_sampling(
                    rng.choice([1, 2, 6, 14]), rng.choice([1, 1, 1, 2, 3]), rng.choice([0, 0, 0, 0, 0, 2, 4])
                ),
                batch="b" if rng.random() < self.batch_share else "",
            ),
            arrival_s=self.now_s,
            leg="prefill" if endpoint == "p" else "decode",
            transfer_id=f"t{name}",
            peer="decode" if endpoint == "p" else "prefill",
        )
        if endpoint == "p":
            self.p.legs[name] = [request]
            self.p.scheduler.add(request)
        else:
            self.d.legs[name] = [request]
            self.imports.submit(request)

    def _tell_the_other_leg(self) -> None:
        """Aborts a request's other leg once the scheduler learns of one's end, unless the KV cache was handed over."""
        for ends, other in ((self.p_ends, self.d), (self.d_ends, self.p)):
            for name in [n for n in other.legs if ends.outcome.get(n, "handed over") != "handed over"]:
                self._order_abort(other, name)
                return

    def _p_step(self) -> None:
        """Runs the next part of P's step: its begin, a layer, or its end. During a step P reads only credits."""
        p = self.p
        if p.plan is None:
            while self.p_inbox:
                self._p_reads_inbox()
            plan = p.scheduler.plan()
            self._begins(plan)
            p.begin(plan)
        elif not p.is_computed:
            p.compute_layer()
            self._read_credits()
            self.exports.layers_done(p.num_layers_done)
        else:
            self._p_ends_step(*self.p.end_step())

    def _begins(self, plan: StepPlan) -> OnLayer | None:
        for request in plan.admitted:
            self.exports.admitted(request)
        plan.chunks = [chunk for chunk in plan.chunks if chunk[0].status is Status.RUNNING]
        return self.exports.layers_done if self.exports.computing(plan.chunks) else None

    def _p_ends_step(self, plan: StepPlan, ready: list[Request]) -> None:
        tokens: dict[str, list[TokenOutput]] = {}
        for request in ready:
            tokens[request.key] = first_tokens(request)
            request.output_token_ids.append(tokens[request.key][0].token_id)
            if ends_at_once(request, tokens[request.key]):
                self.p.scheduler.finish(request)
                self._end(self.p, request, "finished")
            else:
                self.p.scheduler.export(request)
        for request, _ in plan.chunks:
            self.exports.computed(request, tokens.get(request.key, []))
        self.exports.expire()

    def _d_step(self) -> None:
        self.imports.expire()
        self.imports.credit()
        if self.step_delay.waits:
            self.num_waits += 1
            return
        if (running := self.d.scheduler.running) and self.landing_wait.left_s(1.0, len(running)):
            self.num_landing_waits += 1
            return
        if not (self.d.scheduler.running or self.d.scheduler.waiting):
            return
        for request in decode_step(self.d):
            sequences = self.d.legs[request.request_id]
            sequences.remove(request)
            if not sequences:
                self._end(self.d, request, "finished")

    def _deliver_to_d(self) -> None:
        if not self.to_d:
            return
        conn, body = self.to_d.popleft()
        if conn != self.d_conn:
            return
        if isinstance(body, wire.KVFrame):
            self.link(conn).put(body)
        else:
            self.d_inbox.append((conn, body))

    def _deliver_to_p(self) -> None:
        """Delivers a message to P's mailbox, which answers `Confirm` at once, whatever its engine is doing."""
        if not self.to_p:
            return
        conn, body = self.to_p.popleft()
        if conn != self.p_conn:
            return
        if isinstance(body, wire.Confirm):
            held = self.exports.held.take(conn, body.transfer_id)
            self.taken |= {body.transfer_id} if held else set()
            self.replies.append((conn, wire.Confirmed(body.transfer_id, held)))
            return
        if isinstance(body, wire.Credit):
            self.credits.append((conn, body))
        self.p_inbox.append((conn, body))

    def _p_mailbox_replies(self) -> None:
        """Sends a delayed reply: since the transfer was taken out, P's engine may have done anything."""
        if not self.replies:
            return
        conn, answer = self.replies.popleft()
        self.send(conn, answer)
        if answer.held:
            self.p_inbox.append((conn, wire.Confirm(answer.transfer_id)))

    def _send_job(self) -> None:
        conn = self.p_conn
        busy = [lane for lane in self.link(conn).lanes if lane.jobs] if conn is not None else []
        if conn is None or not busy:
            return
        frame = (self.rng.choice(busy) if len(busy) > 1 else busy[0]).send()
        if frame is not None:
            self.link(conn).seen.append(frame)
            self.to_d.append((conn, frame))

    def _thread_step(self) -> None:
        """Runs one of the links' threads; threads of closed links continue until their queues are empty."""
        busy = [(link, lane) for link in self.links for lane in link.lanes if lane.frames]
        if not busy:
            return
        link, lane = self.rng.choice(busy)
        event = link.land(lane)
        if isinstance(event, str):
            if self.d_conn == link.conn:
                self._d_loses_link(event)
        elif event is not None and lane.target in self.d.memories:
            self.d_inbox.append(event)
            if isinstance(event, Landed) and link.conn == self.d_conn:
                self.to_p.append((link.conn, wire.Confirm(event.transfer_id)))

    def _p_reads_inbox(self) -> None:
        if self.p.plan is not None or not self.p_inbox:
            return
        conn, body = self.p_inbox.popleft()
        match body:
            case wire.Credit():
                self._read_credits()
            case wire.Confirm():
                self.exports.on_handed_over(conn, body.transfer_id)
            case wire.Cancel():
                self.exports.on_cancel(conn, body)
            case wire.Abort(name) if name in self.p.legs:
                self._abort_leg(self.p, name)
            case None:
                self.p_link = None
                self.exports.on_link_down(conn, "cut")

    def _read_credits(self) -> None:
        while self.credits:
            self.exports.on_credit(*self.credits.popleft())

    def _d_reads_inbox(self) -> None:
        if not self.d_inbox:
            return
        match self.d_inbox.popleft():
            case Arrived(transfer_id):
                self.imports.on_arrived(transfer_id)
            case Landed(transfer_id, tokens):
                self.imports.on_landed(transfer_id, tokens)
            case LandFault(transfer_id, reason):
                self.imports.on_fault(transfer_id, reason)
            case Drained(transfer_id):
                self.imports.on_drained(transfer_id)
            case (conn, wire.Offer() as offer):
                if conn == self.d_conn:
                    self.imports.on_offer(conn, offer)
            case (conn, wire.Revoke(transfer_id)):
                self.imports.on_revoke(conn, transfer_id)
            case (conn, wire.Confirmed() as answer):
                self.imports.on_confirmed(conn, answer)

    # ---- faults

    def _abort(self) -> None:
        """Aborts one leg of a request whose client left; the abort of the other leg arrives later."""
        engine = self.rng.choice([self.p, self.d])
        if engine.legs:
            self._order_abort(engine, self.rng.choice(list(engine.legs)))

    def _order_abort(self, engine: Engine, name: str) -> None:
        if engine is self.p:
            self.p_inbox.append(("", wire.Abort(name, 0)))
        else:
            self._abort_leg(engine, name)

    def _abort_leg(self, engine: Engine, name: str) -> None:
        sequences = engine.legs[name]
        self._end(engine, sequences[0], "aborted")
        abort(engine, sequences, self.exports if engine is self.p else self.imports)

    def _break_link(self) -> None:
        """Breaks the link: one side notices now, the other in `_notice`."""
        if self.p_conn is not None and self.d_conn is not None:
            self._p_loses_link() if self.rng.random() < 0.5 else self._d_loses_link("cut")

    def _notice(self) -> None:
        """Lets the other side notice the broken link; once both have, makes a new one."""
        if self.p_conn is None and self.d_conn is None:
            if self.p_link is None:
                self.connect()
        elif self.d_conn is None:
            self._p_loses_link()
        elif self.p_conn is None:
            self._d_loses_link("cut")

    def _p_loses_link(self) -> None:
        """P's mailbox loses the link at once; P's engine learns of it after the current step."""
        assert self.p_conn is not None
        self.p_inbox.append((self.p_conn, None))
        self.p_conn = None

    def _d_loses_link(self, reason: str) -> None:
        assert self.d_conn is not None
        conn, self.d_conn = self.d_conn, None
        self.imports.on_link_down(conn, reason)

    def _repeat_frame(self) -> None:
        """Delivers an old frame of this link, or of an earlier one, again."""
        frames = [frame for link in self.links[-2:] for frame in link.seen[-10:]]
        if frames and self.d_conn is not None:
            self.link(self.d_conn).put(self.rng.choice(frames))

    def _swap_frames(self) -> None:
        at = [i for i, (_, body) in enumerate(self.to_d) if isinstance(body, wire.KVFrame)]
        if len(at) > 1:
            i, j = self.rng.sample(at, 2)
            self.to_d[i], self.to_d[j] = self.to_d[j], self.to_d[i]

    def _p_dies(self) -> None:
        """Kills P, which loses all that it held; D notices later. Messages in transit reach P's successor."""
        for name in [n for n in sorted(self.half_submitted) if n not in self.p.legs]:
            self._never_submit("p", name, self.p_ends)
        for name in list(self.p.legs):
            self._end(self.p, self.p.legs[name][0], "died")
        self.start_p()

    def _d_dies(self) -> None:
        for name in [n for n in sorted(self.half_submitted) if n not in self.d.legs]:
            self._never_submit("d", name, self.d_ends)
        for name in list(self.d.legs):
            self._end(self.d, self.d.legs[name][0], "died")
        self.start_d()

    def _never_submit(self, endpoint: str, name: str, ends: Ends) -> None:
        """Drops a Submit that was addressed to the process that has just died."""
        if (endpoint, name) in self.unsubmitted:
            self.unsubmitted.remove((endpoint, name))
            self.half_submitted.discard(name)
            ends.add(name, "died")

    def _pass_time(self) -> None:
        self.now_s += self.rng.choice([0.5, 3.0, 31.0])

    # ---- ExportPorts

    def link_to(self, peer: str) -> str | None:
        return self.p_link

    def awaken(self, peer: str) -> bool:
        return False

    def limits(self, conn: str, group: int) -> ShipLimits:
        return self.link(conn).limits(group, self.max_payload_nbytes)

    def send(self, conn: str, body: wire.Body) -> None:
        is_late = isinstance(body, wire.Revoke) and body.transfer_id in self.taken
        assert not is_late, "P revokes a transfer that it has confirmed"
        if conn == self.p_conn:
            self.to_d.append((conn, body))

    def ship(self, conn: str, group: int, transfer_id: str, index: int, piece: wire.KVPiece) -> None:
        self._check_shipped(group, transfer_id, piece)
        link = self.link(conn)
        link.live.add(transfer_id)
        chunk = wire.KVChunk(transfer_id, index, piece, 1, 0)
        link.lanes[group].jobs.append(lambda: chunk if transfer_id in link.live else None)

    def _check_shipped(self, group: int, transfer_id: str, piece: wire.KVPiece) -> None:
        """Asserts that the piece has been computed."""
        request = self.p.legs[transfer_id.removeprefix("t")][0]
        assert self.p.memories[group].holds(request, piece), f"{request.key} is shipped too early"

    def ship_end(self, conn: str, group: int, end: wire.KVEnd) -> None:
        link = self.link(conn)
        link.live.add(end.transfer_id)
        link.lanes[group].jobs.append(lambda: end if end.transfer_id in link.live else None)

    def drop(self, conn: str, transfer_id: str) -> None:
        self.link(conn).live.discard(transfer_id)

    def progress_s(self, conn: str) -> float:
        return self.now_s - 1.0 if self.rng.random() < 0.8 else float("-inf")

    # ---- outcomes

    def _end(self, engine: Engine, request: Request, outcome: str) -> None:
        if engine.legs.pop(request.request_id, None) is not None:
            (self.p_ends if engine is self.p else self.d_ends).add(request.request_id, outcome)

    def export_ended(self, request: Request, error: str | None) -> None:
        assert error is None or request.transfer_id not in self.taken, f"P gives {request.key} up after confirming it"
        self._end(self.p, request, error or "handed over")
        self.p.scheduler.finish(request)

    def import_ended(self, request: Request, error: str | None) -> None:
        self._end(self.d, request, error or "dropped")

    def offered(self, request: Request, num_cached_tokens: int) -> None: ...

    def joined(self, request: Request, sequences: list[Request], tokens: list[TokenOutput]) -> None:
        """Asserts the central invariant: D continues with this request's whole prompt and P's tokens."""
        assert request.transfer_id in self.taken, f"{request.key} continues without P's confirmation"
        assert tokens == first_tokens(request)
        self._check_sent(self.link(self.d_side.landing.pop(request.transfer_id)), request)
        going_on = [t for t in tokens if t.finish_reason is None]
        width = request.sampling.beam_width
        assert [s.index for s in sequences] == (list(range(width)) if width else [t.index for t in going_on])
        assert [s.output_token_ids for s in sequences] == [[t.token_id] for t in going_on]
        for sequence in sequences:
            self.d.check_memory(sequence, sequence.num_computed_tokens)
            if request.kv_precision == COLD:
                first_token, layer = self.d_side.first_tokens[request.transfer_id][0], self.d.order[-1][1]
                stop = min(len(request.prompt_token_ids), sequence.num_computed_tokens)
                found = self.d.slots_of(sequence, first_token, stop, layer)
                assert not any(found), f"{request.key} drafts with KV of another request"
                self.num_cold += 1
        self.d.legs[request.request_id] = list(sequences)

    def _check_sent(self, link: Link, request: Request) -> None:
        """Asserts that P sent exactly what D lacked: for a window only its last tokens, and one state."""
        num_prompt = len(request.prompt_token_ids)
        for lane, first_token in zip(link.lanes, self.d_side.first_tokens[request.transfer_id], strict=True):
            holds = lane.target.layout.holds
            least = 0 if holds.is_state else first_token_of(holds, num_prompt, self.d_size)
            assert first_token >= least if self.d_shape[-1] else first_token == least
            wanted = 1 if holds.is_state else num_prompt - first_token
            assert lane.num_sent.get(request.transfer_id, 0) == wanted * lane.geometry.num_layers
            self.num_spared += bool(first_token) and holds.window > 0

    def _standing(self, engine: Engine) -> list[str]:
        return [f"{r.key} {r.status.value}" for r in engine.scheduler.requests.values()]


class DecodeSide:
    """The ImportPorts of one life of D, from its start to its death."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.landing: dict[str, str] = {}  # transfer with blocks -> its connection
        self.first_tokens: dict[str, list[int]] = {}  # transfer -> per group, the first token that D lacks

    def send(self, conn: str, body: wire.Body) -> None:
        if conn == self.world.d_conn:
            self.world.to_p.append((conn, body))

    def precision(self, conn: str) -> str:
        return self.world.link(conn).precision

    def begin(
        self, conn: str, transfer_id: str, tables: Sequence[list[int]], first_tokens: Sequence[int], num_tokens: int
    ) -> None:
        self.landing[transfer_id], self.first_tokens[transfer_id] = conn, list(first_tokens)
        self.world.link(conn).begin(transfer_id, tables, first_tokens, num_tokens)

    def forget(self, conn: str, transfer_id: str) -> None:
        del self.landing[transfer_id]
        self.world.link(conn).forget(transfer_id)

    def progress_s(self, conn: str) -> float:
        return self.world.progress_s(conn)

    def left_s(self, transfer_id: str) -> float:
        return self.world.rng.choice([0.0, 0.01, 100.0])
