"""Process groups of two ranks, P's and D's end of one link: built directly, no global world, one direction.

gloo moves host memory, NCCL and HCCL the memory of devices. All are used alike: `send` and `recv` return work whose
`wait(timeout)` returns when the host may use or reuse the bytes, or raises RuntimeError: then the pair is beyond use.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, ProcessGroupGloo, TCPStore

from pd_cluster import device as devices
from pd_cluster import device_group
from pd_cluster.device import Device
from pd_cluster.errors import LinkError, first_line
from pd_cluster.streams import poll

Backend = Literal["gloo", "nccl", "hccl"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
SENDER, RECEIVER = 0, 1
FAILED = "failed"  # in the store of a pair: one end cannot come


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


def make_group(
    backend: Backend, store: TCPStore, name: str, rank: int, host: str, connect_s: float, device: Device
) -> Any:
    """`name`: of this attempt, in P's store. Raises LinkError."""
    try:
        if backend == "gloo":
            return _gloo(PrefixStore(name, store), rank, host, connect_s)
        return DevicePair(PrefixStore(name, store), name, rank, connect_s, device)
    except RuntimeError as error:
        raise LinkError(f"the {backend} pair did not come up: {first_line(error)}", retry=True) from error


def close_group(group: Any) -> None:
    """A gloo group ends when nobody has it any more."""
    if isinstance(group, DevicePair):
        group.close()


def _gloo(store: PrefixStore, rank: int, host: str, connect_s: float) -> ProcessGroupGloo:
    """Blocks until both ranks are there, at most twice `connect_s`: gloo tries five times."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=0.4 * connect_s)
    return ProcessGroupGloo(store, rank, 2, options)


class DevicePair:
    """NCCL's or HCCL's. NCCL's communicator comes up with the first payload, the link's probe; HCCL's here.

    Work waits for what the calling thread's current stream had launched before. The host asks for its end instead of
    queueing behind it: so a peer that sends nothing holds up no copy, and every wait has an end. Sends and receives
    meet in the order in which they are called at either end; tags mean nothing.
    """

    def __init__(self, store: PrefixStore, name: str, rank: int, connect_s: float, device: Device) -> None:
        self.device = device
        self._group: Any = device_group.make_pair(store, name, rank, connect_s, device)
        self._num_under_way = 0
        self._is_broken = False
        if device.dist_backend == "hccl":
            self._meet(store, 2 * connect_s)

    def _meet(self, store: PrefixStore, timeout_s: float) -> None:
        """Waits until a number has been summed with the other end. Raises RuntimeError.

        HCCL waits for it two minutes at the least (HCCL_CONNECT_TIMEOUT), whoever asks: so a thread does that can be
        left behind, which then ends by itself. An end that fails says so: the other is free for the next transport.
        """
        called: Future[Any] = Future()

        def call() -> None:
            try:
                devices.use(self.device)
                called.set_result(self._group.allreduce([_number_on(self.device)], AllreduceOptions()))
            except BaseException as error:
                called.set_exception(error)
                with contextlib.suppress(RuntimeError):  # nobody hears it any more
                    store.set(FAILED, "")

        threading.Thread(target=call, name="hccl-meet", daemon=True).start()
        if not poll(lambda: called.done() or store.check([FAILED]), timeout_s) or not called.done():
            self._is_broken = True  # it cannot be aborted while it is being made
            raise RuntimeError(f"the other end failed, or did not come within {timeout_s:g} s")
        self._num_under_way += 1
        DeviceWork(self, called.result()).wait(timedelta(seconds=timeout_s))

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> DeviceWork:
        return self._begun(self._group.send, tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> DeviceWork:
        return self._begun(self._group.recv, tensors, rank, tag)

    def _begun(self, call: Any, tensors: list[torch.Tensor], rank: int, tag: int) -> DeviceWork:
        self._num_under_way += 1
        try:
            return DeviceWork(self, call(tensors, rank, tag))
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


def _number_on(device: Device) -> torch.Tensor:
    return torch.zeros(1, device=device.torch_name)


class DeviceWork:
    def __init__(self, pair: DevicePair, work: Any) -> None:
        self._pair = pair
        self._work = work

    def wait(self, timeout: timedelta) -> None:
        """Raises RuntimeError when it has failed, or not ended in time; the pair is aborted then."""
        try:
            if not poll(self._work.is_completed, timeout.total_seconds()):
                raise RuntimeError(f"nothing came or left within {timeout.total_seconds():g} s")
            device_group.finish(self._work, self._pair.device)
        except RuntimeError:
            self._pair.abort()
            raise
        self._pair.ended()
