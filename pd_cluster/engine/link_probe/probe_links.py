"""Both ends of one trial link: a worker's mailbox, links and transports around a pool, without an engine.

The link has one lane. Knows nothing of commands or processes.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch

from pd_cluster import wire
from pd_cluster.devices.device_streams import poll
from pd_cluster.engine.handover.engine_events import ConnClosed, ConnOpened, Event, Mail, StopEngine
from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.handover.links.in_lanes import InLanes
from pd_cluster.engine.handover.links.in_links import InLinks
from pd_cluster.engine.handover.links.link_ends import LocalEndpoint, LocalLanes, PeerProgress
from pd_cluster.engine.handover.links.network_policy import NetworkPolicy
from pd_cluster.engine.handover.links.out_link_table import OutLinkTable
from pd_cluster.engine.handover.links.out_links import OutLinks
from pd_cluster.engine.link_probe.probe_messages import (
    BLOCK_NBYTES,
    BLOCK_SIZE,
    HEAD_DIM,
    NOBODY,
    NUM_BLOCKS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    BeginProbes,
    Compare,
    Listen,
    Send,
    key_of,
)
from pd_cluster.errors import LinkError
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import KVPool, probe_content
from pd_cluster.net.mailbox import Mailbox
from pd_cluster.net.peer_admission import Life, peer_key
from pd_cluster.numerics import Numerics
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.process_configs import Credentials, WorkerConfig
from pd_cluster.settings.process_settings import PortRange
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.link_events import Landed, LandFault, LinkFailed
from pd_cluster.transport.link_factory import Transports
from pd_cluster.transport.transport_table import AUTO
from pd_cluster.types import TokenOutput
from ranktable_tools.public_keys import public_key

LAYOUT = KVLayout(
    num_layers=NUM_LAYERS,
    num_kv_heads=NUM_KV_HEADS,
    planes=keys_and_values(HEAD_DIM),
    block_size=BLOCK_SIZE,
    dtype="float16",
)
assert LAYOUT.block_nbytes == BLOCK_NBYTES
TIMEOUTS = Timeouts()
OPTIONS = wire.KVOptions()  # a worker's defaults
DEADLINE_S = 60.0  # the time for a link to open, and for one transfer
LANDING = list(range(NUM_BLOCKS))[::-1]  # the receiver's blocks, which differ in order from the sender's


def content_of(seed: int, block: int) -> torch.Tensor:
    """Returns the content of a block of the sender, [1, block_numel]."""
    return probe_content(LAYOUT, seed + block)


class LinkEnd(ABC):
    """The parts that both ends share. One thread of this end handles `events`, as an engine's thread would."""

    def __init__(
        self, begin: BeginProbes, secret: bytes, pool: KVPool, options: wire.KVOptions, port: int = 0, epoch: int = 0
    ) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.epoch = epoch or secrets.randbits(62)
        pinned = (public_key(key_of(secret, "prefill")),)
        config = WorkerConfig(
            name=begin.name,
            role=begin.role,
            server_ip=begin.host,
            bind_address=begin.host,
            device_ids=begin.device_ids,
            epoch=self.epoch,
            credentials=Credentials(secret, pinned, key_of(secret, begin.role)),
            num_threads=1,
            kv_transport=begin.kv_transport,
            kv_port_range=PortRange(port, port),
            kv=options,
            engine=EngineConfig(model=""),
            timeouts=TIMEOUTS,
        )
        # The listener accepts only one key, as a worker accepts only its scheduler's, so no other process can link to
        # it.
        kind: Literal["scheduler", "worker"] = "scheduler" if begin.role == "prefill" else "worker"
        self.mailbox = Mailbox(Life(config.name, self.epoch), kind, config.credentials, TIMEOUTS)
        self.port = self.mailbox.bind(begin.host, config.kv_port_range)
        own = peer_key(config.name, self.epoch)
        # The blocks are not secret, so any transport that is requested by name may be used between hosts.
        network_policy = NetworkPolicy(own, trusts_network=begin.kv_transport != AUTO)
        self.endpoint = LocalEndpoint(
            own, secret, "", Numerics(), (LAYOUT,), (pool.num_blocks,), options, network_policy
        )
        lanes = LocalLanes(self.endpoint, Transports(config, [pool]), self.mailbox.send)
        self.context = HandoverContext(self.endpoint, self.mailbox, lanes, self.report, TIMEOUTS)

    def _wait(self, done: Callable[[], bool], take: Callable[[Event], None], what: str) -> None:
        """Handles events until `done`. Raises LinkError for a failure or after the deadline."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not done():
            try:
                event = self.events.get(timeout=max(0.001, deadline_s - time.monotonic()))
            except queue.Empty:
                raise LinkError(f"{what} took longer than {DEADLINE_S:g} s") from None
            match event:
                case LinkFailed(_, reason) | LandFault(_, reason) | ConnClosed(_, _, reason):
                    raise LinkError(reason)
                case Mail(_, _, wire.LinkRefused(_, reason)):
                    raise LinkError(reason)
                case StopEngine(error):
                    raise LinkError(str(error))
                case _:
                    take(event)

    @abstractmethod
    def urgent(self, conn: str, body: wire.Body) -> bool:
        """Handles a message, on the mailbox's thread, that cannot wait for another thread; returns False for others."""

    def report(self, event: Event) -> None:
        self.events.put(event)

    # ---- the mailbox's handler

    def on_opened(self, conn: str, peer: str, kind: str) -> None:
        self.events.put(ConnOpened(conn, peer, kind))

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None:
        if not self.urgent(conn, body):
            self.events.put(Mail(conn, peer, body))

    def on_closed(self, conn: str, peer: str, reason: str) -> None:
        self.events.put(ConnClosed(conn, peer, reason))

    def on_fatal(self, error: BaseException) -> None:
        self.events.put(StopEngine(error))

    def load(self) -> wire.Load | None:
        return None


class SendingEnd(LinkEnd):
    """P's end."""

    def __init__(self, begin: BeginProbes, send: Send, pool: KVPool, options: wire.KVOptions = OPTIONS) -> None:
        super().__init__(begin, send.secret, pool, options)
        self._table = OutLinkTable(self.context, PeerProgress(time.monotonic))
        self._links = OutLinks(self.context, self._table, _SingleTransfer())
        self._peer = peer_key(send.name, send.epoch)
        self._is_credited = self._is_confirmed = self.was_connected = False
        key = self.mailbox.public_key
        self._own = wire.PeerInfo(
            name=begin.name, epoch=self.epoch, role="prefill", host=begin.host, control_port=self.port, public_key=key
        )
        self._host = send.host or begin.host
        self.mailbox.start(self)

    def link(self, send: Send) -> None:
        """Waits until the link is up. Raises LinkError."""
        key = public_key(key_of(send.secret, "decode"))
        info = wire.PeerInfo(
            name=send.name, epoch=send.epoch, role="decode", host=self._host, control_port=send.port, public_key=key
        )
        self.endpoint.network_policy.set_peers([self._own, info])
        self._links.set_peers([info])
        self._wait(lambda: bool(self._table.link_to(self._peer) or self._reason()), self.take, "the link")
        if reason := self._reason():
            raise LinkError(reason)

    @property
    def transport(self) -> str:
        return self._links.states()[self._peer].over

    def timed_transfer(self, number: int) -> float:
        """Returns the seconds from the first payload to the confirmation that all blocks have landed."""
        conn = self._table.link_to(self._peer)
        if conn is None:
            raise LinkError(f"the link is {self._links.states()[self._peer]}")
        transfer_id, num_tokens = f"probe{number}", NUM_BLOCKS * BLOCK_SIZE
        self._is_credited = self._is_confirmed = False
        self._table.send(conn, wire.Offer(transfer_id, num_tokens))
        self._wait(lambda: self._is_credited, self.take, "the receiver's answer")
        step = max(1, self._table.limits(conn, 0).max_payload_nbytes // BLOCK_NBYTES)
        starts = range(0, NUM_BLOCKS, step)
        started_s = time.monotonic()
        for index, start in enumerate(starts):
            blocks = list(range(start, min(start + step, NUM_BLOCKS)))
            piece = wire.KVPiece(start * BLOCK_SIZE, len(blocks) * BLOCK_SIZE, 0, NUM_LAYERS, blocks)
            self._table.ship(conn, 0, transfer_id, index, piece)
        first_tokens = [TokenOutput(transfer_id, 0, 0, 0, 1)]
        self._table.ship_end(conn, 0, wire.KVEnd(transfer_id, len(starts), num_tokens, first_tokens))
        self._wait(lambda: self._is_confirmed, self.take, "the transfer")
        return time.monotonic() - started_s

    def urgent(self, conn: str, body: wire.Body) -> bool:
        if isinstance(body, wire.LinkValue):
            self._links.meet(conn, body)
        return isinstance(body, wire.LinkValue)

    def take(self, event: Event) -> None:
        match event:
            case ConnOpened(conn):
                self.was_connected = True
                self._links.on_opened(conn)
            case Mail(conn, _, wire.LinkAnswer() as body):
                self._links.on_answer(conn, body)
            case Mail(conn, _, wire.LinkReady() as body):
                self._links.on_ready(conn, body)
            case Mail(_, _, wire.Credit()):
                self._is_credited = True
            case Mail(_, _, wire.Confirm()):
                self._is_confirmed = True
            case _:
                pass

    def _reason(self) -> str:
        """Returns why the link will not open; "" as long as it may open."""
        state = self._links.states()[self._peer]
        return str(state) if state.phase in ("refused", "waiting") else ""


class _SingleTransfer:
    """Raises LinkError if the link goes down during the transfer."""

    def uses(self, conn: str) -> bool:
        return False

    def link_up(self, peer: str, conn: str) -> None: ...

    def link_lost(self, peer: str, reason: str) -> None: ...

    def on_link_down(self, conn: str, reason: str) -> None:
        raise LinkError(reason)


class _IgnoresLinkLoss:
    """Ignores that the link goes down, because the sender reports it."""

    def on_link_down(self, conn: str, reason: str) -> None: ...


class ReceivingEnd(LinkEnd):
    """D's end, with a thread in place of an engine."""

    def __init__(self, begin: BeginProbes, listen: Listen, pool: KVPool, options: wire.KVOptions = OPTIONS) -> None:
        super().__init__(begin, listen.secret, pool, options, listen.port, listen.epoch)
        self._lanes = InLanes(self.context, PeerProgress(time.monotonic))
        self._links = InLinks(self.context, self._lanes, _IgnoresLinkLoss())
        self._pool = pool
        self._conns: dict[str, str] = {}  # transfer -> connection
        self._num_landed = 0
        self._error = ""
        self._thread = threading.Thread(target=self._run, name="receiving end", daemon=True)
        self.mailbox.start(self)
        self._thread.start()

    def compare(self, command: Compare) -> None:
        """Raises LinkError unless the blocks that landed last have the content that belongs to `seed`."""
        began = poll(lambda: bool(self._conns or self._error), command.wait_s)
        if began and command.wait_s:
            poll(
                lambda: self._num_landed == command.num_transfers or bool(self._error),
                DEADLINE_S * command.num_transfers,
            )
        if not began and command.wait_s:
            raise LinkError(NOBODY)
        if self._num_landed != command.num_transfers:
            raise LinkError(self._error or f"{self._num_landed} of {command.num_transfers} transfers have landed")
        for sent, landed in enumerate(LANDING):
            if not torch.equal(self._pool.block(landed), content_of(command.seed, sent)):
                raise LinkError(f"block {sent} of {NUM_BLOCKS} does not have the expected content")

    def close(self) -> None:
        self.events.put(StopEngine())
        self._thread.join(DEADLINE_S)
        self.mailbox.close()

    def report(self, event: Event) -> None:
        """Counts landed transfers on the lane's thread: once one has landed, the sender may request the comparison."""
        self._num_landed += isinstance(event, Landed)
        super().report(event)

    def urgent(self, conn: str, body: wire.Body) -> bool:
        match body:
            case wire.KVFrame():
                self._links.route(conn, body)
            case wire.LinkValue():
                self._links.meet(conn, body)
            case _:
                return False
        return True

    def _run(self) -> None:
        try:
            while not self._error:
                self.take(self.events.get())  # until `close` or the end of the mailbox
        except LinkError as error:
            self._error = error.text

    def take(self, event: Event) -> None:
        match event:
            case Mail(conn, peer, wire.LinkOpen() as opened):
                self._links.on_open(conn, peer, opened, is_announced=True)
            case Mail(conn, _, wire.Offer(transfer_id, num_tokens)):
                self._conns[transfer_id] = conn
                self._lanes.begin(conn, transfer_id, [LANDING], [0], num_tokens)
                self._lanes.send(conn, wire.Credit(transfer_id, [0]))
            case LinkFailed(conn, reason):
                self._links.on_failed(conn, reason)  # the sender reports it
                self._error = reason
            case LandFault(transfer_id, reason):
                self._links.on_failed(self._conns[transfer_id], reason)
                self._error = reason
            case ConnClosed(conn, _, reason):
                self._links.on_down(conn, reason)
                self._error = reason
            case StopEngine(error):
                self._error = str(error or "this end was closed")
            case _:
                pass
