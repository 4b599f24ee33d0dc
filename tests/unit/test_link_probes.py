"""Both ends of a pre-flight link, in one process."""

from __future__ import annotations

import secrets
import threading
from typing import Any

import pytest

from pd_cluster.engine.link_probe.probe_end import ProbeEnd
from pd_cluster.engine.link_probe.probe_links import ReceivingEnd
from pd_cluster.engine.link_probe.probe_messages import BeginProbes, Compare, Listen, Send
from pd_cluster.transport.link_events import Landed
from pd_cluster.types import Role

SEED, NUM_TRIPS = 5, 2


def begun(role: Role) -> ProbeEnd:
    end, place = ProbeEnd(), {"host": "127.0.0.1", "device": "cpu", "device_ids": ["0"], "rank": 0}
    end.answer(BeginProbes(name=f"{role}-0", role=role, kv_transport="shm", seed=SEED, **place))  # type: ignore[arg-type]
    return end


def test_what_the_sender_knows_to_have_landed_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Landings that the sender knows of count, even if the receiver's event thread is late."""
    goes_on, take = threading.Event(), ReceivingEnd.take

    def late(end: ReceivingEnd, event: Any) -> None:
        if isinstance(event, Landed) and event.transfer_id == f"trip{NUM_TRIPS - 1}":
            assert goes_on.wait(60.0)
        take(end, event)

    monkeypatch.setattr(ReceivingEnd, "take", late)
    source, target, secret = begun("prefill"), begun("decode"), secrets.token_bytes(32)
    there = target.answer(Listen(secret))
    receiving = target.receiving
    assert receiving is not None
    try:
        source.answer(Send(secret, "decode-0", there.port, there.epoch, NUM_TRIPS))
        receiving.compare(Compare(SEED, NUM_TRIPS))
    finally:
        goes_on.set()
        receiving.close()
        for end in (source, target):
            end.pool.close()
