"""Moves payloads between a pool and the buffers from which a process group sends and into which it receives.

Handles pools and buffers on hosts and devices, and orders the copies. Knows nothing of groups or of when payloads are
sent.
"""

from __future__ import annotations

import torch

from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.pack import pack, unpack
from pd_cluster.kv.pool_route import PoolRoute
from pd_cluster.transport.link_copies import Copies
from pd_cluster.wire import KVPiece


class Staging:
    """Buffers are in host memory if `in_host_memory`, otherwise on the pool's device."""

    def __init__(self, pool: KVPool, route: PoolRoute, copies: Copies, in_host_memory: bool) -> None:
        self._pool = pool
        self._route = route
        self._copies = copies
        self._crosses = in_host_memory and pool.device.is_accelerator
        self._place = torch.device("cpu") if in_host_memory else pool.memory.device
        self._is_pinned = self._crosses and pool.memory.device.type != "cpu"

    def warm(self) -> None:
        with self._copies.launch():
            self._pool.memory.warm()

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._place, pin_memory=self._is_pinned)

    def packed(self, piece: KVPiece) -> torch.Tensor:
        """Returns the payload, [payload_nbytes] uint8.

        A payload in host memory is complete; on a device, its copy is only launched in `copies`. The payload is a view
        of the pool if the blocks are contiguous. Raises LinkError.
        """
        if not self._pool.device.is_accelerator:
            return pack(self._pool.memory, piece, self._route)
        with self._copies.launch():
            payload = self._in_place(piece)
            if payload is None:
                payload = pack(self._pool.memory, piece, self._route)
            if self._crosses:
                there, payload = payload, self.buffer(len(payload))
                payload.copy_(there, non_blocking=True)
        if self._crosses:
            self._copies.settle()
        return payload

    def _in_place(self, piece: KVPiece) -> torch.Tensor | None:
        """Returns a view of the piece's bytes in the pool if they have the payload's order; otherwise None.

        A view is safe although P may rewrite blocks once a transfer is abandoned: D uses blocks only after P has
        confirmed that it still held them, as with transports that read the pool.
        """
        return self._pool.memory.view_of(piece) if self._route.is_verbatim else None

    def unpack(self, payload: torch.Tensor, piece: KVPiece, into: list[int]) -> None:
        """Copies from a buffer to the blocks.

        Afterwards, later work in `copies` may reuse the buffer. Raises LinkError.
        """
        if self._pool.device.is_accelerator:
            with self._copies.launch():
                on_device = payload.to(self._pool.memory.device, non_blocking=True)
                unpack(on_device, piece, self._route, self._pool.memory, into)
            if self._crosses:
                self._copies.settle()  # because the host refills the buffer
        else:
            unpack(payload, piece, self._route, self._pool.memory, into)
