"""KV blocks from every prefill instance of this host to every decode instance of it, between real processes.

One process for each device starts on the devices of the rank table; each lane of a pair then gets a link of its own,
one after the other, so that rates do not disturb each other. The link, its transport and its proofs are those of a
worker. Pairs with an end on another host are named and not checked. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import IO

import msgspec

from pd_cluster.cluster.members.place import Place, resolve_host
from pd_cluster.cluster.preflight.findings import Finding
from pd_cluster.devices import hccl
from pd_cluster.engine.trip.spec import BLOCK_NBYTES, NUM_BLOCKS, BeginTrips, Command, Compare, Listen, Send, TripAnswer
from pd_cluster.errors import ConfigError, LinkError
from pd_cluster.settings.processes import PortRange
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import Role
from ranktable_tools import Server
from ranktable_tools.hosts import host_key

BEGIN_S = 120.0  # to import torch and make a pool
PAIR_S = 180.0  # the ends' own deadlines come first
NUM_TRIPS = 4  # the first maps pages and is not counted
END_S = 5.0
NUM_LOG_LINES = 3

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ListedInstance:
    name: str
    role: Role
    server: Server


def instances_of(place: Place) -> list[ListedInstance]:
    """Returns all instances of the table in its order."""
    return [
        ListedInstance(name, "prefill" if at < len(place.table.prefill) else "decode", server)
        for at, (name, server) in enumerate(zip(place.names, place.table.instances, strict=True))
    ]


def lanes_of(num_source: int, num_target: int) -> list[tuple[int, int]]:
    """Returns the ranks that exchange KV heads: (P's rank, D's rank), as many as the larger instance has ranks."""
    most = max(num_source, num_target)
    return [(at * num_source // most, at * num_target // most) for at in range(most)]


def check_pairs(place: Place, device: str, kv_transport: str, say: Say) -> list[Finding]:
    """Sends KV blocks between all pairs of this host; one finding a pair. Leaves no process behind."""
    own = host_key(place.server.server_ip)
    found: list[Finding] = []
    here: list[tuple[ListedInstance, ListedInstance]] = []
    everyone = instances_of(place)
    for p, d in product(*([each for each in everyone if each.role == role] for role in ("prefill", "decode"))):
        hosts = {host_key(p.server.server_ip), host_key(d.server.server_ip)}
        if hosts == {own}:
            here.append((p, d))
        else:
            found.append(_elsewhere(p, d, own in hosts))
    if not here:
        return found
    with contextlib.ExitStack() as stack:
        ends = {}
        for instance in dict.fromkeys(each for pair in here for each in pair):
            for rank in range(len(instance.server.device)):
                ends[instance.name, rank] = stack.enter_context(running(instance, rank, device, kv_transport))
        say(f"starting {len(ends)} processes, one for each device of the pairs on this host")
        broken = _begin(ends, device)
        for p, d in here:
            reasons = [broken[name] for name in (p.name, d.name) if name in broken]
            if reasons:
                found.append(_failed(p, d, reasons[0]))
                continue
            say(f"sending KV blocks from {p.name} to {d.name}")
            found.append(_check_pair(p, d, ends))
    return found


def _elsewhere(p: ListedInstance, d: ListedInstance, has_end_here: bool) -> Finding:
    hosts = dict.fromkeys((p.server.server_ip, d.server.server_ip))
    where = f"{p.name} -> {d.name} ({' -> '.join(hosts)})"
    if has_end_here:
        way_out = "once both serve, `pd-cluster instances` shows whether their link is up"
        return Finding("unchecked", "KV", where, "no blocks are sent between hosts before the start", way_out)
    return Finding("unchecked", "KV", where, "not on this host", "run `pd-cluster check --network` there, too")


def _check_pair(p: ListedInstance, d: ListedInstance, ends: Mapping[tuple[str, int], RankEnd]) -> Finding:
    """Uses one link for each lane, one after the other; the slowest lane is the pair's rate."""
    rates: list[float] = []
    transports: set[str] = set()
    lanes = lanes_of(len(p.server.device), len(d.server.device))
    for source_rank, target_rank in lanes:
        source, target = ends[p.name, source_rank], ends[d.name, target_rank]
        try:
            sent = send_blocks(source, target, NUM_TRIPS)
        except LinkError as error:
            lane = f" (rank {source_rank} -> rank {target_rank})" if len(lanes) > 1 else ""
            return _failed(p, d, f"{error}{lane}")
        rates.append(NUM_BLOCKS * BLOCK_NBYTES / statistics.median(sent.trips_s[1:]) / 1e9)
        transports.add(sent.transport)
    text = f"{min(rates):.1f} GB/s over {'+'.join(sorted(transports))}, every byte right"
    text += f"; the slowest of {len(rates)} lanes" if len(rates) > 1 else ""
    return Finding("ok", "KV", f"{p.name} -> {d.name}", text)


def send_blocks(source: RankEnd, target: RankEnd, num_trips: int) -> TripAnswer:
    """Sends blocks over a link of their own and compares what has landed last. Raises LinkError; closes the link."""
    secret = secrets.token_bytes(32)
    there = target.ask(Listen(secret), PAIR_S)
    try:
        sent = source.ask(Send(secret, target.begin.name, there.port, there.epoch, num_trips), PAIR_S)
    except LinkError:
        with contextlib.suppress(LinkError):
            target.ask(Compare(source.seed, num_trips), PAIR_S)  # closes its end
        raise
    target.ask(Compare(source.seed, num_trips), PAIR_S)
    return sent


def _failed(p: ListedInstance, d: ListedInstance, reason: str) -> Finding:
    way_out = 'see "The network before the start" in docs/operations.md'
    return Finding("error", "KV", f"{p.name} -> {d.name}", f"no KV blocks came through: {reason}", way_out)


def _begin(ends: Mapping[tuple[str, int], RankEnd], device: str) -> dict[str, str]:
    """Begins all processes together. Returns the reason for each instance that cannot take part."""
    broken: dict[str, str] = {}
    devices: dict[tuple[str, int], str] = {}
    for end in ends.values():
        with contextlib.suppress(LinkError):  # then `hear` raises, too
            end.tell(end.begin)
    for (name, rank), end in ends.items():
        try:
            devices[name, rank] = end.hear(BEGIN_S).device
        except LinkError as error:
            broken.setdefault(name, f"rank {rank} of {name}: {error}")
            continue
        if hccl.is_wanted(device, end.server) and not devices[name, rank].startswith("npu"):
            text = f"its table has NPUs, and torch would use the {devices[name, rank]} here"
            broken.setdefault(name, f"rank {rank} of {name}: {text}")
    return shared_npus(devices) | broken


def shared_npus(devices: Mapping[tuple[str, int], str]) -> dict[str, str]:
    """Returns the reason for each instance with a rank whose NPU another rank has as well.

    A container with some of the host's cards counts them from 0, so that several instances would find theirs there:
    a transfer from a card to itself proves nothing. `devices`: (instance, rank) -> torch's name.
    """
    first: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for (name, rank), device in devices.items():
        other = first.setdefault(device, f"rank {rank} of {name}")
        if device.startswith("npu") and other != f"rank {rank} of {name}":
            text = f"has {device} here, as {other} has: run this where all cards of the host are visible"
            reasons.setdefault(name, f"rank {rank} of {name} {text}")
    return reasons


@contextlib.contextmanager
def running(instance: ListedInstance, rank: int, device: str, kv_transport: str) -> Iterator[RankEnd]:
    end = RankEnd(instance, rank, device, kv_transport)
    try:
        yield end
    finally:
        end.close()


class RankEnd:
    """A process of engine/trip. Each method raises LinkError with the end's own reason.

    `lines` are its answers, in order; an empty one is its end.
    """

    def __init__(self, instance: ListedInstance, rank: int, device: str, kv_transport: str) -> None:
        self.server = instance.server
        self.seed = secrets.randbits(40)
        self._why = ""
        try:
            host = resolve_host(self.server.server_ip)
        except ConfigError as error:
            host, self._why = "", str(error)
        self.begin = BeginTrips(
            name=instance.name,
            role=instance.role,
            rank=rank,
            device=device,
            device_ids=[each.device_id for each in self.server.device],
            host=host,
            kv_transport=kv_transport,
            seed=self.seed,
        )
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pd_cluster.engine.trip.end"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_environment(self.server, host, device),
        )
        self.lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, name=f"answers of {instance.name}", daemon=True).start()

    def tell(self, command: Command) -> None:
        if self._why:
            raise LinkError(self._why)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise LinkError(self._last_words("its process has ended")) from None

    def hear(self, timeout_s: float) -> TripAnswer:
        if self._why:
            raise LinkError(self._why)
        try:
            line = self.lines.get(timeout=timeout_s)
        except queue.Empty:
            self._why = f"no answer within {timeout_s:g} s"
            raise LinkError(self._last_words(self._why)) from None
        if not line:
            self._why = self._last_words("its process has ended")
            raise LinkError(self._why)
        answer = msgspec.json.decode(line, type=TripAnswer)
        if answer.error:
            raise LinkError(answer.error)
        return answer

    def ask(self, command: Command, timeout_s: float) -> TripAnswer:
        self.tell(command)
        return self.hear(timeout_s)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(END_S)

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # ends it
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.put(line)
        self.lines.put(b"")

    def _last_words(self, what: str) -> str:
        self._log.seek(0)
        lines: Sequence[str] = self._log.read().decode(errors="replace").split("\n")
        said = " / ".join(line.strip()[:200] for line in [line for line in lines if line.strip()][-NUM_LOG_LINES:])
        return f"{what}: {said}" if said else what


def _environment(server: Server, host: str, device: str) -> dict[str, str]:
    """Returns a rank process's environment; HCCL's variables are those that a worker sets."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if hccl.is_wanted(device, server):
        environment |= hccl.environment(hccl.settings(server, host, Timeouts(), PortRange(), os.environ))
    return {name: value for name, value in environment.items() if value}
