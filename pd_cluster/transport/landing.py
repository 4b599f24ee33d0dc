"""Tracks which chunks have landed at D's end of a link, and checks their order. Knows nothing of threads or torch."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from pd_cluster import wire
from pd_cluster.devices.device_streams import REACHED, Marker
from pd_cluster.errors import TransferFailed
from pd_cluster.kv.kv_layout import KVLayout, num_common_layers
from pd_cluster.transport.link_events import Arrived, Drained, Landed, LandFault, numbers_of
from pd_cluster.transport.transport_interface import KVReceiver
from pd_cluster.types import Note, note_nothing


@dataclass(slots=True)
class Landing:
    """`num_layers_of[t]`: how many layers of token t have landed.

    `free`: reached once no earlier launch uses the blocks.
    """

    block_ids: list[int]
    num_layers_of: array[int]
    free: Marker = REACHED
    num_chunks: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Geometry:
    """The bounds of pieces: the number of transferred layers, and the tokens per block at each end."""

    num_layers: int
    source_block_size: int
    target_block_size: int

    @classmethod
    def of(cls, source: KVLayout, target: KVLayout) -> Geometry:
        return cls(num_common_layers(source, target), source.block_size, target.block_size)


class Lander:
    """Checks that every token of a transfer lands once in every layer, layers in order; `receiver` moves the bytes.

    `clear` receives the blocks that are written, to clear their layers that are not transferred. It may receive a block
    twice.
    """

    def __init__(
        self,
        receiver: KVReceiver,
        geometry: Geometry,
        note: Note = note_nothing,
        clear: Callable[[list[int]], None] | None = None,
    ) -> None:
        self._receiver = receiver
        self._note = note
        self._clear = clear
        self._geometry = geometry
        self._landings: dict[str, Landing] = {}
        self.received_nbytes = 0

    def begin(
        self, transfer_id: str, block_ids: list[int], first_token: int, num_tokens: int, free: Marker = REACHED
    ) -> None:
        """Starts a landing. `block_ids`: those of the whole prompt. Blocks before `first_token` are not written."""
        here = array("H", [self._geometry.num_layers]) * first_token
        self._landings[transfer_id] = Landing(block_ids, here + array("H", [0]) * (num_tokens - first_token), free)

    def forget(self, transfer_id: str) -> Drained:
        """Forgets a transfer, and waits for the device's copies. No chunk may be landing during the call."""
        self._landings.pop(transfer_id, None)
        self._receiver.copies.drain()
        return Drained(transfer_id)

    def land(self, sequence: int, header: wire.KVChunk | wire.KVEnd) -> Arrived | Landed | LandFault | None:
        """Lands a chunk or the end of a transfer. Raises LinkError if the link is unusable."""
        landing = self._landings.get(header.transfer_id)
        try:
            if isinstance(header, wire.KVChunk):
                return Arrived(header.transfer_id) if self._land_chunk(sequence, header, landing) else None
            return self._land_end(header, landing) if landing is not None else None
        except TransferFailed as error:
            self._landings.pop(header.transfer_id, None)
            return LandFault(header.transfer_id, str(error))

    def _land_chunk(self, sequence: int, chunk: wire.KVChunk, landing: Landing | None) -> bool:
        """Lands a chunk. Returns whether it is the last one, which has the last layers of the last tokens."""
        problem = self._problem(chunk, landing) if landing is not None else ""
        if landing is None or problem:
            self._receiver.receive(sequence, chunk, None)
            if problem:
                raise TransferFailed(f"chunk {chunk.index} is not valid: {problem}")
            return False
        piece, size, started_s = chunk.piece, self._geometry.target_block_size, time.monotonic()
        into = landing.block_ids[piece.first_token // size : -(-piece.stop_token // size)]
        if not landing.num_chunks:
            self._receiver.copies.after(landing.free)
        if self._clear is not None and not piece.first_layer:
            self._clear(into)
        self._receiver.receive(sequence, chunk, into)
        landing.num_layers_of[piece.first_token : piece.stop_token] = array("H", [piece.stop_layer]) * piece.num_tokens
        landing.num_chunks += 1
        landing.nbytes += chunk.nbytes
        self.received_nbytes += chunk.nbytes
        self._note(chunk.transfer_id, "landed", **numbers_of(piece, chunk.nbytes, started_s))
        num_tokens, num_layers = len(landing.num_layers_of), self._geometry.num_layers
        return (piece.stop_token, piece.stop_layer) == (num_tokens, num_layers)

    def _problem(self, chunk: wire.KVChunk, landing: Landing) -> str:
        """Returns why this chunk is invalid or not the next one; "" if it is the next one."""
        piece, geometry = chunk.piece, self._geometry
        size = geometry.source_block_size
        if chunk.index != landing.num_chunks:
            return f"chunk {landing.num_chunks} was expected"
        if not 0 <= piece.first_token < piece.stop_token <= len(landing.num_layers_of):
            return (
                f"it has tokens {piece.first_token} to {piece.stop_token} of a prompt of {len(landing.num_layers_of)}"
            )
        if not 0 <= piece.first_layer < piece.stop_layer <= geometry.num_layers:
            return f"it has layers {piece.first_layer} to {piece.stop_layer} of {geometry.num_layers}"
        if len(piece.block_ids) != -(-piece.stop_token // size) - piece.first_token // size:
            return f"it names {len(piece.block_ids)} blocks for tokens {piece.first_token} to {piece.stop_token}"
        if size == geometry.target_block_size and piece.first_token % size:
            return f"it begins with token {piece.first_token}, inside a block"
        before = landing.num_layers_of[piece.first_token : piece.stop_token]
        if before != array("H", [piece.first_layer]) * piece.num_tokens:
            return f"its tokens must have landed in exactly the layers before {piece.first_layer}"
        return ""

    def _land_end(self, end: wire.KVEnd, landing: Landing) -> Landed:
        num_missing = len(landing.num_layers_of) - landing.num_layers_of.count(self._geometry.num_layers)
        if end.num_chunks != landing.num_chunks or num_missing or end.num_tokens != len(landing.num_layers_of):
            raise TransferFailed(
                f"when the transfer of {end.num_tokens} tokens ended, {landing.num_chunks} of {end.num_chunks} chunks "
                f"had arrived and {num_missing} of {len(landing.num_layers_of)} tokens were missing"
            )
        self._receiver.copies.settle()
        del self._landings[end.transfer_id]
        return Landed(end.transfer_id, end.first_tokens, landing.nbytes)
