"""`python -m benchmarks engine --parts unit`: compares a unit of two instances to two instances that each have all
experts.

The instances are rank processes of the engine, with one thread each. This process is their scheduler: it tells them the
other members, submits requests, and records when tokens come. The model is moe-1B.
"""

from __future__ import annotations

import contextlib
import gc
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import experts
from benchmarks.child_process import ChildFailed, last_lines, running_child, sigterm_raises
from benchmarks.figures import begin, finish, result
from benchmarks.peers.make_model import write
from benchmarks.process_use import mapped_kib
from benchmarks.random_models import model_of
from benchmarks.workloads import random_prompt
from pd_cluster import wire
from pd_cluster.bench.process_times import cpu_s
from pd_cluster.net.mailbox import Mailbox
from pd_cluster.net.peer_admission import Life
from pd_cluster.process_messages import RankReport
from pd_cluster.result_tables import Better, Report, Result
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.process_configs import Credentials, UnitPlace, WorkerConfig
from pd_cluster.settings.process_settings import PortRange
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import RequestSpec, Sampling
from ranktable_tools.public_keys import public_key

NAME = "unit"
SIZE, NUM_SEQUENCES, PROMPT_LEN, NUM_TOKENS = 2, 16, 32, 48
HOST, EPOCH = "127.0.0.1", 1
ASLEEP_S, WAIT_S = 5.0, 300.0
BUSY = {"all": (NUM_SEQUENCES, NUM_SEQUENCES), "one": (NUM_SEQUENCES, 0), "single": (1, 0)}  # sequences of each member
UNIT, APART = "a unit", "two instances"
Figures = dict[str, float]
RATIOS: tuple[tuple[str, Better, float, str, str], ...] = (
    ("tokens/s of a unit ÷ two instances", "higher", 0.95, f"{UNIT}, all", f"{APART}, all"),
    ("time a token of 16 sequences with an idle member ÷ alone", "lower", 1.25, f"{APART}, one", f"{UNIT}, one"),
    ("time a token of 1 sequence, likewise", "lower", 1.25, f"{APART}, single", f"{UNIT}, single"),
)


@dataclass(slots=True, eq=False)
class Member:
    """A rank process, and the reports that it has sent to this process."""

    config: WorkerConfig
    process: subprocess.Popen[bytes]
    channel: socket.socket  # the parent's end
    place: Path  # folder of its log and of its message count
    conn: str = ""
    tokens: list[tuple[float, int]] = field(default_factory=list)  # (time of arrival, position)
    loads: list[tuple[float, wire.Load]] = field(default_factory=list)  # (time of arrival, load)
    num_ended: int = 0

    def await_state(self, state: str) -> wire.PeerInfo:
        """Waits until the member reports this state. Raises ChildFailed."""
        report = msgspec.json.decode(self.channel.recv(1 << 16) or b"{}", type=RankReport)
        if report.state != state:
            said = last_lines(self.place / "log")
            raise ChildFailed(f"{self.config.name}: {report.error or report.lost}; its last lines:\n{said}")
        unit = self.config.unit
        return wire.PeerInfo(
            name=self.config.name,
            epoch=EPOCH,
            role="decode",
            host=HOST,
            control_port=report.control_port,
            public_key=report.public_key,
            unit=unit.name if unit else "",
            unit_rank=unit.rank if unit else 0,
            is_forming=state == "forming",
        )


class UnitScheduler:
    """The scheduler of two members; satisfies the mailbox's Handler."""

    def __init__(self, model: Path, vocab_size: int, is_unit: bool, held: contextlib.ExitStack) -> None:
        """Waits until both members are ready. Raises ChildFailed."""
        key, secret = secrets.token_bytes(32), secrets.token_bytes(32)
        self._vocab_size, self._rng, self._changed = vocab_size, random.Random(0), threading.Condition()
        self._mailbox = Mailbox(Life("scheduler", EPOCH), "scheduler", Credentials(secret, key=key), Timeouts())
        held.callback(self._mailbox.close)
        self._mailbox.bind(HOST, PortRange())
        self._mailbox.start(self)
        own = Credentials(secret, (public_key(key),))
        self.members = [_started(_config(str(model), rank, is_unit, own), held) for rank in range(SIZE)]
        peers = [member.await_state("forming" if is_unit else "ready") for member in self.members]
        for member, peer in zip(self.members, peers, strict=True):
            member.conn = self._mailbox.connect(peer.name, EPOCH, HOST, peer.control_port, peer.public_key)
            self._mailbox.send(member.conn, wire.Peers(peers))
        for member in self.members if is_unit else ():
            member.await_state("ready")

    def decode(self, nums_sequences: Sequence[int], num_tokens: int = NUM_TOKENS) -> tuple[float, float]:
        """Returns tokens/s while these numbers of sequences decode, and the share of the time that exchanges take."""
        for member, num in zip(self.members, nums_sequences, strict=True):
            member.tokens, member.num_ended = [], 0
            for _ in range(num):
                prompt = random_prompt(self._rng, self._vocab_size, PROMPT_LEN)
                name = secrets.token_hex(8)
                order = RequestSpec(prompt, Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))
                self._mailbox.send(member.conn, wire.Submit(name, 0, name, "hybrid", "", order, 0.0))
        with self._changed:
            ended = lambda: [each.num_ended for each in self.members] == list(nums_sequences)  # noqa: E731
            if not self._changed.wait_for(ended, WAIT_S):
                raise ChildFailed(f"not all requests ended; last lines:\n{last_lines(self.members[0].place / 'log')}")
        busy = [each for each in self.members if each.tokens]
        first_s = max(at_s for each in busy for at_s, position in each.tokens if not position)
        last_s = min(each.tokens[-1][0] for each in busy)
        num_timed = sum(first_s < at_s <= last_s for each in busy for at_s, _ in each.tokens)
        heard = [(at_s, load.exchange_s) for at_s, load in busy[0].loads if first_s <= at_s <= last_s]
        share = (heard[-1][1] - heard[0][1]) / (heard[-1][0] - heard[0][0]) if len(heard) > 1 else 0.0  # quick runs
        return num_timed / (last_s - first_s), share

    def asleep(self) -> Figures:
        """Measures both members for some seconds without requests."""
        time.sleep(1.0)  # by then heartbeats include the last round
        start_s, before = time.monotonic(), self._done()
        time.sleep(ASLEEP_S)
        took_s, (num_messages, used_s) = time.monotonic() - start_s, self._done()
        cores = (used_s - before[1]) / took_s
        return {"asleep: messages and rounds": num_messages - before[0], "asleep: CPU time of both": 100 * cores}

    def _done(self) -> tuple[int, float]:
        counts = [each.loads[-1][1].num_rounds + int((each.place / "count").read_text()) for each in self.members]
        return sum(counts), sum(cpu_s(each.process.pid) for each in self.members)

    # ---- the mailbox's thread

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None:
        now_s, member = time.monotonic(), next(each for each in self.members if each.conn == conn)
        match body:
            case wire.Heartbeat(load=wire.Load() as load):
                member.loads.append((now_s, load))
            case wire.Outputs(tokens, ended):
                assert not any(each.error for each in ended), ended
                with self._changed:
                    member.tokens += [(now_s, each.position) for each in tokens]
                    member.num_ended += sum(each.finish_reason is not None for each in tokens)
                    self._changed.notify_all()

    def on_opened(self, conn: str, peer: str, kind: str) -> None: ...
    def on_closed(self, conn: str, peer: str, reason: str) -> None: ...
    def on_fatal(self, error: BaseException) -> None:
        print(error)

    def load(self) -> None: ...


def _config(model: str, rank: int, is_unit: bool, credentials: Credentials) -> WorkerConfig:
    place: dict[str, Any] = {"data_parallel_size": SIZE, "unit_rank": rank} if is_unit else {}
    sizes: dict[str, Any] = {"num_blocks": 256, "max_model_len": 256, "max_num_seqs": NUM_SEQUENCES}
    engine = EngineConfig(model=model, device="cpu", dtype="float32", enable_prefix_caching=False, **sizes, **place)
    return WorkerConfig(
        name=f"decode-{rank}",
        role="decode",
        server_ip=HOST,
        bind_address=HOST,
        device_ids=[str(rank)],
        epoch=EPOCH,
        credentials=credentials,
        num_threads=1,
        engine=engine,
        timeouts=Timeouts(),
        unit=UnitPlace(name="decode-0..1", rank=rank, size=SIZE) if is_unit else None,
    )


def _started(config: WorkerConfig, held: contextlib.ExitStack) -> Member:
    place = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="pd-cluster-bench-")))
    (count := place / "count").write_text("0")
    ours, theirs = map(held.enter_context, socket.socketpair())
    ours.settimeout(WAIT_S)
    ours.sendall(msgspec.json.encode(config) + b"\n")
    command = [sys.executable, "-m", "benchmarks.peers.unit_member", str(theirs.fileno()), str(count)]
    with theirs:
        process = held.enter_context(running_child(command, place / "log", 1, fds=[theirs.fileno()]))
    return Member(config, process, ours, place)


def run(rounds: int, quick: bool, json: str) -> None:
    """Measures and reports. Raises PdClusterError if a member fails."""
    begin(json)
    rounds, started_s = 1 if quick else rounds, time.monotonic()
    sizes = {**experts.SHARED, **(experts.SMALL if quick else {}), **experts.SPARSE}
    with sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        model = Path(folder) / "model"
        write(model_of("glm4_moe", sizes), model)
        gc.collect()
        found = [_measure(model, sizes["vocab_size"]) for _ in range(rounds)]
    report = Report(f"python -m benchmarks engine --parts {NAME} --rounds {rounds}", [*_results(found)])
    finish(report, f"{rounds} rounds, 1 thread each, {time.monotonic() - started_s:.0f} s", json, quick)


def _measure(model: Path, vocab_size: int) -> Figures:
    figures = Figures()
    for name in (UNIT, APART):
        with contextlib.ExitStack() as held:
            desk = UnitScheduler(model, vocab_size, name == UNIT, held)
            desk.decode(BUSY["all"], 4)  # the first steps compile
            for busy, nums_sequences in BUSY.items():
                figures[f"{name}, {busy}"], share = desk.decode(nums_sequences)
                figures[f"{name}, {busy}: exchange"] = 100 * share
            figures[f"{name}: memory"] = mapped_kib(desk.members[0].process.pid, "Anonymous") * 1024
            if name == UNIT:
                figures |= desk.asleep()
        rates = ", ".join(f"{figures[f'{name}, {busy}']:.1f}" for busy in BUSY)
        print(f"{name}: {rates} tokens/s", flush=True)
    return figures


def _results(rounds: Sequence[Figures]) -> Iterator[Result]:
    for name, better, goal, above, below in RATIOS:
        yield result(name, [each[above] / each[below] for each in rounds], "x", better, goal)
    yield result("exchange, share of a step", [each[f"{UNIT}, all: exchange"] for each in rounds], "%", "lower", 15.0)
    for name, who in ((UNIT, "a member"), (APART, "an instance")):
        yield result(f"memory of {who}", [each[f"{name}: memory"] / 1e9 for each in rounds], "GB")
    num_messages = [each["asleep: messages and rounds"] for each in rounds]
    yield result("messages and rounds of both, asleep", num_messages, "", "lower", 0.0)
    yield result("CPU time of both, asleep", [each["asleep: CPU time of both"] for each in rounds], "% of a core")
