"""Sends KV blocks between real processes, from every prefill instance to every decode instance, if one is on this host.

Starts one process for each device of the rank table. The lanes of a pair then get their own links, one after another,
so that they do not slow each other down. The link, its transport and its proofs are the same as a worker's. The other
end may be on another host that runs the same command. Imports no torch.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
from collections.abc import Mapping
from itertools import product

from pd_cluster.cluster.members.rank_table_place import Place
from pd_cluster.cluster.preflight.host_rendezvous import (
    NUM_TRANSFERS,
    HostRendezvous,
    Pair,
    Say,
    check_between,
    failed,
    lanes_of,
)
from pd_cluster.cluster.preflight.preflight_findings import Finding
from pd_cluster.cluster.preflight.rank_endpoint import PAIR_S, ListedInstance, RankEndpoint, running
from pd_cluster.devices import hccl_environment
from pd_cluster.engine.link_probe.probe_messages import BLOCK_NBYTES, NUM_BLOCKS, Compare, Listen, ProbeAnswer, Send
from pd_cluster.errors import LinkError
from ranktable_tools.host_addresses import host_key

BEGIN_S = 120.0  # the time to import torch and allocate a pool


def instances_of(place: Place) -> list[ListedInstance]:
    """Returns all instances of the table in its order."""
    return [
        ListedInstance(name, "prefill" if at < len(place.table.prefill) else "decode", server)
        for at, (name, server) in enumerate(zip(place.names, place.table.instances, strict=True))
    ]


def check_pairs(
    place: Place, device: str, kv_transport: str, say: Say, meet: HostRendezvous | None = None
) -> list[Finding]:
    """Sends KV blocks between all pairs with an end on this host; returns one finding for each. Leaves no process
    running.

    `meet`: how to reach ends on other hosts that run this command; None: such pairs are not checked.
    """
    own = host_key(place.server.server_ip)
    found: list[Finding] = []
    here: list[Pair] = []
    between: list[Pair] = []
    everyone = instances_of(place)
    for p, d in product(*([each for each in everyone if each.role == role] for role in ("prefill", "decode"))):
        hosts = {host_key(p.server.server_ip), host_key(d.server.server_ip)}
        if hosts == {own}:
            here.append((p, d))
        elif own in hosts and meet is not None:
            between.append((p, d))
        else:
            found.append(_elsewhere(p, d, own in hosts))
    if not here and not between:
        return found
    with contextlib.ExitStack() as stack:
        ends = {}
        mine = [each for pair in (*here, *between) for each in pair if host_key(each.server.server_ip) == own]
        for instance in dict.fromkeys(mine):
            for rank in range(len(instance.server.device)):
                seed = secrets.randbits(40) if meet is None else meet.seed(instance.name, rank)
                end = RankEndpoint(instance, rank, device, kv_transport, seed)
                ends[instance.name, rank] = stack.enter_context(running(end))
        say(f"starting {len(ends)} processes, one for each device of the pairs on this host")
        broken = _begin(ends, device)
        for p, d in here:
            reasons = [broken[name] for name in (p.name, d.name) if name in broken]
            if reasons:
                found.append(failed(p, d, reasons[0]))
                continue
            say(f"sending KV blocks from {p.name} to {d.name}")
            found.append(_check_pair(p, d, ends))
        if meet is not None:
            found += check_between(between, own, ends, broken, meet, say)
    return found


def _elsewhere(p: ListedInstance, d: ListedInstance, has_end_here: bool) -> Finding:
    hosts = dict.fromkeys((p.server.server_ip, d.server.server_ip))
    where = f"{p.name} -> {d.name} ({' -> '.join(hosts)})"
    if has_end_here:
        way_out = "set NODE_PORTS and run the command on both hosts at the same time"
        return Finding("unchecked", "KV", where, "between hosts", way_out)
    return Finding("unchecked", "KV", where, "not on this host", "run `pd-cluster check --network` there, too")


def _check_pair(p: ListedInstance, d: ListedInstance, ends: Mapping[tuple[str, int], RankEndpoint]) -> Finding:
    """Uses one link for each lane, one after another; the slowest lane's rate counts as the pair's."""
    rates: list[float] = []
    transports: set[str] = set()
    lanes = lanes_of(len(p.server.device), len(d.server.device))
    for source_rank, target_rank in lanes:
        source, target = ends[p.name, source_rank], ends[d.name, target_rank]
        try:
            sent = send_blocks(source, target, NUM_TRANSFERS)
        except LinkError as error:
            lane = f" (rank {source_rank} -> rank {target_rank})" if len(lanes) > 1 else ""
            return failed(p, d, f"{error}{lane}")
        rates.append(NUM_BLOCKS * BLOCK_NBYTES / statistics.median(sent.transfers_s[1:]) / 1e9)
        transports.add(sent.transport)
    text = f"{min(rates):.1f} GB/s over {'+'.join(sorted(transports))}, every byte right"
    text += f"; the slowest of {len(rates)} lanes" if len(rates) > 1 else ""
    return Finding("ok", "KV", f"{p.name} -> {d.name}", text, rate=min(rates))


def send_blocks(source: RankEndpoint, target: RankEndpoint, num_transfers: int) -> ProbeAnswer:
    """Sends blocks over a new link, compares the blocks that arrived last, and closes the link. Raises LinkError."""
    secret = secrets.token_bytes(32)
    there = target.ask(Listen(secret), PAIR_S)
    try:
        sent = source.ask(Send(secret, target.begin.name, there.port, there.epoch, num_transfers), PAIR_S)
    except LinkError:
        with contextlib.suppress(LinkError):
            target.ask(Compare(source.seed, num_transfers), PAIR_S)  # also closes the receiving end
        raise
    target.ask(Compare(source.seed, num_transfers), PAIR_S)
    return sent


def _begin(ends: Mapping[tuple[str, int], RankEndpoint], device: str) -> dict[str, str]:
    """Starts all processes together. Returns instance -> reason for each instance that cannot be checked."""
    broken: dict[str, str] = {}
    devices: dict[tuple[str, int], str] = {}
    for end in ends.values():
        with contextlib.suppress(LinkError):  # if it fails, `receive` raises as well
            end.tell(end.begin)
    for (name, rank), end in ends.items():
        try:
            devices[name, rank] = end.receive(BEGIN_S).device
        except LinkError as error:
            broken.setdefault(name, f"rank {rank} of {name}: {error}")
            continue
        if hccl_environment.is_wanted(device, end.server) and not devices[name, rank].startswith("npu"):
            text = f"its table has NPUs, but torch would use the {devices[name, rank]} here"
            broken.setdefault(name, f"rank {rank} of {name}: {text}")
    return shared_npus(devices) | broken


def shared_npus(devices: Mapping[tuple[str, int], str]) -> dict[str, str]:
    """Returns instance -> reason for each instance with a rank whose NPU another rank also uses.

    A container with some of the host's cards numbers them from 0, so several instances could use the same card, and a
    transfer from a card to itself proves nothing. `devices`: (instance, rank) -> torch's name.
    """
    first: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for (name, rank), device in devices.items():
        other = first.setdefault(device, f"rank {rank} of {name}")
        if device.startswith("npu") and other != f"rank {rank} of {name}":
            text = f"has {device} here, and so has {other}: run the check where all cards of the host are visible"
            reasons.setdefault(name, f"rank {rank} of {name} {text}")
    return reasons
