"""Process groups of two ranks, P's and D's end of one link: built directly, no global world, one direction.

gloo moves host memory, NCCL the memory of devices. Both are used alike: `send` and `recv` return work whose
`wait(timeout)` returns when the host may use or reuse the bytes, or raises RuntimeError: then the pair is beyond use.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, Literal

import torch
import torch._C._distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from pd_cluster import device as devices
from pd_cluster.device import Device
from pd_cluster.errors import LinkError, first_line
from pd_cluster.streams import poll

Backend = Literal["gloo", "nccl"]
SENDER, RECEIVER = 0, 1

# What torch does with a group whose peer has died: end the group only, not this process. Read when a group is made.
NCCL_ERRORS, CLEAN_UP_ONLY = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"


class Store:
    """The rendezvous that P hosts for one attempt to open a link: who waits in it keeps nobody else waiting."""

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


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """D's way to P's store. Raises LinkError."""
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise LinkError(
            f"the prefill instance's store at {host}:{port} cannot be reached: {first_line(error)}", retry=True
        ) from error


def make_group(backend: Backend, store: PrefixStore, rank: int, host: str, connect_s: float, device: Device) -> Any:
    """Raises LinkError."""
    try:
        if backend == "gloo":
            return _gloo(store, rank, host, connect_s)
        return NcclPair(store, rank, connect_s, device)
    except RuntimeError as error:
        raise LinkError(f"the {backend} pair did not come up: {first_line(error)}", retry=True) from error


def close_group(group: Any) -> None:
    """A gloo group ends when nobody has it any more."""
    if isinstance(group, NcclPair):
        group.close()


def why_no_nccl(device: Device) -> str:
    """Why this process cannot be an end of an NCCL pair; "" when it can."""
    if not device.is_accelerator:
        return "this instance's pool is in host memory"
    if device.dist_backend != "nccl" or not hasattr(c10d, "ProcessGroupNCCL"):
        return f"torch has no NCCL for {device.torch_name} here"
    return ""


def _gloo(store: PrefixStore, rank: int, host: str, connect_s: float) -> ProcessGroupGloo:
    """Blocks until both ranks are there, at most twice `connect_s`: gloo tries five times."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=0.4 * connect_s)
    return ProcessGroupGloo(store, rank, 2, options)


class NcclPair:
    """Its communicator comes up with the first payload, the link's probe.

    Work waits for what the calling thread's current stream had launched before. The host asks for its end instead of
    queueing behind it: so a peer that sends nothing holds up no copy, and every wait has an end.
    """

    def __init__(self, store: PrefixStore, rank: int, connect_s: float, device: Device) -> None:
        os.environ.setdefault(NCCL_ERRORS, CLEAN_UP_ONLY)
        devices.use(device)
        group_type = c10d.ProcessGroupNCCL  # not in every build of torch
        options = group_type.Options()
        options._timeout = timedelta(seconds=connect_s)
        self._group: Any = group_type(store, rank, 2, options)
        self._num_under_way = 0
        self._is_broken = False

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> NcclWork:
        return self._begun(self._group.send, tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> NcclWork:
        return self._begun(self._group.recv, tensors, rank, tag)

    def _begun(self, call: Any, tensors: list[torch.Tensor], rank: int, tag: int) -> NcclWork:
        self._num_under_way += 1
        try:
            return NcclWork(self, call(tensors, rank, tag))
        except RuntimeError:
            self.abort()
            raise

    def ended(self) -> None:
        self._num_under_way -= 1

    def abort(self) -> None:
        """Ends what is under way at this end: nothing is written to its tensors any more."""
        if not self._is_broken:
            self._is_broken = True
            self._group.abort()

    def close(self) -> None:
        if self._num_under_way:
            self.abort()
        elif not self._is_broken:
            self._is_broken = True
            self._group.shutdown()


class NcclWork:
    def __init__(self, pair: NcclPair, work: Any) -> None:
        self._pair = pair
        self._work = work

    def wait(self, timeout: timedelta) -> None:
        """Raises RuntimeError when it has failed, or not ended in time; the pair is aborted then."""
        try:
            if not poll(self._work.is_completed, timeout.total_seconds()):
                raise RuntimeError(f"nothing came or left within {timeout.total_seconds():g} s")
            self._work.wait()  # raises what went wrong
        except RuntimeError:
            self._pair.abort()
            raise
        self._pair.ended()
