"""P's end of a lane: the thread that sends chunks, one at a time and in order. It keeps no state of finished requests.

The engine's thread queues work and receives events through `report`; it never waits for this thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from pd_cluster import wire
from pd_cluster.devices.device import use
from pd_cluster.devices.device_streams import Marker, mark
from pd_cluster.errors import LinkError
from pd_cluster.kv.kv_layout import KVLayout, num_common_layers
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.layer_groups import probe_layout
from pd_cluster.transport.link_events import LinkFailed, numbers_of
from pd_cluster.transport.link_frames import Sealer
from pd_cluster.transport.transport_interface import KVSender, LaneContext

log = logging.getLogger(__name__)


class RateLimit:
    """Delays payloads as a link of this speed would. 0: no limit."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0  # when all earlier payloads would have passed

    def wait(self, nbytes: int) -> None:
        if self._bytes_per_s:
            now_s = time.monotonic()
            self._free_s = max(now_s, self._free_s) + nbytes / self._bytes_per_s
            time.sleep(self._free_s - now_s)


class SendThread:
    """P's end of a lane. It posts each frame over the link's connection, and then sends the frame's payload at once."""

    def __init__(
        self, context: LaneContext, senders: list[KVSender], sealer: Sealer, pool: KVPool, bytes_per_s: float = 0.0
    ) -> None:
        """Create it only when all earlier writes to the pool have been launched."""
        self._meetings = {each.name: each.meeting for each in senders if each.meeting is not None}
        self._conn, self._post, self._report, self._note = context.conn, context.post, context.report, context.note
        self._device = pool.device
        self._written = mark(pool.device)
        self.senders = {sender.name: sender for sender in senders}
        self._sender: KVSender | None = None
        self._sealer = sealer
        self._probe_block = pool.probe_block
        self._probe_piece = wire.KVPiece(0, 0, 0, 0, [])
        self._pace = RateLimit(bytes_per_s)
        self._live: set[str] = set()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.probe_seed = pool.probe_seed
        self.max_payload_nbytes = 0  # of the open transport
        self.sent_nbytes = 0
        self.thread = threading.Thread(target=self._run, name=f"kv-send {context.conn}", daemon=True)
        self.thread.start()

    @property
    def offers(self) -> list[wire.TransportOffer]:
        return [sender.offer() for sender in self.senders.values()]

    @property
    def max_payloads(self) -> dict[wire.TransportName, int]:
        """Returns the largest payload in bytes, by transport."""
        return {name: sender.max_payload_nbytes for name, sender in self.senders.items()}

    def meet(self, value: wire.LinkValue) -> None:
        """Stores a key from the other end.

        The mailbox's thread calls this, because this class's thread waits for the key.
        """
        if (meeting := self._meetings.get(value.transport)) is not None:
            meeting.put(value.key, value.value)

    # ---- called by the engine's thread

    def open(self, transport: wire.TransportName, own: KVLayout, peer: KVLayout) -> None:
        """Opens a transport, and sends the probe over it."""
        self._queue.put(lambda: self._open(transport, own, peer))

    def settle(self) -> None:
        """Keeps the transport that was opened last, and closes the others with their listening ports."""
        self._queue.put(self._settle)

    def probe(self) -> None:
        """Sends a probe, which keeps an idle link alive and detects a dead one."""
        self._queue.put(self._probe)

    def ship(self, transfer_id: str, index: int, piece: wire.KVPiece) -> None:
        """Queues a piece, which is in the pool once all earlier launches of the engine have ended."""
        self._live.add(transfer_id)
        written = mark(self._device)
        self._queue.put(lambda: self._ship(transfer_id, index, piece, written))

    def ship_end(self, end: wire.KVEnd) -> None:
        self._live.add(end.transfer_id)  # there may be no piece to ship
        self._queue.put(lambda: self._end(end))

    def drop(self, transfer_id: str) -> None:
        self._live.discard(transfer_id)

    def close(self) -> None:
        self._live.clear()
        self._queue.put(None)

    # ---- called by its own thread

    def _run(self) -> None:
        use(self._device)
        while (job := self._queue.get()) is not None:
            try:
                job()
            except LinkError as error:
                self._report(LinkFailed(self._conn, str(error)))
                break
            except Exception as error:
                log.exception("link %s: its sending thread failed", self._conn)
                self._report(LinkFailed(self._conn, f"internal error: {error}"))
                break
        for sender in self.senders.values():
            sender.close()

    def _open(self, transport: wire.TransportName, own: KVLayout, peer: KVLayout) -> None:
        if transport not in self.senders:
            raise LinkError(f"the decode instance chose {transport}, which was not offered")
        self._sender = self.senders[transport]
        self._written.wait()
        try:
            self._sender.open(peer)
        except LinkError as error:
            if len(self.senders) == 1:
                raise
            log.warning("link %s: %s does not open: %s", self._conn, transport, error)
            self._sender.close()  # D gets no probe over it, and chooses another transport
            del self.senders[transport]
            self._sender = None
            return
        self.max_payload_nbytes = self._sender.max_payload_nbytes
        num_tokens = min(own.block_size, peer.block_size)
        num_layers = num_common_layers(probe_layout(own), probe_layout(peer))
        self._probe_piece = wire.KVPiece(0, num_tokens, 0, num_layers, [self._probe_block])
        self._probe()

    def _settle(self) -> None:
        for sender in [each for each in self.senders.values() if each is not self._sender]:
            sender.close()
            del self.senders[sender.name]

    def _probe(self) -> None:
        sender = self._opened()
        prepared = sender.prepare(self._probe_piece)
        chunk = wire.KVChunk("", 0, self._probe_piece, prepared.nbytes, prepared.checksum)
        frame = self._sealer.seal(wire.KVProbe(sender.name, chunk))
        self._post(frame)
        sender.send(frame.sequence, prepared)

    def _ship(self, transfer_id: str, index: int, piece: wire.KVPiece, written: Marker) -> None:
        written.wait()  # so that headers only announce what the device has written; the engine does not wait
        if transfer_id not in self._live:
            return
        sender, started_s = self._opened(), time.monotonic()
        prepared = sender.prepare(piece)
        self._pace.wait(prepared.nbytes)
        frame = self._sealer.seal(wire.KVChunk(transfer_id, index, piece, prepared.nbytes, prepared.checksum))
        self._note(transfer_id, "sent", **numbers_of(piece, prepared.nbytes, started_s))
        self._post(frame)
        sender.send(frame.sequence, prepared)
        self.sent_nbytes += prepared.nbytes

    def _end(self, end: wire.KVEnd) -> None:
        if end.transfer_id in self._live:
            self._live.discard(end.transfer_id)
            self._note(end.transfer_id, "ended")
            self._post(self._sealer.seal(end))

    def _opened(self) -> KVSender:
        if self._sender is None:
            raise LinkError("the decode instance asked for KV cache before it had chosen a transport")
        return self._sender
