"""Passes images' features between processes of one host: one sealed memfd per image, over an abstract Unix socket.

A file cannot change after it was handed over, so its reader does not depend on the other end. Knows nothing of images
or of access rights.
"""

from __future__ import annotations

import array
import fcntl
import math
import os
import secrets
import socket
import threading
from dataclasses import dataclass

import torch

from pd_cluster.errors import LinkError
from pd_cluster.transport import unix_server
from pd_cluster.transport.device_pair import Backend
from pd_cluster.transport.transport_interface import Checksum, buffer_of
from pd_cluster.transport.transport_table import allowed
from pd_cluster.wire import TOKEN_NBYTES, TransportName

SHM: TransportName = "shm"
PAIRS: dict[TransportName, Backend] = {"dist": "gloo", "curve": "curve"}  # between hosts, in order of preference

REACH_TOKEN = bytes(TOKEN_NBYTES)  # this token only checks whether the socket can be reached
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
HERE = b"features"
SOCKET_KIND = "socket for features"


def ways(kv_transport: str) -> list[TransportName]:
    """Returns the transports for features that a --kv-transport allows: files within a host, pairs between hosts."""
    rows = [each for each in allowed(kv_transport) if each.choice]
    found = [SHM] if any(each.is_same_host for each in rows) else []
    return found + [name for name in PAIRS if any(each.name == name for each in rows)]


@dataclass(frozen=True, slots=True)
class FeatureEndpoint:
    """The host on which this process sends or receives, and its time limits."""

    host: str
    connect_s: float
    transfer_s: float
    checksum: Checksum


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of an image's features. An encoder's answer must have `nbytes` bytes."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SealedFile:
    """Features in a file that no process can change, with their size and checksum."""

    fd: int
    nbytes: int
    checksum: int

    @classmethod
    def of(cls, features: torch.Tensor, checksum: Checksum) -> SealedFile:
        """Copies a contiguous tensor on the host to a file. Raises OSError if descriptors or memory run out."""
        data = features.view(torch.uint8).reshape(-1)
        fd = os.memfd_create("pd-cluster-features", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            rest = buffer_of(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, data.numel(), checksum.of(data))

    def duplicate(self) -> SealedFile:
        """Returns another descriptor of the same file. It must be closed separately."""
        return SealedFile(os.dup(self.fd), self.nbytes, self.checksum)

    def close(self) -> None:
        os.close(self.fd)


class FeatureServer(unix_server.UnixServer):
    """Serves each file once, to a process of the same user that has the file's token.

    Any thread may `offer` and `withdraw`.
    """

    def __init__(self) -> None:
        self._files: dict[bytes, SealedFile] = {}
        self._lock = threading.Lock()
        self.given_nbytes = 0
        super().__init__()

    def close(self) -> None:
        super().close()
        for token in list(self._files):
            self.withdraw(token)

    def offer(self, file: SealedFile) -> bytes:
        """Takes ownership of a file. Returns its token."""
        token = secrets.token_bytes(TOKEN_NBYTES)
        with self._lock:
            self._files[token] = file
        return token

    def withdraw(self, token: bytes) -> None:
        """Invalidates a token and closes its file, unless the token has been used."""
        if (file := self._take(token)) is not None:
            file.close()

    def __contains__(self, token: bytes) -> bool:
        return token in self._files

    def _take(self, token: bytes) -> SealedFile | None:
        with self._lock:
            return self._files.pop(token, None)

    def _give(self, peer: socket.socket) -> None:
        token = peer.recv(TOKEN_NBYTES, socket.MSG_WAITALL)
        if token == REACH_TOKEN:
            peer.sendall(HERE)
        elif (file := self._take(token)) is not None:
            try:
                peer.sendmsg([HERE], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fd]))])
                self.given_nbytes += file.nbytes
            finally:
                file.close()


def reach(address: str, timeout_s: float) -> None:
    """Checks that the socket answers. Raises LinkError."""
    _ask(address, REACH_TOKEN, timeout_s)


def fetch(address: str, token: bytes, shape: Shape, checksum: Checksum, wanted: int, timeout_s: float) -> torch.Tensor:
    """Reads features of this shape into a tensor on the host. Raises LinkError unless their checksum is `wanted`."""
    fds = _ask(address, token, timeout_s)
    if len(fds) != 1:
        raise LinkError("the encoder no longer has the features")
    try:
        features = torch.empty(shape.sizes, dtype=shape.dtype)
        data = features.view(torch.uint8).reshape(-1)
        if fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise LinkError("the encoder's file of features is not sealed, and could change while it is read")
        if (nbytes := os.fstat(fds[0]).st_size) != data.numel():
            raise LinkError(f"the encoder's features are {nbytes} bytes, not {data.numel()}")
        at, rest = 0, buffer_of(data)
        while rest:
            num_read = os.preadv(fds[0], [rest], at)
            at, rest = at + num_read, rest[num_read:]
    except OSError as error:
        raise LinkError(f"the encoder's features cannot be read: {error}") from error
    finally:
        os.close(fds[0])
    if checksum.of(data) != wanted:
        raise LinkError("the encoder's features do not have the announced checksum")
    return features


def _ask(address: str, token: bytes, timeout_s: float) -> list[int]:
    """Returns the files that the socket sends for a token."""
    with unix_server.connect(address, SOCKET_KIND, timeout_s, "encoder") as peer:
        try:
            peer.sendall(token)
            _, fds, _, _ = socket.recv_fds(peer, len(HERE), 1)
        except OSError as error:
            raise LinkError(f"the encoder's {SOCKET_KIND} does not answer: {error}", retry=True) from error
    return list(fds)
