"""Links are probed before use, fall back to the next transport, detect damage, and end with a reason."""

from __future__ import annotations

import dataclasses
import queue
from typing import TypeVar

import pytest
import torch

from pd_cluster import wire
from pd_cluster.errors import LinkError, called
from pd_cluster.numerics import Numerics
from pd_cluster.transport.in_process import LocalReceiver
from pd_cluster.transport.link_events import Drained, Landed, LandFault, LinkFailed
from pd_cluster.transport.link_factory import Transports
from pd_cluster.transport.link_frames import LinkKey, Opener, Sealer
from pd_cluster.transport.one_sided import OneSidedSender, PoolAddress
from pd_cluster.transport.receive_thread import AllowedTransports, Probe, ReceiveThread
from pd_cluster.transport.send_thread import SendThread
from pd_cluster.transport.transport_interface import LaneContext, Prepared
from tests.support.transports import (
    CHECKSUM,
    KEY,
    LAYOUT,
    NUM_BLOCKS,
    TOKEN,
    WAIT_S,
    Link,
    make_config,
    peer_of,
    place_of,
    random_pool,
)

Event = TypeVar("Event", Landed, LinkFailed)


def test_no_transport_in_common_is_refused_with_both_sides_names() -> None:
    layout = LAYOUT.to_info()
    offers = [wire.TransportOffer(transport=name, data=b"") for name in ("nccl", "dist")]
    lane = wire.LaneOffer(offers=offers, probe_seed=1)
    opened = wire.LinkOpen("link", "m", Numerics(), [layout], [NUM_BLOCKS], wire.KVOptions(), [lane])
    answers: queue.SimpleQueue[wire.Body] = queue.SimpleQueue()
    receive = Transports(make_config("shm"), [random_pool(2)]).receive_thread("c", opened, KEY, answers.put, print)
    receive.start()
    refused = answers.get(timeout=WAIT_S)
    receive.close()
    assert isinstance(refused, wire.LinkRefused)
    choice = f"{called('kv_transport')} shm"
    assert refused.reason == f"no transport in common: P offers nccl, dist; {choice} here allows shm"


@pytest.mark.parametrize("transport", ["shm", "dist"])
def test_a_lane_carries_the_pool_of_its_group(transport: str) -> None:
    """A state is sent as one token of one block, in several pieces of layers; other groups' pools do not change."""
    layout = dataclasses.replace(LAYOUT, block_size=1, rule="state", layers=(0, 2))
    states, others = (random_pool(3, layout), random_pool(4, layout)), (random_pool(5), random_pool(6))
    link = Link(transport, pools=states, before=others)
    assert link.await_ready().transport == transport
    seen, others_of_it = states[1].block(states[1].landing_probe_block).flatten().chunk(2)
    assert torch.equal(seen, states[0].block(states[0].probe_block).flatten().chunk(2)[0])
    assert not others_of_it.any(), "a state's probe must be one layer"
    source, target = (pool.data[:NUM_BLOCKS].clone() for pool in states)
    other = others[1].data[:NUM_BLOCKS].clone()
    link.receive.begin("t", [2], 0, 1)
    for layer in range(2):
        link.send.ship("t", layer, wire.KVPiece(0, 1, layer, 1, [5]))
    link.send.ship_end(wire.KVEnd("t", 2, 1, [TOKEN]))
    assert next_event(link, Landed).nbytes == layout.block_nbytes
    target[2] = source[5]
    assert torch.equal(states[1].data[:NUM_BLOCKS], target)
    assert torch.equal(others[1].data[:NUM_BLOCKS], other)
    link.close()
    foreign = Link(transport, pools=states, before=others, probe_seed=123)
    assert "the prefill instance's probe does not have the expected content" in refusal_of(foreign).reason


def next_event(link: Link, kind: type[Event]) -> Event:
    event = link.events.get(timeout=WAIT_S)
    assert isinstance(event, kind)
    return event


def refusal_of(link: Link) -> wire.LinkRefused:
    assert isinstance(link.answers.get(timeout=WAIT_S), wire.LinkAnswer)
    refused = link.answers.get(timeout=WAIT_S)
    assert isinstance(refused, wire.LinkRefused)
    link.close()
    return refused


@pytest.mark.parametrize(("transport", "chosen"), [("auto", "local"), ("shm", "shm"), ("dist", "dist")])
def test_a_link_is_proven_and_lands_transfers(transport: str, chosen: str) -> None:
    link = Link(transport)
    own_probe = link.target.data[link.target.probe_block].clone()
    assert link.await_ready().transport == chosen
    # The instance may become a prefill instance, which probes its links with its own probe block.
    assert torch.equal(link.target.data[link.target.landing_probe_block], link.source.data[link.source.probe_block])
    assert torch.equal(link.target.data[link.target.probe_block], own_probe)
    link.transfer([1, 2, 3], [7, 8, 9])
    assert link.events.get(timeout=WAIT_S) == Landed("t", [TOKEN], 3 * LAYOUT.block_nbytes)
    assert torch.equal(link.target.data[[7, 8, 9]], link.source.data[[1, 2, 3]])
    link.send.probe()  # a keepalive: the link stays up
    link.transfer([4, 5], [0, 1], "t2")
    next_event(link, Landed)
    assert link.receive.num_dropped == 0
    link.close()


@pytest.mark.parametrize("transport", ["shm", "dist"])
def test_a_pool_with_another_content_is_not_trusted(transport: str) -> None:
    """A wrong probe content means that D reads other memory than P's."""
    refused = refusal_of(Link(transport, probe_seed=123))
    assert "the expected content" in refused.reason
    assert refused.retry


def failure_of(link: Link, drains: bool = False) -> str:
    """Returns why the link failed; asserts that drains are still acknowledged."""
    failed = next_event(link, LinkFailed)
    if drains:
        link.receive.forget("t")
        assert link.events.get(timeout=WAIT_S) == Drained("t")
    link.close()
    return failed.reason


def test_the_next_transport_is_tried_when_the_probe_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """With auto and a broken local transport, shared memory is used."""
    monkeypatch.setattr(LocalReceiver, "receive", lambda self, sequence, chunk, into: None)
    link = Link("auto")
    assert link.await_ready().transport == "shm"
    link.transfer([1, 2, 3], [7, 8, 9])
    next_event(link, Landed)
    link.close()


def test_a_link_without_a_probe_is_refused() -> None:
    refused = refusal_of(Link("shm", tamper=lambda frame: [], connect_timeout_s=0.5))
    assert "no probe arrived within 0.5 s" in refused.reason


def test_a_keepalive_that_fails_ends_the_link() -> None:
    link = Link("shm")
    link.await_ready()
    link.source.data[link.source.probe_block] += 1
    link.send.probe()
    assert "the expected content" in failure_of(link)


def test_doubled_and_foreign_frames_are_dropped_and_counted() -> None:
    stranger = Sealer(LinkKey.derive(b"other", "link", "p", "d"))
    link = Link("shm", lambda frame: [frame, frame, stranger.seal(wire.KVEnd("t", 0, 0, [TOKEN]))])
    link.await_ready()
    link.transfer([1, 2, 3], [7, 8, 9])
    next_event(link, Landed)
    assert link.receive.num_dropped >= 8
    link.close()


def test_a_lost_frame_ends_the_link_and_drains_are_still_acknowledged() -> None:
    link = Link("shm", tamper=lambda frame: [frame] if frame.sequence != 2 else [])
    link.await_ready()
    link.transfer([1, 2, 3], [7, 8, 9])
    assert "arrived, but 2 was expected" in failure_of(link, drains=True)


def test_damage_in_the_payload_ends_the_transfer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link("shm")
    link.await_ready()
    prepare = OneSidedSender.prepare

    def damaged(self: OneSidedSender, piece: wire.KVPiece) -> Prepared:
        prepared = prepare(self, piece)
        return dataclasses.replace(prepared, checksum=prepared.checksum ^ 1)

    monkeypatch.setattr(OneSidedSender, "prepare", damaged)
    link.transfer([1, 2], [7, 8])
    assert link.events.get(timeout=WAIT_S) == LandFault("t", "checksum of a KV chunk is wrong")
    monkeypatch.undo()
    link.transfer([1, 2], [7, 8], "t2")
    next_event(link, Landed)
    link.close()


def test_a_link_whose_transports_all_fail_is_refused() -> None:
    answers: queue.SimpleQueue[wire.Body] = queue.SimpleQueue()

    class Broken(LocalReceiver):
        def open(self) -> None:
            raise LinkError("no way", retry=True)

    target = random_pool(2)
    receiver = Broken(place_of(target), peer_of(PoolAddress("").offer("local")), CHECKSUM)
    thread = ReceiveThread(
        LaneContext("c", answers.put, lambda event: None),
        "link",
        AllowedTransports([receiver]),
        Probe(target, LAYOUT, 0),
        Opener(KEY),
        WAIT_S,
    )
    thread.start()
    assert isinstance(answers.get(timeout=WAIT_S), wire.LinkAnswer)
    assert answers.get(timeout=WAIT_S) == wire.LinkRefused("link", "local: no way", True)
    thread.close()


def test_a_transport_that_was_not_offered_fails_the_link() -> None:
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    thread = SendThread(LaneContext("c", lambda body: None, events.put), [], Sealer(KEY), random_pool(1))
    thread.open("dist", LAYOUT, LAYOUT)
    assert events.get(timeout=WAIT_S) == LinkFailed("c", "the decode instance chose dist, which was not offered")


def test_a_thread_that_meets_a_surprise_reports_it_and_still_acknowledges_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = Link("local")
    link.await_ready()

    def surprise(self: LocalReceiver, sequence: int, chunk: wire.KVChunk, into: list[int] | None) -> None:
        raise MemoryError("no staging buffer")

    monkeypatch.setattr(LocalReceiver, "receive", surprise)
    link.transfer([1, 2], [7, 8])
    assert "no staging buffer" in failure_of(link, drains=True)
