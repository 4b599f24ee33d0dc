"""Pools on a fake device that computes only when waited for, so that a missing wait in the handover fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import pytest
import torch

from pd_cluster import wire
from pd_cluster.devices.device import CPU
from pd_cluster.devices.device_kinds import DeviceKind
from pd_cluster.devices.device_streams import REACHED, Marker
from pd_cluster.errors import LinkError
from pd_cluster.transport.link_copies import Copies
from pd_cluster.transport.link_events import Drained, Landed, LinkFailed
from pd_cluster.transport.one_sided import OneSidedReceiver
from tests.support.fake_device import FakeGroup, FakeModule, content, fill, install
from tests.support.transports import LAYOUT, TOKEN, WAIT_S, Link, Pair, blocks

P_WROTE, D_WROTE = 3.0, 5.0


class Way(NamedTuple):
    """The requested transport, P's and D's devices, and the transport that must be chosen."""

    asked: str
    devices: tuple[int | None, int | None]
    chosen: str
    kind: DeviceKind

    def __str__(self) -> str:
        return f"{self.chosen} {self.kind} {self.devices}"


def ways(kind: DeviceKind, group: str) -> list[Way]:
    return [
        Way("auto", (0, 0), "local", kind),
        Way("ipc", (0, 0), "ipc", kind),
        Way("ipc", (1, 0), "ipc", kind),
        Way("dist", (1, 0), group, kind),
        Way("dist", (0, 0), "dist", kind),
        Way("dist", (0, None), "dist", kind),
        Way("dist", (None, 0), "dist", kind),
    ]


CUDA, NPU = ways("cuda", "nccl"), ways("npu", "hccl")
IPC, NCCL, GLOO, HCCL = CUDA[2], CUDA[3], CUDA[4], NPU[3]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModule]:
    yield install(monkeypatch)
    for group in FakeGroup.made:
        group.aborted.set()


def open_link(way: Way) -> Link:
    link = Link(way.asked, devices=way.devices, kind=way.kind)
    assert link.await_ready().transport == way.chosen
    return link


@pytest.mark.parametrize("way", CUDA + NPU, ids=str)
def test_a_transfer_lands_whole_between_work_of_both_engines(way: Way, gpu: FakeModule) -> None:
    link = open_link(way)
    if way.devices[0] is not None:
        written_late(link, gpu)
    if way.devices[1] is not None:
        used_late(link, gpu)
    link.close()


# ---- hazards: what must hold although the device computes late


def written_late(link: Link, gpu: FakeModule) -> None:
    """P ships layers whose kernels are launched but have not run yet."""
    link.receive.begin("written late", [7, 8, 9], 0, 12)
    for layer in range(2):
        part = slice(layer, layer + 1)
        gpu.launch(link.source.device.index, lambda of=part: fill(link.source, slice(1, 4), P_WROTE, of))  # type: ignore[misc]
        link.send.ship("written late", layer, blocks([1, 2, 3], layer, 1))
    link.send.ship_end(wire.KVEnd("written late", 2, 12, [TOKEN]))
    assert isinstance(link.events.get(timeout=WAIT_S), Landed)
    assert torch.all(content(link.target)[[7, 8, 9]] == P_WROTE)


def used_late(link: Link, gpu: FakeModule) -> None:
    """D's landing blocks belonged to another request, whose last kernels have not run yet."""
    gpu.launch(link.target.device.index, lambda: fill(link.target, slice(4, 6), D_WROTE))
    link.transfer([1, 2], [4, 5], "used late")
    assert isinstance(link.events.get(timeout=WAIT_S), Landed)
    gpu.finish()
    assert torch.equal(content(link.target)[[4, 5]], content(link.source)[[1, 2]])


def told_late(link: Link, gpu: FakeModule) -> None:
    """D computes with the blocks, and P reuses its own, as soon as the landing is reported."""
    link.transfer([1, 2, 3], [7, 8, 9], "told late")
    assert isinstance(link.events.get(timeout=WAIT_S), Landed)
    before = content(link.source)[[1, 2, 3]]
    assert torch.equal(content(link.target)[[7, 8, 9]], before)
    fill(link.source, slice(1, 4), P_WROTE)
    gpu.finish()
    assert torch.equal(content(link.target)[[7, 8, 9]], before)


def drained_late(link: Link, gpu: FakeModule) -> None:
    """D reuses landing blocks as soon as the drain is acknowledged."""
    link.receive.begin("drained late", [7, 8], 0, 8)
    link.send.ship("drained late", 0, blocks([1, 2]))
    link.send.ship_end(wire.KVEnd("other", 0, 0, [TOKEN]))  # sent after the chunk, so it arrives later
    await_received(link, 2 * LAYOUT.block_nbytes)
    link.receive.forget("drained late")
    assert link.events.get(timeout=WAIT_S) == Drained("drained late")
    fill(link.target, slice(7, 9), D_WROTE)
    gpu.finish()
    assert torch.all(content(link.target)[[7, 8]] == D_WROTE)


def filled_again_late(link: Link, gpu: FakeModule) -> None:
    """Sends more payloads than there are staging buffers, each with different content."""
    for at in range(12):
        fill(link.source, slice(at, at + 1), at + 1)
    link.receive.begin("filled", list(range(12)), 0, 48)
    for at in range(12):
        link.send.ship("filled", at, wire.KVPiece(4 * at, 4, 0, 2, [at]))
    link.send.ship_end(wire.KVEnd("filled", 12, 48, [TOKEN]))
    assert isinstance(link.events.get(timeout=WAIT_S), Landed)
    assert [float(content(link.target)[at].mean()) for at in range(12)] == [float(at + 1) for at in range(12)]


def await_received(link: Link, nbytes: int) -> None:
    """Waits until the link's thread has received `nbytes`."""
    for _ in range(1000):
        link.receive.forget("nobody")
        assert link.events.get(timeout=WAIT_S) == Drained("nobody")
        if link.receive.received_nbytes >= nbytes:
            return
    raise AssertionError(f"{link.receive.received_nbytes} of {nbytes} bytes arrived")


Hazard = Callable[[Link, FakeModule], None]
HAZARDS: list[Hazard] = [written_late, used_late, told_late, drained_late, filled_again_late]


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard.__name__)
@pytest.mark.parametrize("way", [IPC, NCCL, GLOO, HCCL], ids=str)
def test_what_the_device_does_late_harms_nothing(way: Way, hazard: Hazard, gpu: FakeModule) -> None:
    link = open_link(way)
    hazard(link, gpu)
    link.close()


def test_a_link_lets_go_of_memory_only_when_nothing_reads_it(gpu: FakeModule) -> None:
    pair = Pair("ipc", kind="cuda")
    prepared = pair.sender.prepare(blocks([1]))
    pair.receiver.receive(0, wire.KVChunk("t", 0, blocks([1]), prepared.nbytes, 0), [2])
    assert gpu.num_open
    pair.receiver.close()
    assert not gpu.num_open
    assert torch.equal(content(pair.target)[2], content(pair.source)[1])
    pair.close()


# ---- a device that hangs


class Never(Marker):
    """Behaves like an event of a hung device; its query raises `error`, if set."""

    def __init__(self, error: str = "") -> None:
        super().__init__(None)
        self._error = error

    def wait(self, timeout_s: float | None = None) -> bool:
        if self._error:
            raise RuntimeError(self._error)
        assert timeout_s is not None, "each wait must have a limit"
        return False


@pytest.mark.parametrize(
    ("marker", "reason"),
    [
        (Never(), "the device has not copied KV cache within 30 s"),
        (Never("CUDA error: an illegal memory access\nmore"), "failed: CUDA error: an illegal memory access"),
    ],
)
def test_copies_that_do_not_end_end_the_link(
    marker: Marker, reason: str, gpu: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = open_link(IPC)
    receiver = link.receive._receiver
    assert isinstance(receiver, OneSidedReceiver)
    monkeypatch.setattr(receiver.copies, "launch", Copies(CPU).launch)
    receiver.copies._last = marker
    link.transfer([1, 2], [7, 8])
    failed = link.events.get(timeout=WAIT_S)
    assert isinstance(failed, LinkFailed)
    assert failed.reason.endswith(reason)
    receiver.copies._last = REACHED
    link.close()


def test_a_device_that_is_beyond_use_writes_nothing_and_so_is_drained() -> None:
    copies = Copies(CPU)
    copies._last = Never("CUDA error: device-side assert")
    copies.drain()
    with pytest.raises(LinkError, match="device-side assert"):
        copies.settle()


def test_payloads_of_a_device_are_large_and_have_no_checksum(gpu: FakeModule) -> None:
    for name, kind in product(("local", "ipc", "group"), ("cuda", "npu")):
        pair = Pair({"cuda": "nccl", "npu": "hccl"}[kind] if name == "group" else name, kind=kind)  # type: ignore[arg-type]
        assert pair.sender.prepare(blocks([1])).checksum == 0
        assert pair.sender.max_payload_nbytes >= 32 << 20
        pair.close()
    pair = Pair("dist", kind="cuda")  # through host memory, which is cheap
    assert pair.sender.prepare(blocks([1])).checksum != 0
    pair.close()
