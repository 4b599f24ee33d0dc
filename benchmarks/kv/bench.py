"""`python -m benchmarks kv`: the KV cache's way from one process to another, against the machine's limits.

Two processes with the worker's own mailbox, links, exports and transports, and no model, hand over prompts of several
sizes. In every round each measurement is paired with its baseline: one thread's copy between two mappings for shared
memory, plain gloo for torch.distributed. Then a cluster with a link as slow as its computation shows how much of a
transfer streaming hides.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.child import ChildFailed, sigterm_raises
from benchmarks.kv.child import Child, two_children
from benchmarks.kv.goals import (
    KVReport,
    baseline_of,
    figure,
    handover_goals,
    latencies,
    other_goals,
    results,
    show,
)
from benchmarks.kv.spec import (
    RUN_BLOCKS,
    Answer,
    Command,
    Gloo,
    Handover,
    Lane,
    LastTransfer,
    MakePool,
    Memcpy,
    Move,
    OpenGloo,
    OpenLane,
    OpenUcx,
    Ucx,
)
from benchmarks.kv.streaming import measure_streaming
from pd_cluster.devices.device import CPU
from pd_cluster.errors import ConfigError
from pd_cluster.tables import check_writable
from pd_cluster.transport.table import BY_NAME, choices_for
from pd_cluster.wire import TransportName

TRANSPORTS = choices_for("cpu")
ALL_TRANSPORTS = choices_for("cpu", with_extras=True)
SIZES_MIB = (1, 16, 256)
MOST_MIB = 1024
DEADLINE_S = 120.0
NUM_TRIES = 3  # per measurement and round: the best counts, for baselines too
PAYLOADS = (4 << 20, 16 << 20)  # the better one counts
NUM_SINGLE_BLOCKS = 200
BUSY_LOAD = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBench:
    """The command's parameters."""

    rounds: int = 5
    transports: tuple[TransportName, ...] = TRANSPORTS
    sizes_mib: tuple[int, ...] = SIZES_MIB
    streaming: bool = True
    quick: bool = False

    @property
    def command(self) -> str:
        flags = f"--rounds {self.rounds} --transports {','.join(self.transports)}"
        flags += f" --sizes {','.join(map(str, self.sizes_mib))}"
        flags += " --quick" if self.quick else "" if self.streaming else " --no-streaming"
        return f"python -m benchmarks kv {flags}"

    @property
    def moves(self) -> list[tuple[int, Move]]:
        """The moves for each size in MiB, which is also its number of blocks."""
        return [(size, self._move(size)) for size in self.sizes_mib]

    @property
    def num_pool_blocks(self) -> int:
        most = max(move.num_blocks * move.num_under_way for _, move in self.moves)
        return -(-max(most, 4 * RUN_BLOCKS if self.quick else 512) // RUN_BLOCKS) * RUN_BLOCKS

    def _move(self, size_mib: int) -> Move:
        num_under_way = 8 if size_mib < 128 else 2
        total_mib = 4 if self.quick else 128 if size_mib < 16 else 512
        count = max(num_under_way, total_mib // size_mib)
        return Move(num_blocks=size_mib, count=count, num_under_way=num_under_way)


def make_bench(rounds: int, transports: str, sizes: str, streaming: bool, quick: bool) -> KVBench:
    """Builds the bench from the command line, where empty means all. Raises ConfigError."""
    wanted = _names(transports) or TRANSPORTS
    if unknown := [name for name in wanted if name not in ALL_TRANSPORTS]:
        raise ConfigError(f"--transports {unknown[0]}: expected some of {','.join(ALL_TRANSPORTS)}")
    for name in wanted:
        if problem := BY_NAME[name].why_not(CPU):
            raise ConfigError(f"--transports {name}: {problem}")
    try:
        sizes_mib = tuple(int(size) for size in _names(sizes)) or ((1,) if quick else SIZES_MIB)
    except ValueError:
        raise ConfigError(f"--sizes {sizes}: expected numbers of MiB, such as 1,16,256") from None
    if not all(1 <= size <= MOST_MIB for size in sizes_mib):
        raise ConfigError(f"--sizes {sizes}: must be 1 to {MOST_MIB} MiB")
    return KVBench(
        rounds=1 if quick else rounds,
        transports=tuple(name for name in ALL_TRANSPORTS if name in wanted),
        sizes_mib=sizes_mib,
        streaming=streaming and not quick,
        quick=quick,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def run(bench: KVBench, json_path: str = "") -> None:
    """Measures, prints, writes. Raises PdClusterError if something fails; never leaves a process behind."""
    check_writable(json_path)
    if (load := os.getloadavg()[0]) > BUSY_LOAD:
        print(f"note: this machine is busy already (load {load:.1f}); expect low figures and a wide spread", flush=True)
    started_s = time.monotonic()
    with sigterm_raises(), tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        with two_children("kv_sender", "kv_receiver", Path(folder)) as (sender, receiver):
            pair = Pair(bench, sender, receiver)
            pair.open()
            rounds = [pair.measure(number) for number in range(bench.rounds)]
        if bench.streaming:
            rounds += measure_streaming(Path(folder), max(3, bench.rounds))
    goals = [] if bench.quick else [*handover_goals(rounds, bench.transports, bench.sizes_mib), *other_goals(rounds)]
    report = KVReport(bench.command, results(rounds), goals)
    show(report, f"{bench.rounds} rounds, {time.monotonic() - started_s:.0f} s")
    if bench.quick:
        print("note: --quick tells whether everything runs; its figures mean nothing")
    if json_path:
        report.write(json_path)


class Pair:
    """Measures with the two children. Raises ChildFailed."""

    def __init__(self, bench: KVBench, sender: Child, receiver: Child) -> None:
        self._bench = bench
        self._sender, self._receiver = sender, receiver
        self._lanes: list[Lane] = []

    def open(self) -> None:
        print(f"starting two processes with pools of {self._bench.num_pool_blocks} MiB …", flush=True)
        self._both(MakePool(self._bench.num_pool_blocks))
        for transport in self._bench.transports:
            for checked in (False, True):
                self._open_lane(Lane(transport=transport, checked=checked, secret=secrets.token_bytes(32)))
        if "gloo" in map(baseline_of, self._bench.transports):
            self._both(OpenGloo(self._sender.ask(OpenGloo(), DEADLINE_S).port))
        if "ucx" in map(baseline_of, self._bench.transports):
            there = self._sender.ask(OpenUcx(), DEADLINE_S)
            self._receiver.ask(OpenUcx(there.address), DEADLINE_S)
        num_runs = self._bench.num_pool_blocks // RUN_BLOCKS
        for lane in self._lanes:  # maps every page once before measuring
            self._hand_over(lane, Move(num_blocks=RUN_BLOCKS, count=num_runs, num_under_way=2))

    def measure(self, number: int) -> dict[str, float]:
        """Runs one round: every size, each measurement next to its baseline, in alternating order."""
        started_s = time.monotonic()
        found: dict[str, float] = {}
        for size_mib, move in self._bench.moves:
            for transport in self._bench.transports:
                found |= {
                    figure(what, size_mib): move.nbytes / took_s / 1e9
                    for what, took_s in self._beside(transport, move, backwards=number % 2 == 1)
                }
        for lane in self._lanes:
            found |= self._single_blocks(lane)
        rates = ", ".join(f"{name} {value:.1f}" for name, value in found.items() if "MiB" in name)
        print(f"round {number + 1} of {self._bench.rounds} ({time.monotonic() - started_s:.0f} s): {rates}", flush=True)
        return found

    def _beside(self, transport: TransportName, move: Move, backwards: bool) -> list[tuple[str, float]]:
        """Returns the seconds of the baseline and of each lane: the best of some tries, taken in turns."""
        lanes = [lane for lane in self._lanes if lane.transport == transport]
        baseline = baseline_of(transport)
        best_s = dict.fromkeys([baseline, *(lane.name for lane in lanes)], float("inf"))
        for _ in range(1 if self._bench.quick else NUM_TRIES):
            for lane in reversed(lanes) if backwards else lanes:
                best_s[lane.name] = min(best_s[lane.name], self._hand_over(lane, move).took_s)
            best_s[baseline] = min(best_s[baseline], self._baseline(baseline, move))
        return list(best_s.items())

    def _open_lane(self, lane: Lane) -> None:
        there = self._receiver.ask(OpenLane(lane), DEADLINE_S)
        self._sender.ask(OpenLane(msgspec.structs.replace(lane, port=there.port, epoch=there.epoch)), DEADLINE_S)
        self._lanes.append(lane)

    def _hand_over(self, lane: Lane, move: Move) -> Answer:
        """Returns the answer with the receiver's times, after comparing the received blocks with those sent."""
        sent = self._sender.ask(Handover(lane.name, move), DEADLINE_S)
        blocks = self._sender.ask(LastTransfer(lane.name), DEADLINE_S).blocks
        landed = self._receiver.ask(LastTransfer(lane.name), DEADLINE_S)
        if landed.blocks != blocks or len(landed.landings_s) != move.count:
            raise ChildFailed(f"{lane.name}: what has landed is not what was sent")
        return msgspec.structs.replace(sent, landings_s=landed.landings_s)

    def _single_blocks(self, lane: Lane) -> dict[str, float]:
        move = Move(num_blocks=1, count=4 if self._bench.quick else NUM_SINGLE_BLOCKS, num_under_way=1)
        answer = self._hand_over(lane, move)
        return dict(latencies(lane.name, answer.ships_s, answer.confirms_s, answer.landings_s))

    def _baseline(self, baseline: str, move: Move) -> float:
        """Returns the baseline's seconds."""
        if baseline == "memcpy":
            return self._receiver.ask(Memcpy(move), DEADLINE_S).took_s
        payloads = [nbytes for nbytes in PAYLOADS if nbytes <= move.nbytes]
        if baseline == "ucx":
            return min(self._receiver.ask(Ucx(move.nbytes, nbytes), DEADLINE_S).took_s for nbytes in payloads)
        return min(self._both(Gloo(move.nbytes, nbytes)) for nbytes in payloads)

    def _both(self, command: Command) -> float:
        """Runs both together; returns the slower one's seconds."""
        for child in (self._sender, self._receiver):
            child.tell(command)
        return max(child.hear(DEADLINE_S).took_s for child in (self._sender, self._receiver))
