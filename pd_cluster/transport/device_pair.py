"""Pairs: process groups of two ranks, P's and D's end of one link.

There is no global group, and P only sends. gloo and CURVE (curve_pair.py) move host memory; NCCL and HCCL move device
memory. All have the same interface: `send` and `recv` return work, whose `wait(timeout)` returns when the host may use
or reuse the bytes. If it raises RuntimeError, the pair is unusable.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, ProcessGroupGloo

from pd_cluster.devices import device as devices
from pd_cluster.devices import process_groups as device_group
from pd_cluster.devices.device import Device
from pd_cluster.devices.device_streams import poll
from pd_cluster.errors import LinkError, first_line
from pd_cluster.transport.curve_pair import CurveReceiver, CurveSender
from pd_cluster.transport.meeting import Meeting

Backend = Literal["gloo", "curve", "nccl", "hccl"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
SENDER, RECEIVER = 0, 1
IN_HOST_MEMORY: tuple[Backend, ...] = ("gloo", "curve")
FAILED = "failed"  # a key in the meeting's store, set by an end that has failed


class PairEndpoint(NamedTuple):
    """The address of one end of a pair, and how long it waits for the other end."""

    host: str
    connect_s: float
    device: Device


def make_group(backend: Backend, meeting: Meeting, name: str, rank: int, place: PairEndpoint) -> Any:
    """Creates a pair. `name` must be unique to this attempt and equal at both ends. Raises LinkError."""
    host, connect_s, device = place
    try:
        if backend == "gloo":
            with meeting.held():
                return _gloo(PrefixStore(name, meeting.store), rank, host, connect_s)
        if backend == "curve":
            with meeting.held():
                store = PrefixStore(name, meeting.store)
                return CurveSender(store, connect_s) if rank == SENDER else CurveReceiver(store, host, connect_s)
        return DevicePair(meeting, name, rank, connect_s, device)
    except RuntimeError as error:
        raise LinkError(f"the {backend} pair did not come up: {first_line(error)}", retry=True) from error


def close_group(group: Any) -> None:
    """Closes a pair. A gloo group closes only when its last reference is dropped."""
    if isinstance(group, (DevicePair, CurveSender, CurveReceiver)):
        group.close()


def _gloo(store: PrefixStore, rank: int, host: str, connect_s: float) -> ProcessGroupGloo:
    """Blocks until both ranks are connected, at most twice `connect_s`, because gloo tries five times."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=0.4 * connect_s)
    return ProcessGroupGloo(store, rank, 2, options)


class DevicePair:
    """A pair over NCCL or HCCL.

    NCCL creates its communicator with the first payload (the probe); for HCCL, this class does. Work waits for earlier
    launches on the calling thread's current stream. The host polls for the end of work, and queues nothing behind it,
    so a peer that sends nothing delays no copy, and every wait has a timeout. Sends and receives match in the order in
    which each end calls them; tags have no effect.
    """

    def __init__(self, meeting: Meeting, name: str, rank: int, connect_s: float, device: Device) -> None:
        self.device = device
        self._meeting = meeting
        self._has_met = False  # the communicator exists, or the call that creates it has returned
        store = PrefixStore(name, meeting.store)
        self._under_way: list[DeviceWork] = []
        self._is_broken = False
        _release_quarantined()
        with meeting.held():
            self._group: Any = device_group.make_pair(store, name, rank, connect_s, device)
            if device.dist_backend == "hccl":
                self._meet(store, 2 * connect_s)
                self._has_met = True

    def _meet(self, store: PrefixStore, timeout_s: float) -> None:
        """Sums a number with the other end, and waits for the result. Raises RuntimeError.

        HCCL waits at least two minutes (HCCL_CONNECT_TIMEOUT), even if the caller's timeout is shorter. So the call
        runs on a thread that can be abandoned and ends by itself. An end that fails reports that, so that the other end
        can try the next transport.
        """
        called: Future[DeviceWork] = Future()

        def call() -> None:
            try:
                devices.use(self.device)
                number = [_number_on(self.device)]
                called.set_result(self._begin(self._group.allreduce(number, AllreduceOptions()), number))
            except BaseException as error:
                called.set_exception(error)

        threading.Thread(target=call, name="hccl-meet", daemon=True).start()
        if not poll(lambda: called.done() or store.check([FAILED]), timeout_s) or not called.done():
            self._is_broken = True  # a communicator cannot be aborted while it is being created
            raise RuntimeError(f"the other end failed, or did not connect within {timeout_s:g} s")
        if called.exception() is not None:
            store.set(FAILED, "")
        called.result().wait(timedelta(seconds=timeout_s))

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> DeviceWork:
        return self._call(self._group.send, tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> DeviceWork:
        return self._call(self._group.recv, tensors, rank, tag)

    def _call(self, call: Any, tensors: list[torch.Tensor], rank: int, tag: int) -> DeviceWork:
        try:
            if self._has_met:
                return self._begin(call(tensors, rank, tag), tensors)
            with self._meeting.held():
                work = call(tensors, rank, tag)
            self._has_met = True
            return self._begin(work, tensors)
        except RuntimeError as error:
            self.abort(first_line(error))
            raise

    def _begin(self, work: Any, tensors: list[torch.Tensor]) -> DeviceWork:
        begun = DeviceWork(self, work, tensors)
        self._under_way.append(begun)
        return begun

    def ended(self, work: DeviceWork) -> None:
        self._under_way.remove(work)

    def abort(self, reason: str) -> None:
        """Aborts the work under way at this end. Keeps the work's tensors until the device has finished with them."""
        if not self._is_broken:
            self._is_broken = True
            _release_quarantined()
            with _quarantine_lock:
                _quarantine.extend((each.work, each.tensors) for each in self._under_way)
            device_group.abort(self._group, self.device, reason)

    def close(self) -> None:
        if self._under_way:
            self.abort("the link is closed")
        elif not self._is_broken:
            self._is_broken = True
            self._group.shutdown()


def _number_on(device: Device) -> torch.Tensor:
    return torch.zeros(1, device=device.torch_name)


class DeviceWork:
    """The transfer of one payload over a pair. Keeps the tensors that a device may use until the transfer ends."""

    def __init__(self, pair: DevicePair, work: Any, tensors: list[torch.Tensor]) -> None:
        self._pair = pair
        self.work = work
        self.tensors = tensors

    def wait(self, timeout: timedelta) -> None:
        """Waits for the transfer. If it fails or times out, aborts the pair and raises RuntimeError."""
        try:
            if not poll(self.work.is_completed, timeout.total_seconds()):
                raise RuntimeError(f"no payload was transferred within {timeout.total_seconds():g} s")
            device_group.finish(self.work, self._pair.device)
        except RuntimeError as error:
            self._pair.abort(first_line(error))
            raise
        self._pair.ended(self)


# Work of aborted pairs that a device may still execute, with its staging buffers, which are kept until it has ended.
_quarantine: list[tuple[Any, list[torch.Tensor]]] = []
_quarantine_lock = threading.Lock()  # every link has its own thread


def _release_quarantined() -> None:
    with _quarantine_lock:
        _quarantine[:] = [(work, tensors) for work, tensors in _quarantine if not work.is_completed()]
