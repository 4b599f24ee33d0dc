"""NCCL and HCCL groups of two ranks over device memory, and transfers between pools of different kinds."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import pytest
import torch

from pd_cluster import wire
from pd_cluster.devices.device import CPU
from pd_cluster.devices.device_kinds import DeviceKind
from pd_cluster.devices.hccl_environment import PAIR_BUFFER_MB
from pd_cluster.devices.process_groups import ERROR_HANDLING
from pd_cluster.errors import LinkError
from pd_cluster.transport import device_pair as transport_pair
from pd_cluster.transport.device_pair import RECEIVER
from pd_cluster.transport.dist import DistReceiver, DistSender, GroupOffer
from pd_cluster.transport.link_events import Landed
from tests.support.fake_device import FakeGroup, FakeHccl, FakeModule, content, put_on
from tests.support.transports import CHECKSUM, LAYOUT, WAIT_S, Link, Pair, blocks, peer_of, place_of, random_pool


class Group(NamedTuple):
    name: Literal["nccl", "hccl"]
    kind: DeviceKind

    def pair(self) -> Pair:
        return Pair(self.name, kind=self.kind)


@pytest.fixture(params=[Group("nccl", "cuda"), Group("hccl", "npu")], ids=lambda group: group.name)
def group(request: pytest.FixtureRequest, gpu: FakeModule) -> Group:
    return request.param  # type: ignore[no-any-return]


def test_two_pools_on_one_device_are_no_pair(group: Group) -> None:
    offer = GroupOffer("", group.name, "GPU-0").offer(group.name)
    pool = put_on(random_pool(2), 0, group.kind)
    receiver = DistReceiver(place_of(pool), peer_of(offer), CHECKSUM, lambda key, value: None)
    with pytest.raises(LinkError, match=f"both pools are on device GPU-0: {group.name.upper()} allows"):
        receiver.open()
    pool.device = CPU
    with pytest.raises(LinkError, match="pool is in host memory"):
        receiver.open()


def test_a_payload_that_does_not_come_aborts_the_pair(group: Group) -> None:
    pair = group.pair()
    receiver: Any = pair.receiver
    receiver.place = replace(receiver.place, transfer_s=0.2)
    with pytest.raises(LinkError, match=r"no payload was transferred within 0\.2 s"):
        pair.receiver.receive(0, wire.KVChunk("t", 0, blocks([1]), LAYOUT.block_nbytes, 0), [1])
    assert [each.aborted.is_set() for each in FakeGroup.made].count(True) == 1
    pair.close()


def test_a_device_keeps_the_memory_of_an_aborted_payload_until_it_has_ended_it(group: Group) -> None:
    """HCCL may write to an aborted call's buffer even without the communicator, so it is kept until the call ends."""
    pair = group.pair()
    receiver = next(each for each in FakeGroup.made if each.rank == RECEIVER)
    buffer = torch.zeros(4)
    work = pair.receiver.group.recv([buffer], 0, 0)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="no payload was transferred"):
        work.wait(timedelta(seconds=0.05))
    assert receiver.aborted.is_set()

    def is_kept() -> bool:
        group.pair().close()  # closing a pair releases what earlier pairs left
        return any(each is buffer for _, kept in transport_pair.quarantine for each in kept)

    pair.close()
    assert is_kept()
    work.work.done.set()
    assert not is_kept()


def test_a_peer_that_dies_fails_the_link_and_not_the_process(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = ERROR_HANDLING[group.name]
    monkeypatch.delenv(setting, raising=False)
    pair = group.pair()
    assert os.environ[setting] == "2"
    next(iter(FakeGroup.wires.values())).put(None)
    with pytest.raises(LinkError, match="remote process exited" if group.name == "nccl" else "HCCL reports an error"):
        pair.receiver.receive(0, wire.KVChunk("t", 0, blocks([1]), LAYOUT.block_nbytes, 0), [1])
    pair.close()
    assert any(each.aborted.is_set() for each in FakeGroup.made)


def test_a_pair_that_is_idle_is_shut_down_and_one_under_way_aborted(group: Group) -> None:
    pair = group.pair()
    pair.move(blocks([1]), [2])
    pair.receiver.close()  # its work has been waited for
    pair.sender.close()  # its work has not
    ends = sorted((each.is_shut_down, each.aborted.is_set()) for each in FakeGroup.made)
    assert ends == [(False, True), (True, False)]


def test_hccl_gets_groups_that_are_nobody_elses(gpu: FakeModule) -> None:
    pairs = [Pair("hccl", kind="npu") for _ in range(2)]
    options = [group.options for group in FakeGroup.made]
    assert len({each.group_id for each in options}) == 2, "a pair's ends must share a name that no other pair has"
    assert all(each.global_ranks_in_group == [0, 1] for each in options), "a group must not be the global one"
    assert {each.hccl_config["hccl_buffer_size"] for each in options} == {PAIR_BUFFER_MB}
    for pair in pairs:
        pair.close()


def test_an_hccl_pair_whose_other_end_does_not_come_waits_no_longer_than_it_may(gpu: FakeModule) -> None:
    """HCCL itself would wait without a limit; here the pair fails in time, so the next transport is tried."""
    pool = put_on(random_pool(1), 0, "npu")
    sender = DistSender(place_of(pool, connect_s=0.05), CHECKSUM, lambda key, value: None, "hccl")
    with pytest.raises(LinkError, match=r"hccl pair did not come up: .* did not connect within 0\.1 s") as caught:
        sender.open(LAYOUT)
    assert caught.value.retry
    sender.close()
    assert not FakeGroup.made[0].aborted.is_set(), "a communicator under construction must not be aborted"
    FakeGroup.meetings["0"].abort()


def test_an_hccl_pair_that_fails_at_one_end_keeps_the_other_from_nothing(
    gpu: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If D fails and continues with the next transport, P must not remain waiting for the group."""
    meet = FakeHccl.allreduce

    def fails(self: FakeHccl, tensors: list[torch.Tensor], options: object) -> object:
        if self.rank == RECEIVER:
            raise RuntimeError("no address of the device network")
        return meet(self, tensors, options)

    monkeypatch.setattr(FakeHccl, "allreduce", fails)
    link = Link("dist", devices=(1, 0), kind="npu")
    assert link.await_ready().transport == "dist"
    link.close()
    FakeGroup.meetings["0"].abort()


def test_at_either_end_hccl_is_called_once_a_payload_in_order(gpu: FakeModule) -> None:
    """HCCL matches sends with receives by order only, so even dropped payloads must be received."""
    link = Link("dist", devices=(1, 0), kind="npu")
    assert link.await_ready().transport == "hccl"
    link.transfer([1, 2, 3], [7, 8, 9])
    assert isinstance(link.events.get(timeout=WAIT_S), Landed)
    link.send.ship("nobody's", 0, blocks([4]))  # received, then dropped
    link.transfer([4, 5], [0, 1], "t2")
    assert isinstance(link.events.get(timeout=WAIT_S), Landed)
    link.close()
    sent, received = (
        [size for way, size in group.calls if way == end]
        for group, end in zip(sorted(FakeGroup.made, key=lambda each: each.rank), ("send", "recv"), strict=True)
    )
    assert sent == received
    assert len(sent) == 1 + 3 + 3 + 1
    assert torch.equal(content(link.target)[[0, 1]], content(link.source)[[4, 5]])


# ---- pools of two kinds


@pytest.mark.parametrize("kinds", [("npu", "cpu"), ("cpu", "npu"), ("npu", "cuda")])
@pytest.mark.parametrize("change", [{}, {"block_size": 8}, {"dtype": "bfloat16"}, {"tp_size": 2, "tp_rank": 1}])
def test_a_pool_by_layers_and_a_block_major_one_exchange_over_host_memory(
    kinds: tuple[DeviceKind, DeviceKind], change: dict[str, Any], gpu: FakeModule
) -> None:
    target = dataclasses.replace(LAYOUT, **change)
    pair = Pair("dist", into=target, kinds=kinds)
    ids, heads = [1, 5] if target.block_size == 4 else [4], slice(*target.head_range)
    pair.move(wire.KVPiece(0, 8, 0, 2, [3, 7]), ids)
    sent = content(pair.source)[[3, 7]].transpose(1, 3).flatten(0, 1)  # [num_tokens, 2, num_layers, heads, dim]
    found = content(pair.target)[ids].transpose(1, 3).flatten(0, 1)
    assert torch.equal(found, sent[..., heads, :].to(found.dtype))
    pair.close()
