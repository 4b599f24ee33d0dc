"""Sends KV blocks between an instance on this host and one on another host that runs the same command."""

from __future__ import annotations

import hmac
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pd_cluster.cluster.members.rank_table_place import resolve_host
from pd_cluster.cluster.preflight.preflight_findings import Finding
from pd_cluster.cluster.preflight.rank_endpoint import PAIR_S, ListedInstance, RankEndpoint
from pd_cluster.engine.link_probe.probe_messages import (
    BLOCK_NBYTES,
    NOBODY,
    NUM_BLOCKS,
    Compare,
    Listen,
    Send,
)
from pd_cluster.errors import LinkError
from ranktable_tools.host_addresses import host_key

NUM_TRANSFERS = 4  # the first transfer maps pages and is not counted

Say = Callable[[str], None]
Pair = tuple[ListedInstance, ListedInstance]


@dataclass(frozen=True, slots=True)
class HostRendezvous:
    """Lets the two ends of a pair on different hosts find each other: both know the tables and the cluster's secret.

    `ports`: NODE_PORTS by instance; these ports are free until the cluster starts. `wait_s`: how long to wait for the
    other host's command.
    """

    secret: bytes
    ports: Mapping[str, int]
    wait_s: float

    def secret_of(self, p: str, d: str, lane: int) -> bytes:
        return self._derived(f"link {p} {d} {lane}")

    def epoch_of(self, p: str, d: str, lane: int) -> int:
        return int.from_bytes(self._derived(f"epoch {p} {d} {lane}")[:7], "big") | 1

    def seed(self, name: str, rank: int) -> int:
        return int.from_bytes(self._derived(f"content {name} {rank}")[:5], "big")

    def _derived(self, purpose: str) -> bytes:
        return hmac.digest(self.secret, f"check --network: {purpose}".encode(), "sha256")


def lanes_of(num_source: int, num_target: int) -> list[tuple[int, int]]:
    """Returns (P's rank, D's rank) for the ranks that exchange KV heads: as many pairs as the larger instance has
    ranks.
    """
    most = max(num_source, num_target)
    return [(at * num_source // most, at * num_target // most) for at in range(most)]


def check_between(
    pairs: Sequence[Pair],
    own: str,
    ends: Mapping[tuple[str, int], RankEndpoint],
    broken: Mapping[str, str],
    meet: HostRendezvous,
    say: Say,
) -> list[Finding]:
    """Checks pairs with one end on this host, in the order of the table, which all hosts follow.

    Each host waits for the other end of its next pair; the common order prevents circular waits. If a host does not
    connect, its other pairs fail without a wait.
    """
    found: list[Finding] = []
    absent: set[str] = set()
    for p, d in pairs:
        is_sender = host_key(p.server.server_ip) == own
        mine, other = (p, d) if is_sender else (d, p)
        there = other.server.server_ip
        where = f"{p.name} -> {d.name} ({p.server.server_ip} -> {d.server.server_ip})"
        if mine.name in broken:
            found.append(failed(p, d, broken[mine.name]))
            continue
        if there in absent:
            found.append(_host_absent(where, there, meet))
            continue
        say(f"{'sending KV blocks to' if is_sender else 'receiving KV blocks from'} {other.name} on {there}")
        try:
            found.append((_send_to if is_sender else _receive_from)(p, d, where, ends, meet))
        except OtherHostAbsent:
            absent.add(there)
            found.append(_host_absent(where, there, meet))
        except LinkError as error:
            way_out = 'see "The network before the start" in docs/operations.md'
            found.append(Finding("error", "KV", where, f"no KV blocks arrived: {error}", way_out))
    return found


class OtherHostAbsent(Exception):
    """The other host is not running the command."""


def _send_to(
    p: ListedInstance, d: ListedInstance, where: str, ends: Mapping[tuple[str, int], RankEndpoint], meet: HostRendezvous
) -> Finding:
    rates: list[float] = []
    transports: set[str] = set()
    host = resolve_host(d.server.server_ip)
    for lane, (source_rank, _) in enumerate(lanes := lanes_of(len(p.server.device), len(d.server.device))):
        secret, epoch = meet.secret_of(p.name, d.name, lane), meet.epoch_of(p.name, d.name, lane)
        send = Send(secret, d.name, meet.ports[d.name], epoch, NUM_TRANSFERS, host, meet.wait_s)
        try:
            sent = ends[p.name, source_rank].ask(send, meet.wait_s + PAIR_S)
        except LinkError as error:
            if not lane and str(error) == NOBODY:
                raise OtherHostAbsent from None
            raise
        rates.append(NUM_BLOCKS * BLOCK_NBYTES / statistics.median(sent.transfers_s[1:]) / 1e9)
        transports.add(sent.transport)
    text = f"{min(rates):.1f} GB/s over {'+'.join(sorted(transports))}; {d.server.server_ip} compares the bytes"
    text += f"; the slowest of {len(lanes)} lanes" if len(lanes) > 1 else ""
    return Finding("ok", "KV", where, text, rate=min(rates))


def _receive_from(
    p: ListedInstance, d: ListedInstance, where: str, ends: Mapping[tuple[str, int], RankEndpoint], meet: HostRendezvous
) -> Finding:
    for lane, (source_rank, target_rank) in enumerate(lanes_of(len(p.server.device), len(d.server.device))):
        end = ends[d.name, target_rank]
        secret, epoch = meet.secret_of(p.name, d.name, lane), meet.epoch_of(p.name, d.name, lane)
        end.ask(Listen(secret, meet.ports[d.name], epoch), PAIR_S)
        try:
            end.ask(Compare(meet.seed(p.name, source_rank), NUM_TRANSFERS, meet.wait_s), meet.wait_s + PAIR_S)
        except LinkError as error:
            if not lane and str(error) == NOBODY:
                raise OtherHostAbsent from None
            raise
    return Finding("ok", "KV", where, f"every byte right; {p.server.server_ip} shows the rate")


def _host_absent(where: str, there: str, meet: HostRendezvous) -> Finding:
    text = f"{there} did not connect within {meet.wait_s:g} s"
    way_out = "run the command there at the same time, with the same tables; if it is running, check for a firewall"
    return Finding("unchecked", "KV", where, text, way_out)


def failed(p: ListedInstance, d: ListedInstance, reason: str) -> Finding:
    way_out = 'see "The network before the start" in docs/operations.md'
    return Finding("error", "KV", f"{p.name} -> {d.name}", f"no KV blocks arrived: {reason}", way_out)
