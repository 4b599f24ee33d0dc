"""States of hybrids on devices: their lanes over every transport, what devices do late, and swaps.

A device is the one of tests/support/fake_device.py, which does nothing before it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from pd_cluster import wire
from pd_cluster.devices.device_kinds import DeviceKind
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values, lanes
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.swap_space import SwapSpace
from pd_cluster.transport.link_events import Drained, Landed
from pd_cluster.wire import KVPiece, Plane
from tests.support.fake_device import FakeGroup, FakeModule, fill, install, put_on
from tests.support.transports import NUM_BLOCKS, TOKEN, WAIT_S, Link, Pair, random_pool

# A gated delta rule of 4 value heads and 2 key heads.
PLANES = (Plane("state", 12), Plane("conv_q", 9, 2), Plane("conv_k", 9, 2), Plane("conv_v", 15))
STATES = KVLayout(3, 4, PLANES, 1, "float32", rule="state", layers=(0, 1, 3))
KEYS = KVLayout(1, 2, keys_and_values(8), 4, "float32", layers=(2,))
WAYS: dict[str, tuple[Any, tuple[DeviceKind, DeviceKind]]] = {
    "GPUs of one process": ("local", ("cuda", "cuda")),
    "GPUs of one host": ("ipc", ("cuda", "cuda")),
    "GPUs over NCCL": ("nccl", ("cuda", "cuda")),
    "GPUs over gloo": ("dist", ("cuda", "cuda")),
    "NPUs of one process": ("local", ("npu", "npu")),
    "NPUs of one host": ("ipc", ("npu", "npu")),
    "NPUs over HCCL": ("hccl", ("npu", "npu")),
    "a GPU and a CPU": ("dist", ("cuda", "cpu")),
    "a CPU and an NPU": ("dist", ("cpu", "npu")),
    "a GPU and an NPU": ("curve", ("cuda", "npu")),
}
P_WROTE, D_WROTE = 3.0, 5.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModule]:
    yield install(monkeypatch)
    for group in FakeGroup.made:
        group.aborted.set()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (1, 2), (4, 2)], ids=str)
def test_a_state_travels_over_every_transport(way: str, sizes: tuple[int, int], gpu: FakeModule) -> None:
    """It goes layer by layer, like large states, from each rank to all that want its heads; no other block changes."""
    name, kinds = WAYS[way]
    source, target = (replace(STATES, tp_size=size) for size in sizes)
    own = lanes(source, target)
    found = set[tuple[int, str, int, int]]()  # rank, plane, layer, head
    for lane in own:
        of, into = source.of_rank(lane.source_rank), target.of_rank(lane.target_rank)
        pair = Pair(name, of, into=into, kinds=kinds)
        for layer in range(3):
            for at, plane in enumerate(pair.source.memory.planes(layer)):
                first, _ = of.head_range_of(PLANES[at])
                for head in range(plane.shape[2]):
                    plane[5, 0, head] = numbers(layer, at, first + head)
        others = [each for each in range(NUM_BLOCKS) if each != 2]
        before = [pair.target.block(each) for each in others]
        for layer in range(3):
            pair.move(KVPiece(0, 1, layer, 1, [5]), [2])
        gpu.finish()
        assert all(torch.equal(pair.target.block(at), kept) for at, kept in zip(others, before, strict=True))
        for layer in range(3):
            for at, plane in enumerate(pair.target.memory.planes(layer)):
                first, stop = into.head_range_of(PLANES[at])
                for head in range(first, stop):
                    if torch.equal(plane[2, 0, head - first], numbers(layer, at, head)):
                        found.add((lane.target_rank, PLANES[at].name, layer, head))
        pair.close()
    assert found == {
        (rank, plane.name, layer, head)
        for rank in range(sizes[1])
        for plane in PLANES
        for layer in range(3)
        for head in range(*target.of_rank(rank).head_range_of(plane))
    }


def numbers(layer: int, at: int, head: int) -> torch.Tensor:
    return torch.arange(PLANES[at].width) + 1000.0 * (100 * layer + 10 * at + head + 1)


# ---- what the device does late


LINKS: dict[str, tuple[str, tuple[int | None, int | None], DeviceKind, str]] = {
    "ipc": ("ipc", (1, 0), "cuda", "ipc"),
    "nccl": ("dist", (1, 0), "cuda", "nccl"),
    "gloo": ("dist", (0, 0), "cuda", "dist"),
    "from a GPU to a CPU": ("dist", (0, None), "cuda", "dist"),
    "hccl": ("dist", (1, 0), "npu", "hccl"),
}


def open_link(name: str) -> Link:
    """Opens the lane of states, beside the pools of keys and values."""
    asked, devices, kind, chosen = LINKS[name]
    keys = random_pool(5, KEYS), random_pool(6, KEYS)
    for pool, index in zip(keys, devices, strict=True):
        if index is not None:
            put_on(pool, index, kind)
    states = random_pool(3, STATES), random_pool(4, STATES)
    link = Link(asked, devices=devices, kind=kind, pools=states, before=keys)
    assert link.await_ready().transport == chosen
    return link


def transfer(link: Link, name: str, source: int, into: int) -> None:
    link.receive.begin(name, [into], 0, 1)
    for layer in range(3):
        link.send.ship(name, layer, KVPiece(0, 1, layer, 1, [source]))
    link.send.ship_end(wire.KVEnd(name, 3, 1, [TOKEN]))


def written_late(link: Link, gpu: FakeModule) -> None:
    """The last chunk's kernels are launched, but have not run, when the state is sent."""
    for layer in range(3):
        launch(link.source, gpu, lambda of=slice(layer, layer + 1): fill(link.source, slice(5, 6), P_WROTE, of))  # type: ignore[misc]
    transfer(link, "written late", 5, 2)
    assert isinstance(link.events.get(timeout=WAIT_S), Landed)
    gpu.finish()
    assert torch.all(link.target.block(2) == P_WROTE)


def cleared_late(link: Link, gpu: FakeModule) -> None:
    """Another sequence wrote to the landing's block, which was then cleared; neither kernel has run yet."""
    launch(link.target, gpu, lambda: fill(link.target, slice(2, 3), D_WROTE))
    launch(link.target, gpu, lambda: fill(link.target, slice(2, 3), 0.0))
    sent = link.source.block(5)
    transfer(link, "cleared late", 5, 2)
    assert isinstance(link.events.get(timeout=WAIT_S), Landed)
    gpu.finish()
    assert torch.equal(link.target.block(2), sent)


def advanced_at_once(link: Link, gpu: FakeModule) -> None:
    """P gives the block to another sequence, and D computes with its own, as soon as the landing is reported."""
    sent = link.source.block(5)
    transfer(link, "advanced", 5, 2)
    assert isinstance(link.events.get(timeout=WAIT_S), Landed)
    assert torch.equal(link.target.block(2), sent)
    fill(link.source, slice(5, 6), P_WROTE)
    fill(link.target, slice(2, 3), D_WROTE)
    gpu.finish()
    assert torch.all(link.target.block(2) == D_WROTE)


def drained_late(link: Link, gpu: FakeModule) -> None:
    """D gives the block away as soon as the drain is acknowledged."""
    link.receive.begin("drained", [2], 0, 1)
    link.send.ship("drained", 0, KVPiece(0, 1, 0, 3, [5]))
    link.receive.forget("drained")
    while link.events.get(timeout=WAIT_S) != Drained("drained"):
        pass
    fill(link.target, slice(2, 3), D_WROTE)
    gpu.finish()
    assert torch.all(link.target.block(2) == D_WROTE)


def launch(pool: KVPool, gpu: FakeModule, job: Callable[[], None]) -> None:
    """Launches a kernel on the pool's device; on a CPU it is done at once."""
    if pool.device.is_accelerator:
        gpu.launch(pool.device.index, job)
    else:
        job()


@pytest.mark.parametrize("hazard", [written_late, cleared_late, advanced_at_once, drained_late])
@pytest.mark.parametrize("name", LINKS)
def test_what_the_device_does_late_harms_no_state(
    name: str, hazard: Callable[[Link, FakeModule], None], gpu: FakeModule
) -> None:
    link = open_link(name)
    keys = [pool.block(1) for pool in link.others]
    hazard(link, gpu)
    link.close()
    assert all(torch.equal(pool.block(1), before) for pool, before in zip(link.others, keys, strict=True))


# ---- swaps


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_a_state_swaps_out_and_in_in_the_order_of_launches(kind: DeviceKind, gpu: FakeModule) -> None:
    """Its last kernel, the copy to the host, the next owner's clearing and kernel, and the copy back are all late."""
    pool = random_pool(7, STATES)
    swap = SwapSpace(pool, 2)
    put_on(pool, 0, kind)
    other = pool.block(1)
    gpu.launch(0, lambda: fill(pool, slice(3, 4), P_WROTE))
    with gpu.stream(gpu.compute[0]):
        swap.move([("out", 3, 1), ("clear", 3, 3)])
    assert gpu.num_open
    gpu.launch(0, lambda: add(pool, 3, D_WROTE))
    with gpu.stream(gpu.compute[0]):
        swap.move([("copy", 3, 4), ("in", 1, 6)])
    gpu.finish()
    assert [float(pool.block(at).unique()) for at in (3, 4, 6)] == [D_WROTE, D_WROTE, P_WROTE]
    assert torch.equal(pool.block(1), other)


def add(pool: KVPool, block: int, value: float) -> None:
    for layer in range(pool.layout.num_layers):
        for plane in pool.memory.planes(layer):
            plane[block] += value
