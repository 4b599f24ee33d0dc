"""D's end of a lane: the thread that proves a transport and then lands chunks, one at a time and in order.

The engine's thread queues work and receives events through `report`; it never waits for this thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pd_cluster import wire
from pd_cluster.devices.device import use
from pd_cluster.devices.device_streams import mark
from pd_cluster.errors import LinkError, TransferFailed
from pd_cluster.kv.block_major import HostBlocks
from pd_cluster.kv.kv_layout import KVLayout, num_common_layers
from pd_cluster.kv.kv_pool import KVPool, probe_content
from pd_cluster.kv.layer_groups import probe_layout
from pd_cluster.kv.pack import pack, unpack, vectors_of
from pd_cluster.kv.pool_route import PoolRoute
from pd_cluster.transport.landing import Geometry, Lander
from pd_cluster.transport.link_events import Drained, LinkEvent, LinkFailed
from pd_cluster.transport.link_frames import Opener
from pd_cluster.transport.transport_interface import KVReceiver, LaneContext

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Probe:
    """Checks the content of P's probe block after its transfer to D."""

    pool: KVPool
    source: KVLayout
    seed: int

    def problem(self, receiver: KVReceiver, sequence: int, chunk: wire.KVChunk, timeout_s: float) -> str:
        """Receives the probe. Returns what is wrong with it; "" if it is correct. Raises LinkError, TransferFailed."""
        piece, layout = chunk.piece, self.pool.layout
        num_layers = num_common_layers(probe_layout(self.source), probe_layout(layout))
        wanted = 0, min(layout.block_size, self.source.block_size), 0, num_layers
        if (piece.first_token, piece.num_tokens, piece.first_layer, piece.num_layers) != wanted:
            return "the probe does not have the expected shape"
        receiver.arrive(sequence, chunk, timeout_s)
        with self.pool.probe_lock:  # held only during copies, never while waiting for a peer
            with receiver.copies.launch():
                self.pool.clear([self.pool.landing_probe_block])
            receiver.receive(sequence, chunk, [self.pool.landing_probe_block])
            receiver.copies.settle()
            with receiver.copies.launch():
                found = HostBlocks(layout, [self.pool.block(self.pool.landing_probe_block)])
            here = wire.KVPiece(0, piece.num_tokens, 0, piece.num_layers, [0])
            expected = self._expected(receiver.route, here)
            same = all(self._are_same(found, expected, part, own) for own, part in layout.parts_of(here))
        return "" if same else "the prefill instance's probe does not have the expected content"

    def _are_same(
        self, found: HostBlocks, expected: HostBlocks, piece: wire.KVPiece, planes: tuple[wire.Plane, ...]
    ) -> bool:
        heads = [slice(0, self.pool.layout.local_heads(plane)) for plane in planes]
        both = (each.heads_of(piece, heads) for each in (found, expected))
        pairs = zip(*([vectors_of(plane, piece, found.layout) for plane in each] for each in both), strict=True)
        return all(torch.equal(ours, theirs) for ours, theirs in pairs)

    def _expected(self, route: PoolRoute, piece: wire.KVPiece) -> HostBlocks:
        source, target = probe_layout(self.source), probe_layout(self.pool.layout)
        sent = HostBlocks(source, [probe_content(source, self.seed)])
        expected = HostBlocks(target, [torch.zeros_like(probe_content(target, 0))])
        unpack(pack(sent, piece, route), piece, route, expected, [0])
        return expected


@dataclass(frozen=True, slots=True)
class ForgetTransfer:
    transfer_id: str


Item = wire.KVFrame | ForgetTransfer | None


@dataclass(slots=True)
class Incoming:
    """Opens frames in order, and as early as possible, so that their payloads can already be received."""

    opener: Opener
    queue: queue.SimpleQueue[Item] = field(default_factory=queue.SimpleQueue)
    ahead: deque[tuple[int, wire.KVHeader] | ForgetTransfer | None] = field(default_factory=deque)
    error: LinkError | None = None  # found when a frame was opened early; raised when that frame is next

    def next(
        self, receiver: KVReceiver | None, timeout_s: float | None
    ) -> tuple[int, wire.KVHeader] | ForgetTransfer | None:
        """Returns the next item; None when the thread must end. Raises LinkError, or queue.Empty after the timeout."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.ahead and self.error is None:
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:  # so that dropped frames do not extend the timeout
                raise queue.Empty
            self._take(self.queue.get(timeout=left_s), receiver)
        while self.error is None and not self.queue.empty():
            self._take(self.queue.get_nowait(), receiver)
        if self.ahead:
            return self.ahead.popleft()
        error, self.error = self.error, None
        assert error is not None
        raise error

    def _take(self, item: Item, receiver: KVReceiver | None) -> None:
        try:
            if not isinstance(item, wire.KVFrame):
                self.ahead.append(item)
                return
            header = self.opener.open(item)
            if header is None:
                return
            self.ahead.append((item.sequence, header))
            if receiver is not None and not isinstance(header, wire.KVEnd):
                receiver.expect(item.sequence, header.chunk if isinstance(header, wire.KVProbe) else header)
        except LinkError as error:
            self.error = error
        except Exception as error:
            log.exception("a KV frame could not be processed")
            self.error = LinkError(f"internal error: {error}", retry=True)


@dataclass(frozen=True, slots=True)
class AllowedTransports:
    """The transports that both ends allow, in D's order. `impossible`: why P's other offers cannot be used."""

    receivers: list[KVReceiver]
    impossible: Sequence[str] = ()  # not empty if there are no receivers


class ReceiveThread:
    """Tries the transports that both ends allow, in D's order of preference, and then lands chunks."""

    def __init__(
        self,
        context: LaneContext,
        link_id: str,
        choice: AllowedTransports,
        probe: Probe,
        opener: Opener,
        connect_timeout_s: float,
    ) -> None:
        self._conn, self._post, self._report, self._note = context.conn, context.post, context.report, context.note
        self._meetings = {each.name: each.meeting for each in choice.receivers if each.meeting is not None}
        self._impossible = choice.impossible
        self._link_id = link_id
        self._receivers = choice.receivers
        self.receiver: KVReceiver | None = None
        self._probe = probe
        self._incoming = Incoming(opener)
        self._opener = opener
        self._lane = opener.key.lane
        self._connect_timeout_s = connect_timeout_s
        self._geometry = Geometry.of(probe.source, probe.pool.layout)
        self._lander: Lander | None = None
        self.thread = threading.Thread(target=self._run, name=f"kv-receive {context.conn}", daemon=True)

    def start(self) -> None:
        """Starts the thread. Call this once frames of the connection reach `put`, because P answers with frames."""
        self.thread.start()

    @property
    def received_nbytes(self) -> int:
        return self._lander.received_nbytes if self._lander is not None else 0

    @property
    def num_dropped(self) -> int:
        return self._opener.dropped.total()

    @property
    def precision(self) -> str:
        """Returns the precision of KV that lands over this link, once the link is ready. "": exact."""
        return self.receiver.route.precision if self.receiver is not None else ""

    # ---- called by other threads

    def put(self, frame: wire.KVFrame) -> None:
        self._incoming.queue.put(frame)

    def meet(self, value: wire.LinkValue) -> None:
        """Stores a key from the other end.

        The mailbox's thread calls this, because this class's thread waits for the key.
        """
        if (meeting := self._meetings.get(value.transport)) is not None:
            meeting.put(value.key, value.value)

    def begin(self, transfer_id: str, block_ids: list[int], first_token: int, num_tokens: int) -> None:
        """Prepares a landing.

        Call this before the credit is sent, so that no chunk of this transfer can arrive earlier. The blocks are
        written only after the engine's last launch that uses them for another request.
        """
        if self._lander is not None:
            self._lander.begin(transfer_id, block_ids, first_token, num_tokens, mark(self._probe.pool.device))

    def forget(self, transfer_id: str) -> None:
        """Stops the landing of a transfer; `Drained` follows."""
        self._incoming.queue.put(ForgetTransfer(transfer_id))

    def close(self) -> None:
        self._incoming.queue.put(None)

    # ---- called by its own thread

    def _run(self) -> None:
        use(self._probe.pool.device)
        works = self._open()
        while True:
            try:
                item = self._incoming.next(self.receiver if works else None, None)
            except LinkError as error:
                works = works and self._fail(str(error))
                continue
            if item is None:
                break
            if isinstance(item, ForgetTransfer):
                works = works and self._is_settled()
                self._report(self._lander.forget(item.transfer_id) if self._lander else Drained(item.transfer_id))
            elif works:
                works = self._land(*item)
        if self.receiver is not None:
            self.receiver.close()

    def _open(self) -> bool:
        failures, retry = list(self._impossible), False
        for receiver in self._receivers:
            self._post(wire.LinkAnswer(self._link_id, receiver.name, self._probe.pool.layout.to_info(), self._lane))
            try:
                receiver.open()
                self._await_probe(receiver)
            except (LinkError, TransferFailed) as error:
                failures.append(f"{receiver.name}: {error.text}")
                retry = retry or not isinstance(error, LinkError) or error.retry
                log.warning("link %s: %s does not work: %s", self._conn, receiver.name, error)
                receiver.close()
                continue
            except Exception as error:
                failures.append(f"{receiver.name}: internal error: {error}")
                retry = True
                log.exception("link %s: opening %s failed", self._conn, receiver.name)
                receiver.close()
                continue
            lander = Lander(receiver, self._geometry, self._note, self._clear_others if self._is_short else None)
            self.receiver, self._lander = receiver, lander
            self._post(wire.LinkReady(self._link_id, receiver.name, receiver.route.precision, self._lane))
            return True
        self._post(wire.LinkRefused(self._link_id, "; ".join(failures), retry))
        return False

    @property
    def _is_short(self) -> bool:
        """Whether some layers of this pool are not transferred."""
        return self._geometry.num_layers < self._probe.pool.layout.num_layers

    def _clear_others(self, blocks: list[int]) -> None:
        """Clears these blocks in the layers that are not transferred, so that no other request's KV remains in them."""
        assert self.receiver is not None
        with self.receiver.copies.launch():
            self._probe.pool.clear(blocks, self._geometry.num_layers)

    def _await_probe(self, receiver: KVReceiver) -> None:
        """Waits for the probe, a block of known content, over this transport, and checks it.

        Raises LinkError, TransferFailed.
        """
        deadline_s = time.monotonic() + self._connect_timeout_s
        while True:
            try:
                item = self._incoming.next(None, max(0.001, deadline_s - time.monotonic()))
            except queue.Empty:
                raise LinkError(f"no probe arrived within {self._connect_timeout_s:g} s", retry=True) from None
            if item is None:
                self._incoming.queue.put(None)
                raise LinkError("the connection was closed", retry=True)
            if isinstance(item, ForgetTransfer):
                self._report(Drained(item.transfer_id))
            elif isinstance(item[1], wire.KVProbe) and item[1].transport == receiver.name:
                return self._check_probe(receiver, item[0], item[1])

    def _check_probe(self, receiver: KVReceiver, sequence: int, probe: wire.KVProbe) -> None:
        problem = self._probe.problem(receiver, sequence, probe.chunk, self._connect_timeout_s)
        if problem:
            raise LinkError(problem, retry=True)

    def _land(self, sequence: int, header: wire.KVHeader) -> bool:
        """Lands a frame. Returns False if the link is unusable; the thread then only reports `Drained`."""
        assert self.receiver is not None
        assert self._lander is not None
        try:
            if isinstance(header, wire.KVProbe):
                self._check_probe(self.receiver, sequence, header)
                return True
            event: LinkEvent | None = self._lander.land(sequence, header)
        except (LinkError, TransferFailed) as error:
            return self._fail(str(error))
        except Exception as error:
            log.exception("link %s: its receiving thread failed", self._conn)
            return self._fail(f"internal error: {error}")
        if event is not None:
            self._report(event)
        return True

    def _is_settled(self) -> bool:
        """Waits for the copies under way, within a time limit that a drain does not have.

        Returns False if the link is unusable.
        """
        assert self.receiver is not None
        try:
            self.receiver.copies.settle()
        except LinkError as error:
            return self._fail(str(error))
        except Exception as error:  # otherwise the blocks of an abandoned transfer would never be freed
            log.exception("link %s: its receiving thread failed", self._conn)
            return self._fail(f"internal error: {error}")
        return True

    def _fail(self, reason: str) -> bool:
        self._report(LinkFailed(self._conn, reason))
        return False
