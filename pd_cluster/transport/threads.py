"""A link's own thread at each end: in order, one thing at a time, no state of requests beyond what it is copying.

The engine's thread queues work and gets events back through `report`; it never waits for these threads.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from pd_cluster import wire
from pd_cluster.errors import LinkError, TransferFailed
from pd_cluster.transport.base import KVReceiver, KVSender
from pd_cluster.types import Note, TokenOutput, note_nothing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """This end of the link is beyond use."""

    conn: str
    reason: str


@dataclass(frozen=True, slots=True)
class Landed:
    transfer_id: str
    first_tokens: list[TokenOutput]
    nbytes: int


@dataclass(frozen=True, slots=True)
class LandFault:
    transfer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing writes the landing blocks of this transfer any more."""

    transfer_id: str


LinkEvent = LinkFailed | Landed | LandFault | Drained
Report = Callable[[LinkEvent], None]


class SendThread:
    """P's end. `post` sends a header over the link's connection; the payload follows at once."""

    def __init__(
        self,
        conn: str,
        senders: list[KVSender],
        post: Callable[[wire.Body], None],
        report: Report,
        checksum: bool,
        block_nbytes: int,
        note: Note = note_nothing,
    ) -> None:
        self._conn = conn
        self._senders = {sender.name: sender for sender in senders}
        self._sender: KVSender | None = None
        self._post = post
        self._report = report
        self._checksum = checksum
        self._block_nbytes = block_nbytes
        self._note = note
        self._live: set[str] = set()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.sent_nbytes = 0
        self._thread = threading.Thread(target=self._run, name=f"kv-send {conn}", daemon=True)
        self._thread.start()

    @property
    def offers(self) -> list[wire.TransportOffer]:
        return [sender.offer() for sender in self._senders.values()]

    def open(self, transport: wire.TransportName) -> None:
        self._queue.put(lambda: self._open(transport))

    def ship(self, transfer_id: str, sequence: int, first_block: int, block_ids: list[int]) -> None:
        self._live.add(transfer_id)
        self._queue.put(lambda: self._ship(transfer_id, sequence, first_block, block_ids))

    def ship_end(self, end: wire.KVEnd) -> None:
        self._live.add(end.transfer_id)  # there may have been nothing to ship
        self._queue.put(lambda: self._end(end))

    def drop(self, transfer_id: str) -> None:
        self._live.discard(transfer_id)

    def close(self) -> None:
        self._live.clear()
        self._queue.put(None)

    def _run(self) -> None:
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
        for sender in self._senders.values():
            sender.close()

    def _open(self, transport: wire.TransportName) -> None:
        if transport not in self._senders:
            raise LinkError(f"the decode instance chose {transport}, which was not offered")
        self._sender = self._senders[transport]
        self._sender.open()

    def _ship(self, transfer_id: str, sequence: int, first_block: int, block_ids: list[int]) -> None:
        if transfer_id not in self._live:
            return
        if self._sender is None:
            raise LinkError("the decode instance asked for KV cache before it had chosen a transport")
        payload, checksum = self._sender.payload(block_ids, self._checksum)
        nbytes = len(block_ids) * self._block_nbytes
        self._post(wire.KVChunk(transfer_id, sequence, first_block, block_ids, nbytes, checksum))
        self._sender.send(payload)
        self.sent_nbytes += nbytes
        self._note(transfer_id, "sent", first_block=first_block, num_blocks=len(block_ids), nbytes=nbytes)

    def _end(self, end: wire.KVEnd) -> None:
        if end.transfer_id in self._live:
            self._note(end.transfer_id, "ended")
            self._post(end)


@dataclass(slots=True)
class Landing:
    block_ids: list[int]
    num_landed: int = 0
    num_chunks: int = 0
    nbytes: int = 0


class Lander:
    """What lands where on D's side of one link: pure bookkeeping around `receiver`, one item at a time, in order."""

    def __init__(self, receiver: KVReceiver, note: Note = note_nothing) -> None:
        self._receiver = receiver
        self._note = note
        self._landings: dict[str, Landing] = {}
        self.received_nbytes = 0

    def begin(self, transfer_id: str, block_ids: list[int], first_block: int = 0) -> None:
        """`block_ids` are the whole prompt's; those before `first_block` are not written."""
        self._landings[transfer_id] = Landing(block_ids, num_landed=first_block)

    def forget(self, transfer_id: str) -> Drained:
        self._landings.pop(transfer_id, None)
        return Drained(transfer_id)

    def land(self, item: wire.KVChunk | wire.KVEnd) -> Landed | LandFault | None:
        """Raises LinkError when the link is beyond use."""
        landing = self._landings.get(item.transfer_id)
        try:
            if isinstance(item, wire.KVChunk):
                self._land_chunk(item, landing)
                return None
            return self._land_end(item, landing) if landing is not None else None
        except TransferFailed as error:
            self._landings.pop(item.transfer_id, None)
            return LandFault(item.transfer_id, str(error))

    def _land_chunk(self, chunk: wire.KVChunk, landing: Landing | None) -> None:
        if landing is None:
            self._receiver.receive(chunk, None)
            return
        first, stop = chunk.first_block, chunk.first_block + len(chunk.block_ids)
        if chunk.sequence != landing.num_chunks or first != landing.num_landed or stop > len(landing.block_ids):
            self._receiver.receive(chunk, None)
            raise TransferFailed(
                f"chunk {chunk.sequence} with blocks {first}-{stop - 1} came when chunk {landing.num_chunks} "
                f"with block {landing.num_landed} of {len(landing.block_ids)} was next"
            )
        self._receiver.receive(chunk, landing.block_ids[first:stop])
        landing.num_chunks += 1
        landing.num_landed = stop
        landing.nbytes += chunk.nbytes
        self.received_nbytes += chunk.nbytes
        self._note(chunk.transfer_id, "landed", first_block=first, num_blocks=stop - first, nbytes=chunk.nbytes)

    def _land_end(self, end: wire.KVEnd, landing: Landing) -> Landed:
        if end.num_chunks != landing.num_chunks or landing.num_landed != len(landing.block_ids):
            raise TransferFailed(
                f"{landing.num_chunks} of {end.num_chunks} chunks and {landing.num_landed} of "
                f"{len(landing.block_ids)} blocks had come when the transfer ended"
            )
        if not end.first_tokens:
            raise TransferFailed("the transfer ended without a first token")
        del self._landings[end.transfer_id]
        return Landed(end.transfer_id, end.first_tokens, landing.nbytes)


class _Deaf:
    """Stands in for a transport that did not open: nothing can come."""

    name: wire.TransportName = "local"

    def open(self) -> None: ...

    def receive(self, chunk: wire.KVChunk, into: list[int] | None) -> None:
        raise LinkError("no transport is open")

    def close(self) -> None: ...


class ReceiveThread:
    """D's end. Tries the transports that P offers in D's order of preference, then lands chunks."""

    def __init__(
        self,
        conn: str,
        link_id: str,
        receivers: list[KVReceiver],
        post: Callable[[wire.Body], None],
        report: Report,
        note: Note = note_nothing,
    ) -> None:
        self._conn = conn
        self._link_id = link_id
        self._receivers = receivers
        self._post = post
        self._report = report
        self._note = note
        self._lander = Lander(_Deaf())
        self._queue: queue.SimpleQueue[wire.KVChunk | wire.KVEnd | str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kv-receive {conn}", daemon=True)
        self._thread.start()

    @property
    def received_nbytes(self) -> int:
        return self._lander.received_nbytes

    def put(self, body: wire.KVChunk | wire.KVEnd) -> None:
        self._queue.put(body)

    def begin(self, transfer_id: str, block_ids: list[int], first_block: int = 0) -> None:
        """Before the credit leaves, so before anything of this transfer can come."""
        self._lander.begin(transfer_id, block_ids, first_block)

    def forget(self, transfer_id: str) -> None:
        """`Drained` follows."""
        self._queue.put(transfer_id)

    def close(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        receiver = self._open()
        works = receiver is not None
        while (item := self._queue.get()) is not None:
            if isinstance(item, str):
                self._report(self._lander.forget(item))
            elif works:
                works = self._land(item)
        if receiver is not None:
            receiver.close()

    def _open(self) -> KVReceiver | None:
        failures, retry = [], False
        for receiver in self._receivers:
            self._post(wire.LinkAnswer(self._link_id, receiver.name))
            try:
                receiver.open()
            except LinkError as error:
                failures.append(f"{receiver.name}: {error}")
                retry = retry or error.retry
                log.warning("link %s: %s does not work: %s", self._conn, receiver.name, error)
                continue
            except Exception as error:
                failures.append(f"{receiver.name}: internal error: {error}")
                retry = True
                log.exception("link %s: opening %s failed", self._conn, receiver.name)
                continue
            self._lander = Lander(receiver, self._note)
            self._post(wire.LinkReady(self._link_id, receiver.name))
            return receiver
        reason = "; ".join(failures) or "no transport in common: see --kv-transport"
        self._post(wire.LinkRefused(self._link_id, reason, retry))
        return None

    def _land(self, item: wire.KVChunk | wire.KVEnd) -> bool:
        """False when the link is beyond use; the thread goes on, because drains must be acknowledged."""
        try:
            event = self._lander.land(item)
        except LinkError as error:
            self._report(LinkFailed(self._conn, str(error)))
            return False
        except Exception as error:
            log.exception("link %s: its receiving thread failed", self._conn)
            self._report(LinkFailed(self._conn, f"internal error: {error}"))
            return False
        if event is not None:
            self._report(event)
        return True
