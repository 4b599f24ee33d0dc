"""Payloads between a pool and the buffers that a process group sends from and receives into.

Knows where both are, host or device, and in which order copies go; nothing of groups or of when payloads travel.
"""

from __future__ import annotations

import torch

from pd_cluster.kv.layered import LayerMajor
from pd_cluster.kv.layout import Route
from pd_cluster.kv.pack import as_layers, pack, unpack
from pd_cluster.kv.pool import KVPool
from pd_cluster.transport.copies import Copies
from pd_cluster.transport.device_copy import copy_blocks, warm
from pd_cluster.transport.local import paired_runs, put_blocks
from pd_cluster.wire import KVPiece


class Staging:
    """`in_host_memory`: where buffers are; else on the pool's device."""

    def __init__(self, pool: KVPool, route: Route, copies: Copies, in_host_memory: bool) -> None:
        self._pool = pool
        self._route = route
        self._copies = copies
        self._crosses = in_host_memory and pool.device.is_accelerator
        self._place = torch.device("cpu") if in_host_memory else pool.memory.device
        self._is_pinned = self._crosses and pool.memory.device.type != "cpu"

    def warm(self) -> None:
        with self._copies.launch():
            warm(self._pool.memory.device)

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._place, pin_memory=self._is_pinned)

    def packed(self, piece: KVPiece) -> torch.Tensor:
        """The payload, [payload_nbytes] uint8; on a device it is launched in `copies`, in host memory it is there.

        Raises LinkError.
        """
        if not self._pool.device.is_accelerator:
            return pack(self._pool.memory, piece, self._route)
        with self._copies.launch():
            payload = self._gathered(piece)
            if self._crosses:
                there, payload = payload, self.buffer(len(payload))
                payload.copy_(there, non_blocking=True)
        if self._crosses:
            self._copies.settle()
        return payload

    def unpack(self, payload: torch.Tensor, piece: KVPiece, into: list[int]) -> None:
        """From a buffer to the blocks; the buffer may be used again, in `copies`, when this returns.

        Raises LinkError.
        """
        if self._pool.device.is_accelerator:
            with self._copies.launch():
                self._scatter(payload.to(self._pool.memory.device, non_blocking=True), piece, into)
            if self._crosses:
                self._copies.settle()  # the host fills the buffer again
        elif self._route.is_verbatim:
            put_blocks(payload, piece, self._pool.data, into)
        else:
            unpack(payload, piece, self._route, self._pool.memory, into)

    def _gathered(self, piece: KVPiece) -> torch.Tensor:
        if not self._route.is_verbatim or isinstance(self._pool.memory, LayerMajor):
            return pack(self._pool.memory, piece, self._route)
        blocks = as_layers(self._pool.data)[:, piece.first_layer : piece.stop_layer]
        count = len(piece.block_ids)
        payload = torch.empty((count, *blocks.shape[1:]), dtype=torch.uint8, device=blocks.device)
        into = list(range(count))
        copy_blocks(blocks, payload, piece.block_ids, into, paired_runs(piece.block_ids, into))
        return payload.view(-1)

    def _scatter(self, payload: torch.Tensor, piece: KVPiece, into: list[int]) -> None:
        if not self._route.is_verbatim or isinstance(self._pool.memory, LayerMajor):
            unpack(payload, piece, self._route, self._pool.memory, into)
            return
        blocks = as_layers(self._pool.data)[:, piece.first_layer : piece.stop_layer]
        source = payload.view(len(into), *blocks.shape[1:])
        of = list(range(len(into)))
        copy_blocks(source, blocks, of, into, paired_runs(of, into))
