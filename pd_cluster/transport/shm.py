"""Same-host transport: D maps P's pool, read-only, and copies the blocks that the headers name (see local.py).

The pool's memfd is passed over an abstract Unix socket (nothing in any file system, gone with the process) to
processes of the same user that know the socket's random name, which travels over the authenticated link.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import struct
import threading
import warnings

import torch

from pd_cluster.errors import LinkError
from pd_cluster.kv.layout import KVLayout
from pd_cluster.kv.pool import NUM_EXTRA_BLOCKS, KVPool, view_blocks
from pd_cluster.transport.base import Checksum
from pd_cluster.transport.local import OneSidedReceiver
from pd_cluster.wire import TransportName, TransportOffer

ACCEPT_PAUSE_S = 0.1


class PoolServer:
    """Hands the pool's descriptor, read-only, to whoever connects with the right name and user. One thread."""

    def __init__(self, pool: KVPool) -> None:
        self.name = f"pd-cluster-kv-{secrets.token_hex(16)}"
        self._fd = os.open(f"/proc/self/fd/{pool.fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(128)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kv-pool-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(timeout=5)
        os.close(self._fd)

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # closed, or no descriptor is free just now
                if self._closing.wait(ACCEPT_PAUSE_S):
                    return
                continue
            with peer, contextlib.suppress(OSError):
                peer.settimeout(5)
                if _peer_uid(peer) == os.getuid():
                    fds = array.array("i", [self._fd])
                    peer.sendmsg([b"kv"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])


class ShmReceiver(OneSidedReceiver):
    """D's end: maps P's pool."""

    name: TransportName = "shm"

    def __init__(
        self,
        offer: TransportOffer,
        pool: KVPool,
        peer: KVLayout,
        num_peer_blocks: int,
        checksum: Checksum,
        timeout_s: float,
    ) -> None:
        super().__init__(offer, pool, peer, checksum)
        self._num_blocks = num_peer_blocks + NUM_EXTRA_BLOCKS
        self._timeout_s = timeout_s

    def _source(self) -> torch.Tensor:
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
            raise LinkError("the prefill instance did not hand over its shared memory (another user?)", retry=True)
        try:
            return self._map(fds[0])
        finally:
            os.close(fds[0])

    def _map(self, fd: int) -> torch.Tensor:
        nbytes = self._num_blocks * self._route.source.block_nbytes
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise LinkError("the prefill instance's pool could shrink while it is read")
        if os.fstat(fd).st_size != nbytes:
            raise LinkError(f"the prefill instance's pool is {os.fstat(fd).st_size} bytes, not {nbytes}")
        view = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the mapping is read-only, which is what we want
            return view_blocks(view, self._route.source, self._num_blocks)


def _peer_uid(peer: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)
