"""torch.distributed transport: one two-rank process group per link, P is rank 0 and sends, D is rank 1 and receives.

The group is built directly on a TCPStore that P hosts on the rank table's address: no global world, nothing that
another link could disturb. Payloads land in a staging buffer and are copied to their blocks after the checksum; a
timeout ends the link, so that late bytes never reach a reused block. gloo on CPU; NCCL and HCCL take the same shape.
"""

from __future__ import annotations

import secrets
import socket
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from pd_cluster.errors import LinkError, TransferFailed
from pd_cluster.kv.pool import KVPool
from pd_cluster.transport.base import checksum_of, runs
from pd_cluster.wire import KVChunk, TransportName, TransportOffer

SENDER, RECEIVER = 0, 1


class Store:
    """The rendezvous that a prefill process hosts for all its links."""

    def __init__(self, host: str, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((host, 0))
        listener.listen(64)
        self.host = host
        self.port = int(listener.getsockname()[1])
        self.store = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )


class DistSender:
    name: TransportName = "dist"

    def __init__(self, store: Store, pool: KVPool, bind_host: str, connect_s: float, transfer_s: float) -> None:
        self._store = store
        self._pool = pool
        self._bind_host = bind_host
        self._connect_s = connect_s
        self._transfer = timedelta(seconds=transfer_s)
        self._group_name = secrets.token_hex(16)
        self._group: Any = None

    def offer(self) -> TransportOffer:
        return TransportOffer(transport="dist", address=self._group_name, port=self._store.port, backend="gloo")

    def open(self) -> None:
        prefix = PrefixStore(self._group_name, self._store.store)
        self._group = _make_group(prefix, SENDER, self._bind_host, self._connect_s)

    def payload(self, block_ids: list[int], checksum: bool) -> tuple[torch.Tensor | None, int]:
        flat = self._pool.flat()
        pieces = [flat[first : first + count] for first, count in runs(block_ids)]
        payload = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return payload, checksum_of(payload) if checksum else 0

    def send(self, payload: torch.Tensor | None) -> None:
        assert payload is not None
        try:
            self._group.send([payload], RECEIVER, 0).wait(self._transfer)
        except RuntimeError as error:
            raise LinkError(f"sending KV cache failed: {_first_line(error)}", retry=True) from error

    def close(self) -> None:
        self._group = None


class DistReceiver:
    name: TransportName = "dist"

    def __init__(
        self,
        offer: TransportOffer,
        pool: KVPool,
        peer_host: str,
        bind_host: str,
        connect_s: float,
        transfer_s: float,
    ) -> None:
        self._offer = offer
        self._pool = pool
        self._peer_host = peer_host
        self._bind_host = bind_host
        self._connect_s = connect_s
        self._transfer = timedelta(seconds=transfer_s)
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._group: Any = None

    def open(self) -> None:
        if self._offer.backend != "gloo":
            raise LinkError(f"the prefill instance sends with {self._offer.backend!r}, this one receives with gloo")
        timeout = timedelta(seconds=self._connect_s)
        try:
            store = TCPStore(self._peer_host, self._offer.port, is_master=False, timeout=timeout)
        except RuntimeError as error:
            raise LinkError(
                f"the prefill instance's store at {self._peer_host}:{self._offer.port} cannot be reached: "
                f"{_first_line(error)}",
                retry=True,
            ) from error
        prefix = PrefixStore(self._offer.address, store)
        self._group = _make_group(prefix, RECEIVER, self._bind_host, self._connect_s)

    def receive(self, chunk: KVChunk, into: list[int] | None) -> None:
        block_nbytes = self._pool.layout.block_nbytes
        num_blocks = len(chunk.block_ids)
        if chunk.nbytes != num_blocks * block_nbytes:
            raise LinkError(f"a header announces {chunk.nbytes} bytes for {num_blocks} blocks", retry=True)
        if len(self._staging) < chunk.nbytes:
            self._staging = torch.empty(chunk.nbytes, dtype=torch.uint8)
        staged = self._staging[: chunk.nbytes].view(num_blocks, block_nbytes)
        try:
            self._group.recv([staged], SENDER, 0).wait(self._transfer)
        except RuntimeError as error:
            raise LinkError(f"receiving KV cache failed: {_first_line(error)}", retry=True) from error
        if into is None:
            return
        if chunk.checksum and checksum_of(staged) != chunk.checksum:
            raise TransferFailed("checksum of a KV chunk is wrong")
        start = 0
        for first, count in runs(into):
            self._pool.flat()[first : first + count].copy_(staged[start : start + count])
            start += count

    def close(self) -> None:
        self._group = None


def _make_group(store: PrefixStore, rank: int, host: str, connect_s: float) -> ProcessGroupGloo:
    """Blocks until both ranks are there. Raises LinkError after `connect_s`."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=connect_s)
    try:
        return ProcessGroupGloo(store, rank, 2, options)
    except RuntimeError as error:
        raise LinkError(f"the gloo pair did not come up: {_first_line(error)}", retry=True) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]
