"""The handover between two processes on one device, without a model: the worker's own links, threads and exports.

It uses blocks of 1 MiB, as many as the KV cache of 4,096 tokens of the 8B model. Received blocks are compared with
those sent. Runs in the bench's own process, which only queries its two children.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.child import ChildFailed
from benchmarks.gpu.spec import GpuSpec, Writer
from benchmarks.kv.child import Child, two_children
from benchmarks.kv.spec import Handover, Lane, LastTransfer, MakePool, Move, OpenLane
from pd_cluster.tables import spread
from pd_cluster.transport.table import same_host_choice

NUM_BLOCKS = 512  # MiB: 4,096 tokens of 128 KiB
NUM_UNDER_WAY = 8
CHECKED = "with checksums"  # the workers' default


def run(spec: GpuSpec, results: Writer, folder: Path, timeout_s: float) -> None:
    """Runs the part. Raises ChildFailed."""
    end_s = time.monotonic() + timeout_s
    transport = same_host_choice(spec.device)
    size = spec.sizes(NUM_BLOCKS, 8)
    move = Move(num_blocks=size, count=spec.sizes(16, 2), num_under_way=NUM_UNDER_WAY)
    one = Move(num_blocks=size, count=spec.sizes(8, 1), num_under_way=1)
    with two_children("kv_sender", "kv_receiver", folder) as (sender, receiver):
        for child in (sender, receiver):
            child.tell(MakePool(2 * NUM_UNDER_WAY * size, spec.device))
        for child in (sender, receiver):
            child.hear(timeout_s)
        for name in spec.sections:
            with results.section(name):
                lane = Lane(transport=transport, checked=name == CHECKED)
                lane = open_lane(sender, receiver, lane, end_s)
                hand_over(sender, receiver, lane, move, end_s)  # maps every page once before measuring
                rates = [
                    move.nbytes / 1e9 / hand_over(sender, receiver, lane, move, end_s) for _ in range(spec.sizes(5, 1))
                ]
                label = f"handover over {transport}, {name}"
                results.figure(label, median(rates), "GB/s", "higher", len(rates), spread(rates))
                took_s = hand_over(sender, receiver, lane, one, end_s) / one.count
                results.figure(f"{label}, one at a time", 1e-9 * one.nbytes / one.count / took_s, "GB/s", "higher")


def open_lane(sender: Child, receiver: Child, lane: Lane, end_s: float) -> Lane:
    lane = msgspec.structs.replace(lane, secret=secrets.token_bytes(32))
    there = receiver.ask(OpenLane(lane), left_s(end_s))
    lane = msgspec.structs.replace(lane, port=there.port, epoch=there.epoch)
    sender.ask(OpenLane(lane), left_s(end_s))
    return lane


def hand_over(sender: Child, receiver: Child, lane: Lane, move: Move, end_s: float) -> float:
    """Returns the seconds from the first transfer's start to the last one's confirmation."""
    took_s = sender.ask(Handover(lane.name, move), left_s(end_s)).took_s
    sent = sender.ask(LastTransfer(lane.name), left_s(end_s)).blocks
    landed = receiver.ask(LastTransfer(lane.name), left_s(end_s)).blocks
    if sent != landed:
        raise ChildFailed(f"{lane.name}: what has landed is not what was sent")
    return took_s


def left_s(end_s: float) -> float:
    """Returns the seconds until that time of the monotonic clock."""
    return max(0.1, end_s - time.monotonic())
