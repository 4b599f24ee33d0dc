"""Both pools in one process: the receiver copies from block to block. What other one-sided transports build on, too.

Payloads of pools on a device have no checksum: the host would have to fetch them to hash them. They are copied once,
within the device's own memory; that it is the right memory is proven by the probe, and that it held still by `Confirm`.
"""

from __future__ import annotations

import abc
import secrets
from collections.abc import Iterator
from weakref import WeakValueDictionary

import torch

from pd_cluster.errors import LinkError, TransferFailed
from pd_cluster.kv.layered import LayerMajor
from pd_cluster.kv.layout import KVLayout, Route
from pd_cluster.kv.pack import as_layers, ids_on, pack, runs, unpack
from pd_cluster.kv.pool import KVPool, Memory, is_block
from pd_cluster.model.cpu.copy import streaming_copy
from pd_cluster.transport.base import Checksum, Prepared, buffer_of
from pd_cluster.transport.copies import SETTLE_S, Copies
from pd_cluster.transport.device_copy import copy_blocks, warm
from pd_cluster.wire import KVChunk, KVPiece, TransportName, TransportOffer

MAX_PAYLOAD_NBYTES = 16 << 20
MAX_DEVICE_PAYLOAD_NBYTES = 256 << 20  # a launch and its header should cost little beside the copy
HOT_NBYTES = 1 << 20  # copied and checked in one go, while it is in the core's own cache

_pools: WeakValueDictionary[str, KVPool] = WeakValueDictionary()  # by the name under which they are offered


def is_here(address: str) -> bool:
    """Whether the pool that is offered under this name is one of this process."""
    return address in _pools


class OneSidedSender:
    """P's end: nothing to send; D reads. `device_uuid`: of the accelerator that the pool is on."""

    def __init__(
        self, name: TransportName, address: str, pool: KVPool, checksum: Checksum, device_uuid: str = ""
    ) -> None:
        self.name = name
        on_device = pool.device.is_accelerator
        self.max_payload_nbytes = MAX_DEVICE_PAYLOAD_NBYTES if on_device else MAX_PAYLOAD_NBYTES
        self._address = address
        self._pool = pool
        self._checksum = Checksum(is_on=False) if on_device else checksum
        self._device_uuid = device_uuid
        self._route: Route | None = None

    def offer(self) -> TransportOffer:
        return TransportOffer(transport=self.name, address=self._address, device_uuid=self._device_uuid)

    def open(self, peer: KVLayout) -> None:
        self._route = Route(self._pool.layout, peer, one_sided=True)

    def prepare(self, piece: KVPiece) -> Prepared:
        route = self._route
        assert route is not None
        return Prepared(None, route.payload_nbytes(piece), self._digest(piece, route))

    def send(self, sequence: int, prepared: Prepared) -> None: ...

    def close(self) -> None: ...

    def _digest(self, piece: KVPiece, route: Route) -> int:
        if not self._checksum.is_on:
            return 0
        if not route.is_verbatim:
            return self._checksum.of(pack(self._pool.memory, piece, route))
        return self._checksum.of(*_parts(self._pool.data, piece, piece.block_ids))


class OneSidedReader:
    """D's end, once it can read P's pool: `source` [num_blocks + NUM_EXTRA_BLOCKS, …]."""

    def __init__(self, source: Memory, route: Route, pool: KVPool, checksum: Checksum, copies: Copies) -> None:
        self._source, self._route = source, route
        self._pool = pool
        self._checksum = checksum
        self._copies = copies

    def receive(self, chunk: KVChunk, into: list[int]) -> None:
        """Raises TransferFailed."""
        piece, route = chunk.piece, self._route
        if not all(is_block(block, len(self._source)) for block in piece.block_ids):
            raise TransferFailed("a header names a block outside the prefill instance's pool")
        if chunk.nbytes != route.payload_nbytes(piece):
            raise TransferFailed(f"a header announces {chunk.nbytes} bytes for {route.payload_nbytes(piece)}")
        if self._pool.device.is_accelerator:
            with self._copies.launch():
                self._launch(piece, into)
            return
        if route.is_verbatim:
            found = self._copy(piece, into, bool(chunk.checksum))
        else:
            payload = pack(self._source, piece, route)
            found = self._checksum.of(payload) if chunk.checksum else 0
            unpack(payload, piece, route, self._pool.data, into)
        if chunk.checksum and found != chunk.checksum:
            raise TransferFailed("checksum of a KV chunk is wrong")

    def _launch(self, piece: KVPiece, into: list[int]) -> None:
        source, target = self._source, self._pool.memory
        if not self._route.is_verbatim:
            unpack(pack(source, piece, self._route), piece, self._route, target, into)
            return
        if isinstance(source, LayerMajor) and isinstance(target, LayerMajor):
            ids, there = (ids_on(target.device, torch.tensor(blocks)) for blocks in (piece.block_ids, into))
            target.copy_from(source, ids, there, slice(piece.first_layer, piece.stop_layer))
            return
        assert isinstance(source, torch.Tensor)
        source = as_layers(source)[:, piece.first_layer : piece.stop_layer]
        target = as_layers(self._pool.data)[:, piece.first_layer : piece.stop_layer]
        copy_blocks(source, target, piece.block_ids, into, paired_runs(piece.block_ids, into))

    def _copy(self, piece: KVPiece, into: list[int], checked: bool) -> int:
        """From block to block; returns the checksum of what was copied.

        Hashed while it is in the core's own cache: what was written, or, when the copy goes past the cache, what was
        read. That the source has not changed in between is not the checksum's business but `Confirm`'s.
        """
        assert isinstance(self._source, torch.Tensor)
        source = as_layers(self._source)[:, piece.first_layer : piece.stop_layer]
        target = as_layers(self._pool.data)[:, piece.first_layer : piece.stop_layer]
        copy = streaming_copy()
        digest = self._checksum.running() if checked and self._checksum.is_on else None
        for first, start, count in paired_runs(piece.block_ids, into):
            there, here = contiguous(target[start : start + count]), contiguous(source[first : first + count])
            for to, of in _hot_parts(there, here) if digest is not None else zip(there, here, strict=True):
                if copy is not None:
                    copy(to, of)
                else:
                    to.copy_(of)
                if digest is not None:
                    digest.update(buffer_of(of if copy is not None else to))
        return 0 if digest is None else digest.intdigest() or 1


class OneSidedReceiver(abc.ABC):
    """D's end; what it reads from is there once it is open."""

    name: TransportName

    def __init__(
        self, offer: TransportOffer, pool: KVPool, peer: KVLayout, checksum: Checksum, settle_s: float = SETTLE_S
    ) -> None:
        self._address = offer.address
        self._pool = pool
        self._checksum = checksum
        self.copies = Copies(pool.device, settle_s)
        self._route = Route(peer, pool.layout, one_sided=True)
        self._reader: OneSidedReader | None = None
        self.precision = self._route.precision

    def open(self) -> None:
        with self.copies.launch():
            warm(self._pool.memory.device)
        self._reader = OneSidedReader(self._source(), self._route, self._pool, self._checksum, self.copies)

    @abc.abstractmethod
    def _source(self) -> Memory:
        """P's pool, [num_blocks + NUM_EXTRA_BLOCKS, …]. Raises LinkError."""

    def expect(self, sequence: int, chunk: KVChunk) -> None: ...  # noqa: B027  (it is read when its turn has come)

    def arrive(self, sequence: int, chunk: KVChunk, timeout_s: float) -> None: ...  # noqa: B027

    def receive(self, sequence: int, chunk: KVChunk, into: list[int] | None) -> None:
        if into is not None:
            assert self._reader is not None
            self._reader.receive(chunk, into)

    def close(self) -> None:
        """Lets go of P's pool, which nothing may still be reading then."""
        self.copies.drain()
        with self.copies.beside():  # torch unmaps behind the current stream
            self._reader = None


class LocalReceiver(OneSidedReceiver):
    name: TransportName = "local"

    def _source(self) -> Memory:
        source = _pools.get(self._address)
        if source is None:
            raise LinkError("the prefill instance is in another process")
        if source.device != self._pool.device:
            raise LinkError(
                f"the prefill instance's pool is on {source.device.torch_name}, this one's on "
                f"{self._pool.device.torch_name}"
            )
        return source.memory


def offer_pool(pool: KVPool) -> str:
    """The name under which receivers in this process find it."""
    for name, known in _pools.items():
        if known is pool:
            return name
    name = secrets.token_hex(16)
    _pools[name] = pool
    return name


def paired_runs(source: list[int], target: list[int]) -> list[tuple[int, int, int]]:
    """(first source block, first target block, count) for stretches that are consecutive on both sides."""
    found: list[tuple[int, int, int]] = []
    for s, t in zip(source, target, strict=True):
        if found:
            first, start, count = found[-1]
            if first + count == s and start + count == t:
                found[-1] = (first, start, count + 1)
                continue
        found.append((s, t, 1))
    return found


def _parts(data: torch.Tensor, piece: KVPiece, block_ids: list[int]) -> list[torch.Tensor]:
    """The verbatim payload's bytes, in order, as contiguous parts."""
    layers = as_layers(data)[:, piece.first_layer : piece.stop_layer]
    return [part for first, count in runs(block_ids) for part in contiguous(layers[first : first + count])]


def contiguous(blocks: torch.Tensor) -> list[torch.Tensor]:
    """[n, num_layers, layer_nbytes] of a pool: whole when all layers are there, else block by block."""
    return [blocks.view(-1)] if blocks.is_contiguous() else [block.view(-1) for block in blocks]


def put_blocks(payload: torch.Tensor, piece: KVPiece, data: torch.Tensor, into: list[int]) -> None:
    """A verbatim payload into its blocks, as `unpack` would, and past the cache: the payload's buffer stays in it."""
    copy = streaming_copy()
    at = 0
    for part in _parts(data, piece, into):
        source = payload[at : at + len(part)]
        if copy is not None:
            copy(part, source)
        else:
            part.copy_(source)
        at += len(part)


def _hot_parts(there: list[torch.Tensor], here: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for to, of in zip(there, here, strict=True):
        for at in range(0, len(of), HOT_NBYTES):
            yield to[at : at + HOT_NBYTES], of[at : at + HOT_NBYTES]
