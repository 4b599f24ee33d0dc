"""Sends KV blocks between two NPUs over HCCL and over IPC, in separate processes, and kills one of them.

Run by scripts/npu_check.sh on NPUs, and by tests/cluster/test_npu_check.py on simulated ones.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import time
from collections.abc import Callable, Iterator

import pytest

from pd_cluster.cluster.preflight.pair_probes import send_blocks
from pd_cluster.cluster.preflight.rank_endpoint import PAIR_S, ListedInstance, RankEndpoint, running
from pd_cluster.devices.device import bind
from pd_cluster.engine.link_probe.probe_messages import BLOCK_NBYTES, NUM_BLOCKS, Compare, Listen, Send
from pd_cluster.errors import LinkError
from pd_cluster.types import Role
from ranktable_tools import Device, Server

HOST = "127.0.0.1"
CARDS = os.environ.get("PD_CLUSTER_TEST_CARDS", "0 1").replace(" ", ",").split(",")
CARD_OF = {"prefill": CARDS[0], "decode": CARDS[-1]}
OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
TRANSPORTS = {"dist": "hccl", "ipc": "ipc"}  # --kv-transport -> the transport that must be chosen
BEGIN_S = 180.0
ANSWER_S = 60.0  # time for the survivor to notice and to end its device's work
UNDER_WAY = 1_000_000  # number of transfers: more than can finish before the kill

Start = Callable[[Role], RankEndpoint]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    bind("npu", CARDS[:1], 0)  # raises an error with the reason if there is no NPU
    name: str = request.param
    return name


@pytest.fixture
def start(transport: str) -> Iterator[Start]:
    """Yields a function that starts an end whose pool is on its role's card."""
    with contextlib.ExitStack() as stack:

        def begun(role: Role) -> RankEndpoint:
            card = CARD_OF[role]
            server = Server(HOST, HOST, (Device(card, HOST, "0"),))
            end = stack.enter_context(
                running(RankEndpoint(ListedInstance(f"{role}-0", role, server), 0, "npu", transport))
            )
            assert end.ask(end.begin, BEGIN_S).device == f"npu:{card}"
            return end

        yield begun


def test_blocks_arrive_again_and_again(start: Start, transport: str) -> None:
    source, target = start("prefill"), start("decode")
    for _ in range(2):
        began_s = time.monotonic()
        sent = send_blocks(source, target, 6)
        assert sent.transport == TRANSPORTS[transport]
        rate = NUM_BLOCKS * BLOCK_NBYTES / min(sent.transfers_s) / 1e9
        set_up_s = time.monotonic() - began_s - sum(sent.transfers_s)
        print(f"{sent.transport}: {rate:.1f} GB/s; everything but the transfers took {set_up_s:.1f} s")


@pytest.mark.parametrize("killed", ["prefill", "decode"])
def test_the_survivor_of_a_killed_end_works_with_its_successor(start: Start, transport: str, killed: Role) -> None:
    ends = {"prefill": start("prefill"), "decode": start("decode")}
    assert send_blocks(ends["prefill"], ends["decode"], 2).transport == TRANSPORTS[transport]  # warms both ends up
    secret = secrets.token_bytes(32)
    there = ends["decode"].ask(Listen(secret), PAIR_S)
    ends["prefill"].tell(Send(secret, "decode-0", there.port, there.epoch, UNDER_WAY))
    with pytest.raises(queue.Empty):  # it keeps sending during this time
        ends["prefill"].lines.get(timeout=3.0)
    ends[killed].kill()
    began_s = time.monotonic()
    if killed == "prefill":
        ends["decode"].tell(Compare(ends["prefill"].seed, UNDER_WAY))
    with pytest.raises(LinkError) as error:
        ends[OTHER[killed]].receive(ANSWER_S)
    print(f"the survivor knew after {time.monotonic() - began_s:.1f} s: {error.value}")
    assert "no answer within" not in str(error.value)
    ends[killed] = start(killed)
    again = send_blocks(ends["prefill"], ends["decode"], 2)
    assert again.transport == TRANSPORTS[transport]
