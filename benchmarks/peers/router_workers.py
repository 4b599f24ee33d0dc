"""Simulated workers behind a real scheduler: they answer `/instance`, use the workers' protocol, and wait instead of
computing.

    python -m benchmarks.peers.router_workers SPEC

Tokens, step times and links are invented. Messages, including trace events, have the same number and sizes as those of
real workers. All workers of the spec share this process, each with its own mailbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import uvloop

from benchmarks.router.router_messages import MadeUpWorker, WorkersSpec
from pd_cluster import wire
from pd_cluster.costs.linear_costs import StepCost, StepWork
from pd_cluster.net.mailbox import Mailbox
from pd_cluster.net.peer_admission import Life, peer_key
from pd_cluster.process_messages import InstanceInfo
from pd_cluster.settings.process_settings import PortRange
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import LegEnd, LinkState, PromptOutput, TokenOutput

HOST = "127.0.0.1"
NOTHING: dict[str, int] = {}
SENT = {"start": 0, "stop": 48, "first_layer": 0, "num_layers": 4, "nbytes": 98_304}
PREFILL_EVENTS: dict[str, dict[str, int]] = {
    "admitted": {"num_tokens": 50, "num_cached": 0},
    "offered": {},
    "credited": {"first_token": 0},
    "chunk": {"start": 0, "stop": 50, "took_us": 2000},
    "first token": {},
    "sent": SENT,
    "ended": {},
}
DECODE_EVENTS = {
    "offered": {},
    "credited": {"first_token": 0},
    "landed": SENT,
    "landing complete": {},
    "confirmed": {},
    "decode start": {},
}

HandedOver = Callable[[str, str], None]


@dataclass(slots=True)
class Leg:
    conn: str
    submit: wire.Submit
    read_s: float
    num_tokens: int = 0  # number of tokens sent so far

    @property
    def num_sequences(self) -> int:
        return self.submit.order.sampling.n


class Worker:
    """One instance. It computes one prompt after the other at a given speed, and decodes up to a given number of
    sequences.

    `handed_over(name@epoch, transfer id)` reports to another instance that a prompt has landed there.
    """

    def __init__(self, spec: WorkersSpec, me: MadeUpWorker, handed_over: HandedOver) -> None:
        self.me, self.role, self.epoch = me, me.role, secrets.randbits(62)
        self.links: dict[str, LinkState] = {}
        self._peers: dict[str, wire.PeerInfo] = {}  # by name@epoch
        self._spec, self._handed_over = spec, handed_over
        self._loop = asyncio.get_running_loop()
        # Legs by transfer id: expected (to compute, or to decode once landed), landed but not running, and running.
        self._expected: dict[str, Leg] = {}
        self._waiting: dict[str, Leg] = {}
        self._running: dict[str, Leg] = {}
        self._num_running = 0  # sequences
        self._free_s = 0.0  # when the last accepted prompt will have been computed
        self._landed: set[str] = set()  # transfers that landed before their Submit was read
        self._ends: dict[str, list[LegEnd]] = {}  # conn -> ends of legs that were handed over with the last step
        self._events: list[wire.TraceEvent] = []
        self._mailbox = Mailbox(Life(me.name, self.epoch), "worker", spec.credentials, Timeouts())
        self._port = self._mailbox.bind(HOST, PortRange())
        self._mailbox.start(self)

    @property
    def key(self) -> str:
        return peer_key(self.me.name, self.epoch)

    @property
    def info(self) -> InstanceInfo:
        return InstanceInfo(
            name=self.me.name,
            role=self.role,
            state="ready",
            server_ip=HOST,
            device_ids=self.me.device_ids,
            epoch=self.epoch,
            pid=os.getpid(),
            control_port=self._port,
            public_key=self._mailbox.public_key,
            model_identity=self._spec.model_identity,
            max_model_len=self._spec.max_model_len,
            max_num_seqs=self._spec.max_num_seqs,
        )

    def close(self) -> None:
        self._mailbox.close()

    # ---- the mailbox's thread

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None:
        if isinstance(body, wire.Submit):
            self._loop.call_soon_threadsafe(self._submitted, Leg(conn, body, time.monotonic()))
        elif isinstance(body, wire.Abort):
            self._loop.call_soon_threadsafe(self._aborted, f"{body.request_id}-{body.attempt}")
        elif isinstance(body, wire.Peers):
            self._loop.call_soon_threadsafe(self._listed, body)

    def on_opened(self, conn: str, peer: str, kind: str) -> None:
        pass

    def on_closed(self, conn: str, peer: str, reason: str) -> None:
        pass

    def on_fatal(self, error: BaseException) -> None:
        traceback.print_exception(error)
        os._exit(1)  # otherwise the scheduler would wait for a failed instance

    def load(self) -> wire.Load:
        is_prefill = self.role == "prefill"
        queued = [len(leg.submit.order.prompt_token_ids) for leg in list(self._expected.values())] if is_prefill else []
        if is_prefill:
            cost = StepCost(prompt_token_s=1 / self._spec.prefill_tokens_per_s)
        else:
            cost = StepCost(step_s=self._spec.step_s)
        return wire.Load(
            num_running=self._num_running,
            num_waiting=len(queued) if is_prefill else len(self._waiting),
            num_blocks=4096,
            num_free_blocks=4096,
            num_queued_tokens=sum(queued),
            links=self.links,
            step_cost=cost,
            prompt_work=StepWork(num_prompt_tokens=int(is_prefill)),
            decode_work=StepWork(num_rows=int(not is_prefill)),
        )

    # ---- the event loop

    @property
    def step_s(self) -> float:
        return self._spec.prefill_step_s if self.role == "prefill" else self._spec.step_s

    def step(self) -> None:
        if self.role == "prefill":
            self.prefill_step()
        else:
            self.decode_step()

    def _listed(self, body: wire.Peers) -> None:
        """Takes the present roles: a prefill instance has links to all decode instances."""
        self._peers = {} if body.number == 1 else {key: self._peers[key] for key in self._peers if key not in body.gone}
        self._peers |= {peer_key(each.name, each.epoch): each for each in body.peers}
        if self.key in self._peers:
            self.role = self._peers[self.key].role
        decodes = [key for key, each in self._peers.items() if each.role == "decode"]
        self.links = {key: LinkState("up", ("shm",)) for key in decodes} if self.role == "prefill" else {}

    def _submitted(self, leg: Leg) -> None:
        transfer_id = leg.submit.transfer_id
        self._note(transfer_id, "submitted")
        if transfer_id in self._landed:
            self._landed.discard(transfer_id)
            self._waiting[transfer_id] = leg
        else:
            self._expected[transfer_id] = leg

    def _aborted(self, transfer_id: str) -> None:
        if (leg := self._running.pop(transfer_id, None)) is not None:
            self._num_running -= leg.num_sequences
        self._expected.pop(transfer_id, None)
        self._waiting.pop(transfer_id, None)
        self._landed.discard(transfer_id)

    def landed(self, transfer_id: str) -> None:
        leg = self._expected.pop(transfer_id, None)
        if leg is None:
            self._landed.add(transfer_id)
        else:
            self._waiting[transfer_id] = leg

    def _note(self, transfer_id: str, what: str, numbers: dict[str, int] = NOTHING) -> None:
        self._events.append(wire.TraceEvent(transfer_id, time.monotonic(), what, numbers))

    def _tokens(self, leg: Leg, position: int) -> list[TokenOutput]:
        """Returns a token for each sequence of the request."""
        token_ids, submit = self._spec.token_ids, leg.submit
        ending = "length" if position + 1 >= submit.order.sampling.max_tokens else None
        token_id = token_ids[position % len(token_ids)]
        return [
            TokenOutput(submit.request_id, submit.attempt, index, position, token_id, ending)  # type: ignore[arg-type]
            for index in range(leg.num_sequences)
        ]

    def _computed(self) -> dict[str, Leg]:
        """Removes and returns the prompts whose computation has ended."""
        found = {}
        for transfer_id, leg in self._expected.items():
            took_s = len(leg.submit.order.prompt_token_ids) / self._spec.prefill_tokens_per_s
            done_s = max(self._free_s, leg.read_s) + took_s
            if done_s > time.monotonic():
                break
            self._free_s = done_s
            found[transfer_id] = leg
        for transfer_id in found:
            del self._expected[transfer_id]
        return found

    def prefill_step(self) -> None:
        """Answers computed prompts: sends their first tokens now, and the ends of their legs with the next step."""
        ends, self._ends = self._ends, {}
        tokens: dict[str, list[TokenOutput]] = {}
        prompts: dict[str, list[PromptOutput]] = {}
        for transfer_id, leg in self._computed().items():
            for what, numbers in PREFILL_EVENTS.items():
                self._note(transfer_id, what, numbers)
            submit, first = leg.submit, self._tokens(leg, 0)
            tokens.setdefault(leg.conn, []).extend(first)
            prompts.setdefault(leg.conn, []).append(PromptOutput(submit.request_id, submit.attempt))
            if first[0].finish_reason is None:
                self._note(transfer_id, "confirmed")
                self._handed_over(submit.peer, transfer_id)
                self._ends.setdefault(leg.conn, []).append(LegEnd(submit.request_id, submit.attempt))
        for conn in {*tokens, *ends}:
            self._send(conn, tokens.get(conn, []), ends.get(conn, []), prompts.get(conn, []))

    def _admit(self) -> None:
        """Starts landed prompts, in the order in which they landed, while there is capacity."""
        while self._waiting:
            transfer_id, leg = next(iter(self._waiting.items()))
            if self._num_running and self._num_running + leg.num_sequences > self._spec.max_num_seqs:
                return
            self._running[transfer_id] = self._waiting.pop(transfer_id)
            self._num_running += leg.num_sequences

    def decode_step(self) -> None:
        """Sends a token of every running sequence; a new sequence repeats its first token in the same message."""
        self._admit()
        tokens: dict[str, list[TokenOutput]] = {}
        for transfer_id, leg in list(self._running.items()):
            told = tokens.setdefault(leg.conn, [])
            if not leg.num_tokens:
                for what, numbers in DECODE_EVENTS.items():
                    self._note(transfer_id, what, numbers)
                told += self._tokens(leg, 0)
                leg.num_tokens = 1
            told += self._tokens(leg, leg.num_tokens)
            leg.num_tokens += 1
            if told[-1].finish_reason is not None:
                self._note(transfer_id, "finished", {"num_tokens": leg.num_tokens})
                del self._running[transfer_id]
                self._num_running -= leg.num_sequences
        for conn, told in tokens.items():
            self._send(conn, told, [], [])

    def _send(self, conn: str, tokens: list[TokenOutput], ends: list[LegEnd], prompts: list[PromptOutput]) -> None:
        events, self._events = self._events, []
        self._mailbox.send(conn, wire.Outputs(tokens, ends, prompts, events, time.monotonic()))


async def answer(worker: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers every HTTP request as `/instance` does."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while await reader.readuntil(b"\r\n\r\n"):
            body = msgspec.json.encode(worker.info)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body))
            writer.write(body)
            await writer.drain()
    writer.close()


async def steps(worker: Worker) -> None:
    due_s = time.monotonic()
    while True:
        due_s = max(due_s + worker.step_s, time.monotonic())
        await asyncio.sleep(due_s - time.monotonic())
        worker.step()


async def until_told(*loops: Coroutine[None, None, None]) -> None:
    """Runs the loops until standard input ends, because the parent ends or closes it.

    An error in one loop ends all.
    """
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    told = asyncio.ensure_future(reader.read())
    tasks = [asyncio.ensure_future(each) for each in loops]
    await asyncio.wait([told, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()


async def serve(spec: WorkersSpec) -> None:
    workers: dict[str, Worker] = {}  # by name@epoch
    for me in spec.workers:
        worker = Worker(spec, me, lambda peer, transfer_id: workers[peer].landed(transfer_id))
        workers[worker.key] = worker
    for worker in workers.values():
        await asyncio.start_server(partial(answer, worker), HOST, worker.me.port)
    await until_told(*map(steps, workers.values()))
    for worker in workers.values():
        worker.close()


if __name__ == "__main__":
    uvloop.run(serve(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=WorkersSpec)))
