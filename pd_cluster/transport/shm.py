"""Transport within a host: D maps P's pool read-only, and copies the blocks that the headers name (see one_sided.py).

P passes the pool's memfd over an abstract Unix socket (unix_server.py), and sends the socket's name over the
authenticated link.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
import warnings

from pd_cluster.devices.device import Device
from pd_cluster.errors import LinkError
from pd_cluster.kv.kv_pool import KVPool, view_blocks
from pd_cluster.kv.pool_memory import Memory
from pd_cluster.transport import unix_server
from pd_cluster.transport.one_sided import OneSidedReceiver, OneSidedSender
from pd_cluster.transport.transport_interface import Checksum, KVReceiver, KVSender, LinkContext, Peer, PostKey
from pd_cluster.wire import TransportName, TransportOffer


class PoolServer(unix_server.UnixServer):
    """Sends the pool's descriptor, read-only."""

    def __init__(self, pool: KVPool) -> None:
        self._fd = os.open(f"/proc/self/fd/{pool.fd}", os.O_RDONLY | os.O_CLOEXEC)
        super().__init__()

    def close(self) -> None:
        super().close()
        os.close(self._fd)

    def _give(self, peer: socket.socket) -> None:
        peer.sendmsg([b"kv"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._fd]))])


class ShmReceiver(OneSidedReceiver):
    """D's end: maps P's pool."""

    name: TransportName = "shm"

    def source(self) -> Memory:
        with unix_server.connect(self._offer.address, "shared memory", self._place.connect_s) as peer:
            try:
                _, fds, _, _ = socket.recv_fds(peer, 2, 1)
            except OSError as error:
                raise LinkError(
                    f"the prefill instance's shared memory cannot be reached: {error}", retry=True
                ) from error
        if len(fds) != 1:
            raise LinkError("the prefill instance did not hand over its shared memory (another user?)", retry=True)
        try:
            return self._map(fds[0])
        finally:
            os.close(fds[0])

    def _map(self, fd: int) -> Memory:
        nbytes = self._num_blocks * self.route.source.block_nbytes
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise LinkError("the prefill instance's pool could shrink while it is read")
        if os.fstat(fd).st_size != nbytes:
            raise LinkError(f"the prefill instance's pool is {os.fstat(fd).st_size} bytes, not {nbytes}")
        view = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the mapping is read-only, as it should be
            return view_blocks(view, self.route.source, self._num_blocks)


def why_not(name: TransportName, own: Device, peer: TransportOffer | None = None) -> str:
    """See transport_table.Transport."""
    return f"this instance's pool is on {own.torch_name}, not in host memory" if own.is_accelerator else ""


def ends(name: TransportName, place: LinkContext) -> ShmEnds:
    return ShmEnds(name, place)


class ShmEnds:
    """Runs a single server for the pool, for any number of links."""

    def __init__(self, name: TransportName, place: LinkContext) -> None:
        self._name, self._place = name, place
        self._server: PoolServer | None = None

    def sender(self, checksum: Checksum, post: PostKey) -> KVSender:
        self._server = self._server or PoolServer(self._place.pool)
        return OneSidedSender(self._name, self._server.name, self._place.pool, checksum)

    def receiver(self, peer: Peer, checksum: Checksum, post: PostKey) -> KVReceiver:
        return ShmReceiver(self._place, peer, checksum)
