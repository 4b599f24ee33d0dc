"""One prefill and one decode engine without torch or sockets: the real schedulers, Exports, Imports and Lander.

A seeded random number decides what happens next: a step, a message that arrives, a chunk that is copied, an abort, a
link that breaks, time that passes. Memory is modelled as what each block's last token stands for (all tokens up to it),
so that a block that is reused too early, shared wrongly, or committed although it was, is noticed.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence

from pd_cluster import wire
from pd_cluster.config import Timeouts
from pd_cluster.engine.exports import Exports
from pd_cluster.engine.imports import Imports
from pd_cluster.engine.scheduler import PrefixScope, Scheduler, StepPlan
from pd_cluster.errors import LinkError
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.transport.threads import Drained, Landed, Lander, LandFault, LinkFailed
from pd_cluster.types import Request, SamplingParams, Status, TokenOutput

BLOCK_SIZE = 4
Memory = list[tuple[int, ...] | None]  # block -> all tokens up to the one that was written last


def first_tokens(request: Request) -> list[TokenOutput]:
    """What P samples, one a sequence; of several sequences one ends with it, and all do when max_tokens is 1."""
    sampling = request.sampling
    tokens = []
    for index in range(sampling.n):
        ends = sampling.max_tokens == 1 or (sampling.n > 1 and index == len(request.prompt_token_ids) % sampling.n)
        token_id = 100 + 10 * index + len(request.prompt_token_ids)
        tokens.append(TokenOutput(request.request_id, 0, index, 0, token_id, "length" if ends else None))
    return tokens


class LastFreedFirst(BlockPool):
    """Reuses a block as soon as it can: the worst case for whoever still reads or writes it."""

    def release(self, blocks: Sequence[int]) -> None:
        num_free = self.num_free
        super().release(blocks)
        self._free.rotate(self.num_free - num_free)


class Engine:
    """A scheduler with modelled memory. `legs` has the sequences of each request that have not ended."""

    def __init__(self, num_blocks: int, budget: int, caches: bool) -> None:
        prefix = PrefixScope("model", "float32") if caches else None
        self.scheduler = Scheduler(LastFreedFirst(num_blocks), BLOCK_SIZE, 6, budget, prefix)
        self.memory: Memory = [None] * num_blocks
        self.legs: dict[str, list[Request]] = {}
        self.ended: Counter[str] = Counter()
        self.outcome: dict[str, str] = {}

    def end(self, request: Request, outcome: str) -> None:
        if self.legs.pop(request.request_id, None) is not None:
            self.ended[request.request_id] += 1
            self.outcome[request.request_id] = outcome

    def end_sequence(self, request: Request) -> None:
        sequences = self.legs[request.request_id]
        sequences.remove(request)
        if not sequences:
            self.end(request, "finished")

    def compute(self, plan: StepPlan) -> None:
        """The forward pass: every chunk reads what is before it and writes its own."""
        for kind, source, target in plan.moves:
            assert kind == "copy"
            self.memory[target] = self.memory[source]
        for request, num_tokens in plan.chunks:
            self.check_memory(request, request.num_computed_tokens)
            for position in range(request.num_computed_tokens, request.num_computed_tokens + num_tokens):
                self.memory[request.block_table[position // BLOCK_SIZE]] = tuple(request.token_ids(0, position + 1))

    def check_memory(self, request: Request, num_tokens: int) -> None:
        """The blocks of its first tokens hold what these tokens stand for, and nothing newer of anybody."""
        num_blocks = self.scheduler.num_blocks_for(num_tokens)
        tokens = tuple(request.token_ids(0, num_tokens))
        expected = [tokens[: min((b + 1) * BLOCK_SIZE, num_tokens)] for b in range(num_blocks)]
        found = [self.memory[block] for block in request.block_table[:num_blocks]]
        assert found == expected, f"{request.key} holds foreign KV: {found} instead of {expected}"


class World:
    def __init__(self, seed: int, num_requests: int = 12) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.p = Engine(self.rng.randrange(8, 16), self.rng.randrange(3, 12), self.rng.random() < 0.7)
        self.d = Engine(self.rng.randrange(10, 20), 16, self.rng.random() < 0.7)
        times = Timeouts(credit_timeout_s=10, transfer_timeout_s=30)
        self.exports = Exports(self.p.scheduler, self, self._export_ended, self.clock, times, max_chunk_blocks=2)
        self.imports = Imports(
            self.d.scheduler,
            DecodeSide(self),
            self._import_ended,
            self._joined,
            self.clock,
            times,
            growth_tokens=4,
            vocab_size=1000,
        )
        self.generation = 0
        self.p_conn: str | None = "link-0"
        self.d_conn: str | None = "link-0"
        self.jobs: deque[tuple[str, Callable[[], wire.Body | None]]] = deque()  # P's send thread
        self.to_d: deque[tuple[str, wire.Body]] = deque()
        self.to_p: deque[tuple[str, wire.Body]] = deque()
        self.lander = Lander(CopyingReceiver(self))
        self.thread: deque[wire.KVChunk | wire.KVEnd | str] = deque()  # D's link thread
        self.inbox: deque[Landed | LandFault | Drained | LinkFailed] = deque()
        self.live: set[str] = set()
        self.unsubmitted = [(side, f"r{at}") for at in range(num_requests) for side in "pd"]
        self.rng.shuffle(self.unsubmitted)
        self.trouble = True
        self.num_troubles = 0
        self.troubles = [self._abort, self._break_link, self._pass_time]
        self.events = [
            self._submit,
            self._p_step,
            self._d_step,
            self._deliver_to_d,
            self._deliver_to_p,
            self._send_job,
            self._thread_step,
            self._read_inbox,
            self._tell_the_other_leg,
            *self.troubles,
        ]
        # Each seed has its own slow and fast parts: that is what makes rare orders common.
        self.weights = [self.rng.choice([0.5, 2, 8]) for _ in self.events[: -len(self.troubles)]]
        self.weights += [self.rng.choice([0.0, 0.2, 1.5]) for _ in self.troubles]

    def clock(self) -> float:
        return self.now_s

    # ---- what may happen

    def run(self, num_events: int = 4000) -> None:
        """Random events, then quiet ones until everybody has ended."""
        for at in range(num_events + 20_000):
            self.trouble = at < num_events
            if not (self.unsubmitted or self.p.scheduler.requests or self.d.scheduler.requests or len(self.imports)):
                return
            self._one_event()
            if self.trouble:
                continue
            if self.num_troubles and self.rng.random() < 0.02:  # without any trouble nothing may need a deadline
                self._pass_time()
        raise AssertionError(f"not ended: P {self._standing(self.p)}, D {self._standing(self.d)}")

    def check(self) -> None:
        """Everything ended once, nothing is held."""
        for engine in (self.p, self.d):
            engine.scheduler.check()
            assert engine.scheduler.blocks.num_held == 0
            assert set(engine.ended.values()) <= {1}, "a request ended twice"
            assert not engine.legs, f"no end for {list(engine.legs)}"
        assert not len(self.exports)

    def _one_event(self) -> None:
        events = self.events if self.trouble else self.events[: -len(self.troubles)]
        weights = self.weights if self.trouble else self.weights[: len(events)]
        event = self.rng.choices(events, weights)[0]
        self.num_troubles += event in self.troubles
        event()
        self.p.scheduler.check()
        self.d.scheduler.check()

    def _submit(self) -> None:
        """One leg of a request arrives; the other has come before or comes later."""
        if not self.unsubmitted:
            return
        side, name = self.unsubmitted.pop()
        rng = random.Random(f"{self.seed} {name}")  # both legs have the same prompt
        request = Request(
            name,
            [1] * rng.choice([0, 4, 9]) + [rng.randrange(50) for _ in range(rng.randrange(1, 13))],
            SamplingParams(max_tokens=rng.choice([1, 2, 6, 14]), n=rng.choice([1, 1, 1, 2, 3])),
            arrival_s=self.now_s,
            leg="prefill" if side == "p" else "decode",
            transfer_id=f"t{name}",
            peer="decode",
        )
        if side == "p":
            self.p.legs[name] = [request]
            self.p.scheduler.add(request)
        else:
            self.d.legs[name] = [request]
            self.imports.submit(request)

    def _tell_the_other_leg(self) -> None:
        """The scheduler has heard how one leg ended and aborts the other, unless the KV cache was handed over."""
        for ended, other in ((self.p, self.d), (self.d, self.p)):
            for name in [n for n in other.legs if ended.outcome.get(n, "handed over") != "handed over"]:
                self._abort_leg(other, name)
                return

    def _p_step(self) -> None:
        plan = self.p.scheduler.plan()
        for request in plan.admitted:
            self.exports.admitted(request)
        plan.chunks = [chunk for chunk in plan.chunks if chunk[0].status is Status.RUNNING]
        self.p.compute(plan)
        tokens: dict[str, list[TokenOutput]] = {}
        for request in self.p.scheduler.computed(plan):
            tokens[request.key] = first_tokens(request)
            request.output_token_ids.append(tokens[request.key][0].token_id)
            if all(token.finish_reason is not None for token in tokens[request.key]):
                self.p.scheduler.finish(request)
                self.p.end(request, "finished")
            else:
                self.p.scheduler.export(request)
        for request, _ in plan.chunks:
            self.exports.computed(request, tokens.get(request.key, []))
        self.exports.expire()

    def _d_step(self) -> None:
        self.imports.expire()
        self.imports.credit()
        plan = self.d.scheduler.plan()
        self.d.compute(plan)
        for request in self.d.scheduler.computed(plan):
            request.output_token_ids.append(7 + request.index)
            if len(request.output_token_ids) >= request.sampling.max_tokens:
                self.d.scheduler.finish(request)
                self.d.end_sequence(request)

    def _deliver_to_d(self) -> None:
        if not self.to_d:
            return
        conn, body = self.to_d.popleft()
        if conn != self.d_conn:
            return
        match body:
            case wire.Offer():
                self.imports.on_offer(conn, body)
            case wire.Revoke():
                self.imports.on_revoke(conn, body.transfer_id)
            case wire.Confirmed():
                self.imports.on_confirmed(conn, body)
            case wire.KVChunk() | wire.KVEnd():
                self.thread.append(body)

    def _deliver_to_p(self) -> None:
        if not self.to_p:
            return
        conn, body = self.to_p.popleft()
        if conn != self.p_conn:
            return
        match body:
            case wire.Credit():
                self.exports.on_credit(conn, body)
            case wire.Confirm():
                self.exports.on_confirm(conn, body.transfer_id)
            case wire.Cancel():
                self.exports.on_cancel(conn, body)

    def _send_job(self) -> None:
        if self.jobs:
            conn, job = self.jobs.popleft()
            body = job()
            if body is not None and conn == self.p_conn:
                self.to_d.append((conn, body))

    def _thread_step(self) -> None:
        if not self.thread:
            return
        item = self.thread.popleft()
        try:
            event = self.lander.forget(item) if isinstance(item, str) else self.lander.land(item)
        except LinkError as error:
            event = LinkFailed(self.d_conn or "", str(error))
        if event is not None:
            self.inbox.append(event)

    def _read_inbox(self) -> None:
        if not self.inbox:
            return
        match self.inbox.popleft():
            case Landed(transfer_id, tokens):
                self.imports.on_landed(transfer_id, tokens)
            case LandFault(transfer_id, reason):
                self.imports.on_fault(transfer_id, reason)
            case Drained(transfer_id):
                self.imports.on_drained(transfer_id)

    def _abort(self) -> None:
        """The client leaves: one leg of its request is aborted, the other as soon as the scheduler gets to it."""
        engine = self.rng.choice([self.p, self.d])
        if engine.legs:
            self._abort_leg(engine, self.rng.choice(list(engine.legs)))

    def _abort_leg(self, engine: Engine, name: str) -> None:
        sequences = engine.legs[name]
        engine.end(sequences[0], "aborted")
        for request in sequences:
            (self.exports if engine is self.p else self.imports).abort(request)
            if request.key in engine.scheduler.requests and request.status is not Status.LANDING:
                engine.scheduler.finish(request)

    def _break_link(self) -> None:
        """Each side notices at its own time; when both have, a new link stands."""
        if self.p_conn is not None and self.rng.random() < 0.5:
            conn, self.p_conn = self.p_conn, None
            self.exports.on_link_down(conn, "cut")
        elif self.d_conn is not None:
            conn, self.d_conn = self.d_conn, None
            self.imports.on_link_down(conn, "cut")
        if self.p_conn is None and self.d_conn is None:
            self.generation += 1
            self.p_conn = self.d_conn = f"link-{self.generation}"

    def _pass_time(self) -> None:
        self.now_s += self.rng.choice([0.5, 3.0, 31.0])
        if not self.trouble and (self.p_conn is None or self.d_conn is None):
            self._break_link()

    # ---- ExportPorts

    def link_to(self, peer: str) -> str | None:
        return self.p_conn

    def send(self, conn: str, body: wire.Body) -> None:
        if conn == self.p_conn:
            self.to_d.append((conn, body))

    def ship(self, conn: str, transfer_id: str, sequence: int, first_block: int, block_ids: list[int]) -> None:
        self.live.add(transfer_id)
        chunk = wire.KVChunk(transfer_id, sequence, first_block, block_ids, len(block_ids), 0)
        self.jobs.append((conn, lambda: chunk if transfer_id in self.live else None))

    def ship_end(self, conn: str, end: wire.KVEnd) -> None:
        self.live.add(end.transfer_id)
        self.jobs.append((conn, lambda: end if end.transfer_id in self.live else None))

    def drop(self, conn: str, transfer_id: str) -> None:
        self.live.discard(transfer_id)

    def progress_s(self, conn: str) -> float:
        return self.now_s - 1.0 if self.rng.random() < 0.5 else float("-inf")

    # ---- outcomes

    def _export_ended(self, request: Request, error: str | None) -> None:
        self.p.end(request, error or "handed over")
        self.p.scheduler.finish(request)

    def _import_ended(self, request: Request, error: str | None) -> None:
        self.d.end(request, error or "dropped")

    def _joined(self, request: Request, sequences: list[Request], tokens: list[TokenOutput]) -> None:
        """The heart of it: what D commits is this request's prompt, whole, and P's tokens."""
        assert tokens == first_tokens(request)
        assert [s.index for s in sequences] == [t.index for t in tokens if t.finish_reason is None]
        for sequence in sequences:
            self.d.check_memory(sequence, sequence.num_computed_tokens)
            assert sequence.output_token_ids == [tokens[sequence.index].token_id]
        self.d.legs[request.request_id] = list(sequences)

    def _standing(self, engine: Engine) -> list[str]:
        return [f"{r.key} {r.status.value}" for r in engine.scheduler.requests.values()]


class DecodeSide:
    """ImportPorts of the world."""

    def __init__(self, world: World) -> None:
        self.world = world

    def send(self, conn: str, body: wire.Body) -> None:
        if conn == self.world.d_conn:
            self.world.to_p.append((conn, body))

    def begin(self, conn: str, transfer_id: str, block_ids: list[int], first_block: int) -> None:
        self.world.lander.begin(transfer_id, block_ids, first_block)

    def forget(self, conn: str, transfer_id: str) -> None:
        self.world.thread.append(transfer_id)

    def progress_s(self, conn: str) -> float:
        return self.world.progress_s(conn)


class CopyingReceiver:
    """One-sided: reads P's memory as it is at the moment of the copy, which may be too late."""

    name: wire.TransportName = "local"

    def __init__(self, world: World) -> None:
        self.world = world

    def open(self) -> None: ...

    def close(self) -> None: ...

    def receive(self, chunk: wire.KVChunk, into: list[int] | None) -> None:
        for source, target in zip(chunk.block_ids, into or [], strict=False):
            self.world.d.memory[target] = self.world.p.memory[source]
