"""Transports move exactly the named pieces, detect damage, are probed before use, and end with their peer."""

from __future__ import annotations

import dataclasses
import os
import random
import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from pd_cluster import wire
from pd_cluster.errors import LinkError, TransferFailed
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.transport.dist import DistSender
from pd_cluster.transport.one_sided import PoolAddress
from pd_cluster.transport.shm import PoolServer, ShmReceiver
from pd_cluster.transport.transport_interface import Checksum
from pd_cluster.transport.transport_table import TABLE
from tests.support.fake_device import FakeModule, content, install
from tests.support.nixl import needs_nixl
from tests.support.transports import CHECKSUM, LAYOUT, NUM_BLOCKS, WAIT_S, Pair, blocks, peer_of, place_of, random_pool

NAMES: tuple[wire.TransportName, ...] = tuple(each.name for each in TABLE if "cpu" in each.pools and not each.package)
CHECKED = (*NAMES, "cuda dist", "npu dist")
READING = ("local", "shm", "cuda local", "cuda ipc", "npu local", "npu ipc")
# The latter on fake devices: tests/support/fake_device.py.
WAYS = (*CHECKED, "cuda local", "cuda ipc", "cuda nccl", "npu local", "npu ipc", "npu hccl")
# Starting an agent takes a second.
WITH_NIXL = (*WAYS, pytest.param("nixl", marks=[pytest.mark.slow, needs_nixl]))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    """Installs two devices of one kind that compute only when waited for."""
    return install(monkeypatch)


def make_pair(way: str, request: pytest.FixtureRequest, source: KVLayout = LAYOUT, into: KVLayout = LAYOUT) -> Pair:
    kind, _, name = way.rpartition(" ")
    if kind:
        request.getfixturevalue("gpu")
    return Pair(name, source, kind=kind or "cpu", into=into)  # type: ignore[arg-type]


@pytest.fixture(params=WITH_NIXL)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = make_pair(request.param, request)
    yield made
    made.close()


@pytest.fixture(params=CHECKED)
def checked_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Yields a pair whose payloads have checksums."""
    made = make_pair(request.param, request)
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(3))
def test_named_blocks_move_and_no_others(pair: Pair, seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randrange(1, NUM_BLOCKS)
    source, into = rng.sample(range(NUM_BLOCKS), count), rng.sample(range(NUM_BLOCKS), count)
    first, stop = [(0, 2), (0, 1), (1, 2)][seed]
    expected = content(pair.target).clone()
    expected[into, first:stop] = content(pair.source)[source, first:stop]
    pair.move(blocks(source, first, stop - first), into)
    assert torch.equal(content(pair.target), expected)


@pytest.mark.parametrize("way", WITH_NIXL)
@pytest.mark.parametrize("change", [{"block_size": 8}, {"dtype": "bfloat16"}])
def test_pools_may_differ(way: str, change: dict[str, object], request: pytest.FixtureRequest) -> None:
    pair = make_pair(way, request, dataclasses.replace(LAYOUT, **change))  # type: ignore[arg-type]
    size = pair.source.layout.block_size
    pair.move(wire.KVPiece(4, 8, 0, 2, [3, 7]), [1, 5])
    for position in range(4, 12):
        at = position - 4 // size * size
        sent = content(pair.source)[[3, 7][at // size], :, :, at % size]
        found = content(pair.target)[[1, 5][(position - 4) // 4], :, :, position % 4]
        assert torch.equal(found, sent.float())
    pair.close()


def test_several_payloads_under_way_arrive_in_order(pair: Pair) -> None:
    """Payloads are announced ahead of their turn; the receiver accepts them as it has buffers."""
    pieces = [blocks([at]) for at in range(8)]
    prepared = [pair.sender.prepare(piece) for piece in pieces]

    def send() -> None:
        for at, each in enumerate(prepared):
            pair.sender.send(at, each)

    sending = threading.Thread(target=send)
    sending.start()
    chunks = [wire.KVChunk("t", 0, p, e.nbytes, e.checksum) for p, e in zip(pieces, prepared, strict=True)]
    for at, chunk in enumerate(chunks):
        pair.receiver.expect(at, chunk)
    for at, chunk in enumerate(chunks):
        pair.receiver.receive(at, chunk, [7 - at])
    pair.receiver.copies.settle()
    sending.join(WAIT_S)
    assert torch.equal(content(pair.target)[:8], content(pair.source)[:8].flip(0))


def test_a_wrong_checksum_is_noticed_and_the_link_lives(checked_pair: Pair) -> None:
    pair = checked_pair
    with pytest.raises(TransferFailed, match="checksum"):
        pair.move(blocks([1, 2]), [3, 4], damage=1)
    pair.move(blocks([1, 2]), [3, 4])
    assert torch.equal(content(pair.target)[[3, 4]], content(pair.source)[[1, 2]])


@pytest.mark.parametrize("name", NAMES)
def test_without_checksums_nothing_is_computed(name: wire.TransportName) -> None:
    pair = Pair(name, checksum=Checksum(is_on=False))
    assert pair.sender.prepare(blocks([1, 2])).checksum == 0
    pair.move(blocks([1, 2]), [3, 4])
    assert torch.equal(content(pair.target)[[3, 4]], content(pair.source)[[1, 2]])
    pair.close()


def test_an_unwanted_payload_is_taken_off_and_dropped(pair: Pair) -> None:
    before = content(pair.target).clone()
    pair.move(blocks([1, 2]), None)
    assert torch.equal(content(pair.target), before)
    pair.move(blocks([5]), [6])
    assert torch.equal(content(pair.target)[6], content(pair.source)[5])


@pytest.mark.parametrize("way", READING)
def test_blocks_and_lengths_that_the_pool_has_not_are_refused(way: str, request: pytest.FixtureRequest) -> None:
    pair = make_pair(way, request)
    for block in (-1, NUM_BLOCKS, NUM_BLOCKS + 2):
        with pytest.raises(TransferFailed, match="outside"):
            pair.receiver.receive(0, wire.KVChunk("t", 0, blocks([block]), LAYOUT.block_nbytes, 0), [0])
    with pytest.raises(TransferFailed, match="announces"):
        pair.move(blocks([1]), [1], nbytes=LAYOUT.block_nbytes + 1)
    pair.close()


@pytest.mark.parametrize("nbytes", [-1, 1 << 40])
@pytest.mark.parametrize("way", ["dist", "cuda dist", "cuda nccl", "npu hccl"])
def test_dist_refuses_a_length_that_no_payload_has(way: str, nbytes: int, request: pytest.FixtureRequest) -> None:
    pair = make_pair(way, request)
    with pytest.raises(LinkError, match="announces"):
        pair.receiver.receive(0, wire.KVChunk("t", 0, blocks([1]), nbytes, 0), [1])
    pair.close()


def test_shm_is_read_only_for_the_peer() -> None:
    """A decode process cannot write to a prefill process's pool by any use of its mapping."""
    server = PoolServer(random_pool(1))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(WAIT_S)
        peer.connect(f"\0{server.name}")
        _, (fd,), _, _ = socket.recv_fds(peer, 2, 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    os.close(fd)
    server.close()


def test_shm_is_gone_with_its_server_and_refuses_a_pool_of_another_size() -> None:
    server = PoolServer(random_pool(1))
    offer = PoolAddress(server.name).offer("shm")
    with pytest.raises(LinkError, match="bytes"):
        ShmReceiver(place_of(random_pool(2)), peer_of(offer, NUM_BLOCKS + 1), CHECKSUM).open()
    server.close()
    with pytest.raises(LinkError, match="cannot be reached"):
        ShmReceiver(place_of(random_pool(2)), peer_of(offer), CHECKSUM).open()


def test_dist_gives_up_when_nobody_joins_and_ends_with_its_peer() -> None:
    sender = DistSender(place_of(random_pool(1), 0.3, 0.3), CHECKSUM, lambda key, value: None)
    with pytest.raises(LinkError) as caught:
        sender.open(LAYOUT)
    assert caught.value.retry
    pair = Pair("dist")
    pair.sender.close()
    with pytest.raises(LinkError):
        pair.receiver.receive(0, wire.KVChunk("t", 0, blocks([1]), LAYOUT.block_nbytes, 0), [1])


def test_a_piece_is_sent_from_the_pool_itself_where_it_is_contiguous() -> None:
    pool = random_pool(5)
    for ids, first_layer, num_layers, is_in_place in (
        ([3, 4, 5], 0, 2, True),
        ([3, 5], 0, 2, False),
        ([4, 3], 0, 2, False),
        ([3, 4], 1, 1, False),
        ([3], 1, 1, True),
    ):
        piece = wire.KVPiece(0, 4 * len(ids), first_layer, num_layers, ids)
        view = pool.memory.view_of(piece)
        assert (view is not None) == is_in_place
        if view is not None:
            assert torch.equal(view, pool.memory.gather(piece))
            assert view.untyped_storage().data_ptr() == pool.memory.parts[0].untyped_storage().data_ptr()
