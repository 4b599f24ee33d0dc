"""Same-host transport: D maps P's pool, read-only, and copies the blocks that the headers name.

The pool's memfd is passed over an abstract Unix socket (nothing in any file system, gone with the process) to
processes of the same user that know the socket's random name, which travels over the authenticated link.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import secrets
import socket
import struct
import threading
import warnings

import torch
import xxhash

from pd_cluster.errors import LinkError, TransferFailed
from pd_cluster.kv.pool import KVPool
from pd_cluster.transport.base import buffer_of, checksum_of, runs
from pd_cluster.wire import KVChunk, TransportName, TransportOffer


class PoolServer:
    """Hands the pool's descriptor, read-only, to whoever connects with the right name and user. One thread."""

    def __init__(self, pool: KVPool) -> None:
        self.name = f"pd-cluster-kv-{secrets.token_hex(16)}"
        self._fd = os.open(f"/proc/self/fd/{pool.fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(16)
        self._thread = threading.Thread(target=self._serve, name="kv-pool-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(timeout=5)
        os.close(self._fd)

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # closed
                return
            with peer, contextlib.suppress(OSError):
                peer.settimeout(5)
                if _peer_uid(peer) == os.getuid():
                    fds = array.array("i", [self._fd])
                    peer.sendmsg([b"kv"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])


class ShmSender:
    """P's end: nothing to send; D reads."""

    name: TransportName = "shm"

    def __init__(self, server: PoolServer, pool: KVPool) -> None:
        self._server = server
        self._pool = pool

    def offer(self) -> TransportOffer:
        return TransportOffer(transport="shm", address=self._server.name)

    def open(self) -> None:
        pass

    def payload(self, block_ids: list[int], checksum: bool) -> tuple[torch.Tensor | None, int]:
        return None, _digest(self._pool.flat(), block_ids) if checksum else 0

    def send(self, payload: torch.Tensor | None) -> None:
        pass

    def close(self) -> None:
        pass


class ShmReceiver:
    """D's end: P's pool as bytes, [num_blocks, block_nbytes]."""

    name: TransportName = "shm"

    def __init__(self, offer: TransportOffer, pool: KVPool, num_peer_blocks: int, timeout_s: float) -> None:
        self._address = offer.address
        self._pool = pool
        self._num_peer_blocks = num_peer_blocks
        self._timeout_s = timeout_s
        self._source: torch.Tensor | None = None

    def open(self) -> None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.settimeout(self._timeout_s)
                peer.connect(f"\0{self._address}")
                if _peer_uid(peer) != os.getuid():
                    raise LinkError("the prefill instance's shared memory belongs to another user")
                _, fds, _, _ = socket.recv_fds(peer, 2, 1)
        except OSError as error:
            other_host = isinstance(error, ConnectionRefusedError)  # or another network namespace
            raise LinkError(
                f"the prefill instance's shared memory cannot be reached: {error}", retry=not other_host
            ) from error
        if len(fds) != 1:
            raise LinkError("the prefill instance did not hand over its shared memory (another user?)")
        try:
            nbytes = (self._num_peer_blocks + 1) * self._pool.layout.block_nbytes
            if os.fstat(fds[0]).st_size != nbytes:
                raise LinkError(f"the prefill instance's pool is {os.fstat(fds[0]).st_size} bytes, not {nbytes}")
            view = mmap.mmap(fds[0], nbytes, prot=mmap.PROT_READ)
        finally:
            os.close(fds[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the mapping is read-only, which is what we want
            self._source = torch.frombuffer(view, dtype=torch.uint8).view(self._num_peer_blocks + 1, -1)

    def receive(self, chunk: KVChunk, into: list[int] | None) -> None:
        if into is None:
            return
        source, target = self._source, self._pool.flat()
        assert source is not None
        if not all(0 <= block < self._num_peer_blocks for block in chunk.block_ids):
            raise TransferFailed("a header names a block outside the prefill instance's pool")
        for (first, count), start in _paired_runs(chunk.block_ids, into):
            target[start : start + count].copy_(source[first : first + count])
        if chunk.checksum and _digest(target, into) != chunk.checksum:
            raise TransferFailed("checksum of a KV chunk is wrong")

    def close(self) -> None:
        self._source = None


def _digest(flat: torch.Tensor, block_ids: list[int]) -> int:
    """Checksum of blocks in the order of the ids."""
    first_and_count = runs(block_ids)
    if len(first_and_count) == 1:
        first, count = first_and_count[0]
        return checksum_of(flat[first : first + count])
    digest = xxhash.xxh3_64()
    for first, count in first_and_count:
        digest.update(buffer_of(flat[first : first + count]))
    return digest.intdigest() or 1


def _paired_runs(source: list[int], target: list[int]) -> list[tuple[tuple[int, int], int]]:
    """((first source block, count), first target block) for stretches that are consecutive on both sides."""
    found: list[tuple[tuple[int, int], int]] = []
    for s, t in zip(source, target, strict=True):
        if found:
            (first, count), start = found[-1]
            if first + count == s and start + count == t:
                found[-1] = ((first, count + 1), start)
                continue
        found.append(((s, 1), t))
    return found


def _peer_uid(peer: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)
