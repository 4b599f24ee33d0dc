"""Shared parts of both ends of a lane in `kv`: the worker's mailbox, transports and configuration, no model."""

from __future__ import annotations

import queue
import secrets
from collections import deque
from collections.abc import Callable
from typing import Literal

import torch

from benchmarks.kv.spec import (
    BLOCK_NBYTES,
    BLOCK_SIZE,
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_LAYERS,
    RUN_BLOCKS,
    Lane,
)
from pd_cluster import wire
from pd_cluster.devices.device import CPU, Device
from pd_cluster.engine.handover.events import ConnClosed, ConnOpened, Event, Mail, StopEngine
from pd_cluster.engine.handover.links import LocalLanes, Side
from pd_cluster.kv.layout import KVLayout, keys_and_values
from pd_cluster.kv.pool import KVPool
from pd_cluster.net.admission import peer_key
from pd_cluster.net.mailbox import Mailbox
from pd_cluster.numerics import Numerics
from pd_cluster.settings.config import Credentials, WorkerConfig
from pd_cluster.settings.engine import EngineConfig
from pd_cluster.settings.processes import PortRange
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.factory import Transports
from pd_cluster.types import Role
from ranktable_tools.public_keys import public_key

HOST = "127.0.0.1"
NAMES: dict[Role, str] = {"prefill": "prefill-0", "decode": "decode-0"}
TIMEOUTS = Timeouts()
LAYOUT = KVLayout(
    num_layers=NUM_LAYERS,
    num_kv_heads=NUM_KV_HEADS,
    planes=keys_and_values(HEAD_DIM),
    block_size=BLOCK_SIZE,
    dtype="float16",
)
assert LAYOUT.block_nbytes == BLOCK_NBYTES


def make_pool(num_blocks: int, of_numbers: bool, device: Device = CPU) -> KVPool:
    """Makes a pool with every page mapped. `of_numbers`: block b is filled with the number b."""
    pool = KVPool(LAYOUT, num_blocks, device)
    blocks = pool.flat()[:num_blocks].view(torch.int16)
    for block in range(num_blocks):
        blocks[block] = block if of_numbers else -1
    return pool


class FreeBlocks:
    """Hands out blocks in consecutive runs, the runs in a seeded order, first released first."""

    def __init__(self, num_blocks: int, seed: int, run: int = RUN_BLOCKS) -> None:
        order = torch.randperm(num_blocks // run, generator=torch.Generator().manual_seed(seed)).tolist()
        self._free = deque(at * run + i for at in order for i in range(run))

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise ValueError(f"{count} blocks are wanted and {len(self._free)} are free")
        return [self._free.popleft() for _ in range(count)]

    def release(self, blocks: list[int]) -> None:
        self._free.extend(blocks)


class LaneEnd:
    """A worker's mailbox and transports. `on_mail` gets urgent messages, on the mailbox's thread."""

    def __init__(self, lane: Lane, role: Role, pool: KVPool, on_mail: Callable[[str, wire.Body], bool]) -> None:
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._on_mail = on_mail
        epoch = secrets.randbits(62)
        options = wire.KVOptions(checksum=lane.checked, hmac=lane.checked)
        config = WorkerConfig(
            name=NAMES[role],
            role=role,
            server_ip=HOST,
            bind_address=HOST,
            device_ids=["0"],
            epoch=epoch,
            credentials=Credentials(lane.secret, (public_key(lane.key_of("prefill")),), lane.key_of(role)),
            num_threads=1,
            kv_transport=lane.transport,
            kv_port_range=PortRange(),
            kv=options,
            engine=EngineConfig(model=""),
            timeouts=TIMEOUTS,
        )
        self.epoch = epoch
        kind: Literal["scheduler", "worker"] = "scheduler" if role == "prefill" else "worker"  # its key is pinned
        self.mailbox = Mailbox(config.name, epoch, kind, config.credentials, TIMEOUTS)
        self.port = self.mailbox.bind(HOST, config.kv_port_range)
        self.side = Side(
            peer_key(config.name, epoch), lane.secret, "", Numerics(), LAYOUT, pool.num_blocks, pool.probe_seed, options
        )
        self.lanes = LocalLanes(self.side, Transports(config, pool), self.mailbox.send)

    # ---- the mailbox's handler

    def on_opened(self, conn: str, peer: str, kind: str) -> None:
        self.inbox.put(ConnOpened(conn, peer, kind))

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None:
        if not self._on_mail(conn, body):
            self.inbox.put(Mail(conn, peer, body))

    def on_closed(self, conn: str, peer: str, reason: str) -> None:
        self.inbox.put(ConnClosed(conn, peer, reason))

    def on_fatal(self, error: BaseException) -> None:
        self.inbox.put(StopEngine(error))

    def load(self) -> wire.Load | None:
        return None
