"""`python -m benchmarks engine --parts unit`: a unit of two instances, beside two that have all experts each.

They are rank processes of the engine, with one thread each. This process is their scheduler: it names the mates,
submits requests, and notes when tokens come. The model is moe-1B.
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
from benchmarks.child import ChildFailed, child_environment, end_group, last_lines, sigterm_raises
from benchmarks.figures import begin, finish, result
from benchmarks.peers.make_model import write
from benchmarks.processes import cpu_s, rss_nbytes
from benchmarks.shapes import model_of
from benchmarks.workloads import random_prompt
from pd_cluster import wire
from pd_cluster.devices.spinning import PARKED
from pd_cluster.net.admission import Life
from pd_cluster.net.mailbox import Mailbox
from pd_cluster.reports import RankReport
from pd_cluster.settings.config import Credentials, UnitPlace, WorkerConfig
from pd_cluster.settings.engine import EngineConfig
from pd_cluster.settings.processes import PortRange
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.tables import Better, Report, Result
from pd_cluster.types import Order, Sampling
from ranktable_tools.public_keys import public_key

NAME = "unit"
SIZE, NUM_SEQUENCES, PROMPT_LEN, NUM_TOKENS = 2, 16, 32, 48
HOST, EPOCH = "127.0.0.1", 1
ASLEEP_S, WAIT_S = 5.0, 300.0
BUSY = {"all": (NUM_SEQUENCES, NUM_SEQUENCES), "one": (NUM_SEQUENCES, 0), "single": (1, 0)}  # sequences of each member
UNIT, APART = "a unit", "two instances"
Figures = dict[str, float]
RATIOS: tuple[tuple[str, Better, float, str, str], ...] = (
    ("tokens/s of a unit, times two instances", "higher", 0.95, f"{UNIT}, all", f"{APART}, all"),
    ("time a token of 16 sequences beside an idle member, times alone", "lower", 1.25, f"{APART}, one", f"{UNIT}, one"),
    ("time a token of 1 sequence, likewise", "lower", 1.25, f"{APART}, single", f"{UNIT}, single"),
)


@dataclass(slots=True, eq=False)
class Member:
    """A rank process, and what this one has heard of it."""

    config: WorkerConfig
    process: subprocess.Popen[bytes]
    channel: socket.socket  # its parent's end
    place: Path  # of its log, and of the number of its messages
    conn: str = ""
    load: wire.Load = field(default_factory=wire.Load)
    tokens: list[tuple[float, int]] = field(default_factory=list)  # (when it came, its position)
    exchanged: list[tuple[float, float]] = field(default_factory=list)  # (when it was heard, seconds until then)
    num_ended: int = 0

    def await_state(self, state: str) -> wire.PeerInfo:
        """Raises ChildFailed."""
        line = b""
        while not line.endswith(b"\n"):
            if not (more := self.channel.recv(1 << 16)):
                raise ChildFailed(f"{self.config.name} ended; its last lines:\n{last_lines(self.place / 'log')}")
            line += more
        report = msgspec.json.decode(line, type=RankReport)
        if report.state != state:
            raise ChildFailed(f"{self.config.name} {report.state}: {report.error or report.lost}")
        unit, name = self.config.unit, self.config.name
        place: dict[str, Any] = {"unit": unit.name, "unit_rank": unit.rank, "is_forming": True} if unit else {}
        address: dict[str, Any] = {"host": HOST, "control_port": report.control_port, "public_key": report.public_key}
        return wire.PeerInfo(name=name, epoch=EPOCH, role="decode", **address, **place)


class Desk:
    """The scheduler of these members; satisfies the mailbox's Handler."""

    def __init__(self, model: Path, vocab_size: int, is_unit: bool, folder: Path) -> None:
        """Returns once all are ready. Raises ChildFailed."""
        key, secret = secrets.token_bytes(32), secrets.token_bytes(32)
        self.members = list[Member]()
        self._vocab_size, self._rng, self._changed = vocab_size, random.Random(0), threading.Condition()
        self._mailbox = Mailbox(Life("scheduler", EPOCH), "scheduler", Credentials(secret, key=key), Timeouts())
        self._mailbox.bind(HOST, PortRange())
        try:
            for rank in range(SIZE):
                config = _config(str(model), rank, is_unit, Credentials(secret, (public_key(key),)))
                self.members.append(_start(config, folder / f"{is_unit}-{rank}"))
            self._mailbox.start(self)
            peers = [member.await_state("forming" if is_unit else "ready") for member in self.members]
            for member, peer in zip(self.members, peers, strict=True):
                member.conn = self._mailbox.connect(peer.name, EPOCH, HOST, peer.control_port, peer.public_key)
            for member in self.members:
                self._mailbox.send(member.conn, wire.Peers(peers))
            for member in self.members if is_unit else ():
                member.await_state("ready")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for member in self.members:
            end_group(member.process)
            member.channel.close()
        self._mailbox.close()

    def decode(self, nums_sequences: Sequence[int]) -> tuple[float, float]:
        """Returns tokens/s while so many sequences of each member decode, and the share of exchanges in that time."""
        for member, num in zip(self.members, nums_sequences, strict=True):
            member.tokens, member.exchanged, member.num_ended = [], [], 0
            for _ in range(num):
                prompt = random_prompt(self._rng, self._vocab_size, PROMPT_LEN)
                name = secrets.token_hex(8)
                order = Order(prompt, Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True))
                self._mailbox.send(member.conn, wire.Submit(name, 0, name, "hybrid", "", order, 0.0))
        with self._changed:
            ended = lambda: [each.num_ended for each in self.members] == list(nums_sequences)  # noqa: E731
            if not self._changed.wait_for(ended, WAIT_S):
                raise ChildFailed(f"not all requests ended; last lines:\n{last_lines(self.members[0].place / 'log')}")
        busy = [each for each in self.members if each.tokens]
        first_s = max(at_s for each in busy for at_s, position in each.tokens if not position)
        last_s = min(each.tokens[-1][0] for each in busy)
        num_tokens = sum(first_s < at_s <= last_s for each in busy for at_s, _ in each.tokens)
        heard = [each for each in busy[0].exchanged if first_s <= each[0] <= last_s]
        shares = [(heard[-1][1] - heard[0][1]) / (heard[-1][0] - heard[0][0])] if len(heard) > 1 else []
        return num_tokens / (last_s - first_s), sum(shares)  # quick runs are too short for two heartbeats

    def asleep(self) -> Figures:
        """Returns what both members do in some seconds without requests."""
        time.sleep(1.0)  # until heartbeats tell of the last round
        start_s, before = time.monotonic(), self._done()
        time.sleep(ASLEEP_S)
        took_s, (num_messages, used_s) = time.monotonic() - start_s, self._done()
        cores = (used_s - before[1]) / took_s
        return {"asleep: messages and rounds": num_messages - before[0], "asleep: CPU time of both": 100 * cores}

    def _done(self) -> tuple[int, float]:
        counts = [each.load.num_rounds + int((each.place / "count").read_text()) for each in self.members]
        return sum(counts), sum(cpu_s(each.process.pid) for each in self.members)

    # ---- the mailbox's thread

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None:
        now_s, member = time.monotonic(), next(each for each in self.members if each.conn == conn)
        match body:
            case wire.Heartbeat(load=wire.Load() as load):
                member.load = load
                member.exchanged.append((now_s, load.exchange_s))
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


def _start(config: WorkerConfig, place: Path) -> Member:
    place.mkdir()
    (place / "count").write_text("0")
    ours, theirs = socket.socketpair()
    ours.settimeout(WAIT_S)
    number = str(theirs.fileno())
    with theirs, (place / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.unit_member", number, str(place / "count")],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**child_environment(1), **PARKED},
            start_new_session=True,
        )
    ours.sendall(msgspec.json.encode(config) + b"\n")
    return Member(config, process, ours, place)


def run(rounds: int, quick: bool, json: str) -> None:
    """Raises PdClusterError: a member failed."""
    begin(json)
    rounds, started_s = 1 if quick else rounds, time.monotonic()
    sizes = {**experts.SHARED, **(experts.SMALL if quick else {}), **experts.SPARSE}
    with sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        model = Path(folder) / "model"
        write(model_of("glm4_moe", sizes), model)
        gc.collect()
        found = [_measure(model, sizes["vocab_size"], Path(tempfile.mkdtemp(dir=folder))) for _ in range(rounds)]
    report = Report(f"python -m benchmarks engine --parts {NAME} --rounds {rounds}", [*_results(found, sizes)])
    finish(report, f"{rounds} rounds, 1 thread each, {time.monotonic() - started_s:.0f} s", json, quick)


def _measure(model: Path, vocab_size: int, folder: Path) -> Figures:
    figures = Figures()
    for name in (UNIT, APART):
        with contextlib.closing(Desk(model, vocab_size, name == UNIT, folder)) as desk:
            for busy, nums_sequences in BUSY.items():
                desk.decode(nums_sequences)
                figures[f"{name}, {busy}"], share = desk.decode(nums_sequences)
                figures[f"{name}, {busy}: exchange"] = 100 * share
            figures[f"{name}: memory"] = rss_nbytes(desk.members[0].process.pid)
            if name == UNIT:
                figures |= desk.asleep()
        rates = ", ".join(f"{figures[f'{name}, {busy}']:.1f}" for busy in BUSY)
        print(f"{name}: {rates} tokens/s", flush=True)
    return figures


def _results(rounds: Sequence[Figures], sizes: dict[str, Any]) -> Iterator[Result]:
    for name, better, goal, above, below in RATIOS:
        yield result(name, [each[above] / each[below] for each in rounds], "x", better, goal)
    yield result("exchange, share of a step", [each[f"{UNIT}, all: exchange"] for each in rounds], "%", "lower", 15.0)
    yield result("asleep: messages and rounds", [each["asleep: messages and rounds"] for each in rounds], "", "lower", 0.0)
    yield result("asleep: CPU time of both", [each["asleep: CPU time of both"] for each in rounds], "% of a core")
