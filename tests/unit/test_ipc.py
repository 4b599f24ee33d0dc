"""D's checks before it maps P's device memory, and how its reads end."""

from __future__ import annotations

import socket
import threading
from typing import Any

import msgspec
import pytest
import torch

from pd_cluster import wire
from pd_cluster.devices import device
from pd_cluster.devices.device import CPU, Device
from pd_cluster.devices.device_kinds import DeviceKind
from pd_cluster.devices.device_streams import poll
from pd_cluster.errors import LinkError
from pd_cluster.kv.device_copy import copy_blocks
from pd_cluster.kv.kv_pool import NUM_EXTRA_BLOCKS
from pd_cluster.kv.pool_memory import paired_runs
from pd_cluster.transport import unix_server
from pd_cluster.transport.device_memory import MemoryPart
from pd_cluster.transport.in_process import LocalReceiver, offer_pool
from pd_cluster.transport.ipc import MAX_EXPORT_NBYTES, ExportServer, IpcReceiver
from pd_cluster.transport.one_sided import PoolAddress
from pd_cluster.transport.transport_table import BY_NAME, allowed
from tests.support.fake_device import FakeModule, MemfdMemory, content, put_on
from tests.support.transports import (
    CHECKSUM,
    LAYOUT,
    NUM_BLOCKS,
    WAIT_S,
    Link,
    Pair,
    blocks,
    peer_of,
    place_of,
    random_pool,
)


class Server(unix_server.UnixServer):
    """A server that sends what the test chooses."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        super().__init__(keeps=True)

    def _give(self, peer: socket.socket) -> None:
        peer.sendall(self._data)


def make_receiver(
    server: unix_server.UnixServer, num_blocks: int = NUM_BLOCKS, uuid: str = "GPU-0", kind: DeviceKind = "cuda"
) -> IpcReceiver:
    offer = PoolAddress(server.name, uuid).offer("ipc")
    target = put_on(random_pool(2), 0, kind)
    return IpcReceiver(place_of(target, memory=MemfdMemory()), peer_of(offer, num_blocks), CHECKSUM)


def exported(*changes: dict[str, Any], **change: Any) -> bytes:
    """Returns a length-prefixed message about a CUDA pool, with one part for each of `changes`."""
    nbytes = (NUM_BLOCKS + NUM_EXTRA_BLOCKS) * LAYOUT.block_nbytes // (len(changes) or 1)
    honest = {"handle": b"\x03c" + bytes(64), "nbytes": nbytes, "offset_nbytes": 0}
    parts = [honest | each for each in changes or ({name: change[name] for name in honest.keys() & change.keys()},)]
    rest = {name: value for name, value in change.items() if name not in honest}
    data = msgspec.msgpack.encode({"parts": parts, "block_nbytes": LAYOUT.block_nbytes} | rest)
    return len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (exported(nbytes=LAYOUT.block_nbytes), "bytes in blocks of"),
        (exported(block_nbytes=LAYOUT.block_nbytes // 2), "bytes in blocks of"),
        (exported(offset_nbytes=-1), "is invalid"),
        (exported(nbytes=1 << 62), "is invalid"),
        (exported(handle=b"\x03e" + bytes(64)), "handle of 66 bytes, kind b'e'"),
        (exported(handle=b"\x03c" + bytes(63)), "handle of 65 bytes"),
        ((2).to_bytes(4, "big") + b"\x91\x01", "is invalid"),
        ((MAX_EXPORT_NBYTES + 1).to_bytes(4, "big"), "in 1025 bytes"),
        (exported({}, {}), "has 2 parts, not 1"),
        (exported(parts=[]), "has 0 parts, not 1"),
    ],
)
def test_what_does_not_fit_the_layout_is_not_mapped(
    data: bytes, reason: str, gpu: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses(data, reason, "cuda", monkeypatch)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (exported(), "has 1 parts, not 2"),
        (exported({}, {}, {}), "has 3 parts, not 2"),
        (exported({}, {"nbytes": LAYOUT.block_nbytes}), "bytes in blocks of"),
        (exported({}, {"offset_nbytes": -1}), "is invalid"),
        ((2 * MAX_EXPORT_NBYTES + 1).to_bytes(4, "big"), "in 2049 bytes"),
    ],
)
def test_of_a_pool_that_lies_by_layers_every_layer_must_fit(
    data: bytes, reason: str, gpu: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses(data, reason, "npu", monkeypatch)


def refuses(data: bytes, reason: str, kind: DeviceKind, monkeypatch: pytest.MonkeyPatch) -> None:
    def mapped(*args: object) -> None:
        raise AssertionError("mapped")

    monkeypatch.setattr(MemfdMemory, "map", mapped)
    server = Server(data)
    with pytest.raises(LinkError, match=reason) as caught:
        make_receiver(server, kind=kind).open()
    assert not caught.value.retry
    server.close()


def test_the_form_of_a_handle_of_an_npu_is_its_drivers_business(
    gpu: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped: list[tuple[bytes, int, tuple[int, ...]]] = []

    def maps(
        self: object, part: MemoryPart, dtype: torch.dtype, shape: tuple[int, ...], device: Device
    ) -> torch.Tensor:
        mapped.append((part.handle, part.offset_nbytes, shape))
        return torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr(MemfdMemory, "map", maps)
    server = Server(exported({"handle": b"any", "offset_nbytes": 512}, {"handle": b"form" * 99}))
    receiver = make_receiver(server, kind="npu")
    receiver.open()
    shape = (2, NUM_BLOCKS + NUM_EXTRA_BLOCKS, LAYOUT.block_size, LAYOUT.num_kv_heads, LAYOUT.head_dim)
    assert mapped == [(b"any", 512, shape), (b"form" * 99, 0, shape)]
    receiver.close()
    server.close()


def test_a_server_that_hangs_up_is_tried_again(gpu: FakeModule) -> None:
    server = Server((9).to_bytes(4, "big") + b"half")
    closing = threading.Timer(0.05, server.close)
    closing.start()
    with pytest.raises(LinkError, match="hung up") as caught:
        make_receiver(server).open()
    assert caught.value.retry
    closing.join(WAIT_S)


def test_memory_that_cannot_be_mapped_is_a_reason_for_the_next_transport(
    gpu: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: invalid device context\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(MemfdMemory, "map", fails)
    server = ExportServer(put_on(random_pool(1)), MemfdMemory())
    with pytest.raises(LinkError, match=r"cannot be mapped: CUDA error: invalid device context$"):
        make_receiver(server).open()
    server.close()


def test_a_device_that_is_not_visible_is_named(gpu: FakeModule) -> None:
    server = ExportServer(put_on(random_pool(1)), MemfdMemory())
    with pytest.raises(LinkError, match="device GPU-7 is not visible here"):
        make_receiver(server, uuid="GPU-7").open()
    gpu.peers_can_read = False
    make_receiver(server).open()  # opens on the same device
    with pytest.raises(LinkError, match="cannot read the prefill instance's device GPU-1"):
        make_receiver(server, uuid="GPU-1").open()
    server.close()


@pytest.mark.parametrize(
    ("name", "kind", "group"),
    [("PYTORCH_ALLOC_CONF", "cuda", "nccl"), ("PYTORCH_NPU_ALLOC_CONF", "npu", "hccl")],
)
def test_a_pool_that_may_grow_is_not_offered_and_the_next_transport_serves(
    name: str,
    kind: DeviceKind,
    group: str,
    gpu: FakeModule,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(LinkError, match=f"{name}=max_split_size_mb:64.*remove expandable_segments"):
        ExportServer(put_on(random_pool(1), 0, kind), MemfdMemory())
    link = Link("auto", devices=(1, 0), kind=kind)
    assert [offer.transport for offer in link.send.offers] == ["local", group, "dist", "curve"]
    assert "KV cache is not offered over ipc" in caplog.text
    assert link.await_ready().transport == group
    link.close()
    monkeypatch.setenv(name, "expandable_segments:False")
    assert not device.expands_segments()


def test_nothing_is_read_once_the_exporter_is_dead(gpu: FakeModule) -> None:
    pair = Pair("ipc", kind="cuda")
    pair.move(blocks([1]), [2])
    assert pair.server is not None
    pair.server.close()  # as the kernel does for a dead process
    before = content(pair.target).clone()
    with pytest.raises(LinkError, match="process has ended") as caught:
        pair.move(blocks([3]), [4])
    assert caught.value.retry
    gpu.finish()
    assert torch.equal(content(pair.target), before)
    pair.close()


def test_a_server_forgets_who_has_hung_up(gpu: FakeModule) -> None:
    pool = put_on(random_pool(1))
    server = ExportServer(pool, MemfdMemory())
    for _ in range(5):
        receiver = make_receiver(server)
        receiver.open()
        receiver.close()
    last = make_receiver(server)
    last.open()
    kept = server._kept
    assert kept is not None
    assert poll(lambda: len(kept) > 0 and not unix_server.has_hung_up(kept[-1]), WAIT_S), (
        "it must not be kept after the answer"
    )
    assert len(kept) <= 2
    last.close()
    server.close()
    pool.close()


def test_pools_on_two_devices_are_not_local(gpu: FakeModule) -> None:
    offer = PoolAddress(offer_pool(source := put_on(random_pool(1), 1))).offer("local")
    receiver = LocalReceiver(place_of(put_on(random_pool(2))), peer_of(offer), CHECKSUM)
    with pytest.raises(LinkError, match="pool is on cuda:1, this one's on cuda:0"):
        receiver.open()
    assert source.device.index == 1


# ---- which transports there are


def test_each_device_has_its_transports(gpu: FakeModule) -> None:
    names: tuple[wire.TransportName, ...] = ("local", "ipc", "shm", "nccl", "hccl", "dist", "curve")
    for kind, missing in (
        (CPU, {"ipc", "nccl", "hccl"}),
        (Device("cuda"), {"shm", "hccl"}),
        (Device("npu"), {"shm", "nccl"}),
    ):
        assert {name for name in names if BY_NAME[name].why_not(kind)} == missing
    assert tuple(each.name for each in allowed("auto")) == names
    assert tuple(each.name for each in allowed("dist")) == ("nccl", "hccl", "dist")
    assert tuple(each.name for each in allowed("ipc")) == ("ipc",)


def test_a_choice_that_is_not_possible_here_is_named(gpu: FakeModule) -> None:
    with pytest.raises(LinkError, match=r"--kv-transport ipc is not possible here: ipc: .* pool is in host memory"):
        Link("ipc")
    with pytest.raises(LinkError, match=r"--kv-transport shm is not possible here: shm: .* on cuda:0, not in host"):
        Link("shm", devices=(0, 0))


def test_what_one_side_offers_and_the_other_has_not_is_named(gpu: FakeModule) -> None:
    link = Link("ipc", devices=(0, None))
    refused = link.answers.get(timeout=WAIT_S)
    assert isinstance(refused, wire.LinkRefused)
    assert (refused.reason, refused.retry) == ("ipc: this instance's pool is in host memory", False)
    link.close()


def test_hccl_needs_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_npu_problem", lambda: "torch-npu is not installed")
    assert BY_NAME["hccl"].why_not(Device("npu")) == "torch has no HCCL for npu:0 here"


# ---- copies of blocks


@pytest.mark.parametrize("nbytes", [64, 60])
@pytest.mark.parametrize("first", [0, 1])
def test_blocks_are_copied_whatever_their_order(nbytes: int, first: int) -> None:
    numbers = torch.randint(0, 255, (20, 3, nbytes), dtype=torch.uint8)
    for ids, into in (([1, 2, 3], [4, 5, 6]), ([9, 2, 7, 3, 11, 0], [0, 1, 5, 4, 3, 19]), ([5], [5])):
        target, expected = torch.zeros(2, *numbers.shape, dtype=torch.uint8)
        expected[into, first:] = numbers[ids, first:]
        copy_blocks(numbers[:, first:], target[:, first:], ids, into, paired_runs(ids, into))
        assert torch.equal(target, expected)
