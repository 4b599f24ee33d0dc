"""`python -m benchmarks kv`: compares transfers of KV cache between two processes to the machine's limits.

Two processes with the worker's mailbox, links, exports and transports, but no model, hand over prompts of several
sizes. In each round, every measurement is paired with its baseline: for transports within a host, one thread's copy
between two mappings; for the others, plain gloo.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.child_process import ChildFailed, sigterm_raises
from benchmarks.figures import begin, finish, names_of, result
from benchmarks.kv.kv_child import Child, two_children
from benchmarks.kv.kv_messages import (
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
)
from pd_cluster.devices.device import CPU
from pd_cluster.errors import ConfigError
from pd_cluster.result_tables import Report, Result, percentile
from pd_cluster.transport.transport_table import BY_NAME, choices_for
from pd_cluster.wire import TransportName

DEADLINE_S = 120.0
NUM_TRIES = 3  # tries per measurement and round; the best one counts, also for baselines
PAYLOADS = (4 << 20, 16 << 20)  # payload sizes of gloo; the better one counts
NUM_SINGLE_BLOCKS = 200
SHARES = {"shm": (0.85, 0.60), "dist": (0.90, 0.80)}  # goals, as shares of the baseline, with checks off and on
LEAST_MIB = 16  # smaller transfers have no goal
BLOCK_GOAL_MS = 1.0

Round = dict[str, float]  # name, such as "shm on 16 MiB" or "memcpy 16 MiB" -> GB/s; names that end in _ms -> ms


@dataclass(frozen=True, slots=True)
class KVBench:
    transports: tuple[TransportName, ...]
    sizes_mib: tuple[int, ...]
    quick: bool

    @property
    def moves(self) -> list[tuple[int, Move]]:
        """The sizes in MiB, which are also the numbers of blocks, each with its moves."""
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


def make_bench(transports: str, sizes: str, quick: bool) -> KVBench:
    """Makes the benchmark from its options; an empty text means the default. Raises ConfigError."""
    names = names_of("--transports", transports or ",".join(choices_for("cpu")), choices_for("cpu", with_extras=True))
    for name in names:
        if problem := BY_NAME[name].why_not(CPU):
            raise ConfigError(f"--transports {name}: {problem}")
    try:
        sizes_mib = tuple(int(size) for size in sizes.split(",")) if sizes else (1,) if quick else (1, 16, 256)
    except ValueError:
        raise ConfigError(f"--sizes {sizes}: expected numbers of MiB, such as 1,16,256") from None
    return KVBench(names, sizes_mib, quick)


def run(bench: KVBench, rounds: int, json: str) -> None:
    """Measures and reports. Raises PdClusterError if anything fails; never leaves a process behind."""
    begin(json)
    rounds = 1 if bench.quick else rounds
    with (
        sigterm_raises(),
        tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder,
        two_children("kv_sender", "kv_receiver", Path(folder)) as (sender, receiver),
    ):
        pair = Pair(bench, sender, receiver)
        pair.open()
        found = [pair.measure(f"round {number + 1} of {rounds}", number % 2 == 1) for number in range(rounds)]
    asked = f"--rounds {rounds} --transports {','.join(bench.transports)} --sizes {','.join(map(str, bench.sizes_mib))}"
    asked += " --quick" * bench.quick
    finish(Report(f"python -m benchmarks kv {asked}", [*results(found, bench)]), f"{rounds} rounds", json, bench.quick)


def baseline_of(transport: TransportName) -> str:
    return "memcpy" if BY_NAME[transport].is_same_host else "gloo"


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
                lane = Lane(transport=transport, checked=checked)
                self._lanes.append(open_lane(self._sender, self._receiver, lane, DEADLINE_S))
        if "gloo" in map(baseline_of, self._bench.transports):
            self._both(OpenGloo(self._sender.ask(OpenGloo(), DEADLINE_S).port))
        num_runs = self._bench.num_pool_blocks // RUN_BLOCKS
        for lane in self._lanes:  # maps every page once before the measurements
            self._hand_over(lane, Move(num_blocks=RUN_BLOCKS, count=num_runs, num_under_way=2))

    def measure(self, label: str, backwards: bool) -> Round:
        """Runs one round over all sizes. A measurement and its baseline follow each other, in alternating order."""
        found: Round = {}
        for size_mib, move in self._bench.moves:
            for transport in self._bench.transports:
                for what, took_s in self._beside(transport, move, backwards).items():
                    found[f"{what} {size_mib} MiB"] = move.nbytes / took_s / 1e9
        print(f"{label}: " + ", ".join(f"{name} {value:.1f}" for name, value in found.items()), flush=True)
        for lane in self._lanes:
            found |= self._single_blocks(lane)
        return found

    def _beside(self, transport: TransportName, move: Move, backwards: bool) -> dict[str, float]:
        """Returns the seconds of the baseline and of each lane, each the best of some tries, which take turns."""
        lanes = [lane for lane in self._lanes if lane.transport == transport]
        baseline = baseline_of(transport)
        best_s = dict.fromkeys([baseline, *(lane.name for lane in lanes)], float("inf"))
        for _ in range(1 if self._bench.quick else NUM_TRIES):
            for lane in reversed(lanes) if backwards else lanes:
                best_s[lane.name] = min(best_s[lane.name], self._hand_over(lane, move).took_s)
            best_s[baseline] = min(best_s[baseline], self._baseline(baseline, move))
        return best_s

    def _hand_over(self, lane: Lane, move: Move) -> Answer:
        return hand_over(self._sender, self._receiver, lane, move, DEADLINE_S)

    def _single_blocks(self, lane: Lane) -> Round:
        """Returns the median and p95 of the time from shipping one block to its confirmation."""
        count = 4 if self._bench.quick else NUM_SINGLE_BLOCKS
        told = self._hand_over(lane, Move(num_blocks=1, count=count, num_under_way=1))
        took_ms = [1e3 * (end - start) for start, end in zip(told.ships_s, told.confirms_s, strict=True)]
        return {f"block {lane.name}, p{at} _ms": percentile(took_ms, at) or 0.0 for at in (50, 95)}

    def _baseline(self, baseline: str, move: Move) -> float:
        """Returns the baseline's seconds."""
        if baseline == "memcpy":
            return self._receiver.ask(Memcpy(move), DEADLINE_S).took_s
        return min(self._both(Gloo(move.nbytes, nbytes)) for nbytes in PAYLOADS if nbytes <= move.nbytes)

    def _both(self, command: Command) -> float:
        """Runs a command in both children at the same time; returns the slower one's seconds."""
        for child in (self._sender, self._receiver):
            child.tell(command)
        return max(child.hear(DEADLINE_S).took_s for child in (self._sender, self._receiver))


def open_lane(sender: Child, receiver: Child, lane: Lane, deadline_s: float) -> Lane:
    lane = msgspec.structs.replace(lane, secret=secrets.token_bytes(32))
    there = receiver.ask(OpenLane(lane), deadline_s)
    lane = msgspec.structs.replace(lane, port=there.port, epoch=there.epoch)
    sender.ask(OpenLane(lane), deadline_s)
    return lane


def hand_over(sender: Child, receiver: Child, lane: Lane, move: Move, deadline_s: float) -> Answer:
    """Returns the sender's times. Compares the received blocks with the sent ones. Raises ChildFailed."""
    sent = sender.ask(Handover(lane.name, move), deadline_s)
    if receiver.ask(LastTransfer(lane.name), deadline_s).blocks != sent.blocks:
        raise ChildFailed(f"{lane.name}: what has landed is not what was sent")
    return sent


def results(rounds: Sequence[Mapping[str, float]], bench: KVBench) -> Iterator[Result]:
    """Yields all figures, in the order in which they were first measured, and then the shares."""
    goals = {"block shm on, p50 _ms": BLOCK_GOAL_MS}
    for name in dict.fromkeys(name for each in rounds for name in each):
        label, _, unit = name.partition(" _")
        better = "lower" if unit else "higher"
        values = [each[name] for each in rounds if name in each]
        yield result(label, values, unit or "GB/s", better, goals.get(name))  # type: ignore[arg-type]
    for transport in bench.transports:
        baseline = baseline_of(transport)
        for checks, goal in zip(("off", "on"), SHARES.get(transport, (None, None)), strict=True):
            for size in bench.sizes_mib:
                values = [
                    each[f"{transport} {checks} {size} MiB"] / each[f"{baseline} {size} MiB"]
                    for each in rounds
                    if f"{baseline} {size} MiB" in each
                ]
                most = None if size < LEAST_MIB else goal
                yield result(f"{transport} {checks}, {size} MiB: share of {baseline}", values, "x", "higher", most)
