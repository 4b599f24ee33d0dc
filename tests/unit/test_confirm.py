"""D confirms a landed transfer on the thread that lands it: neither waits for a step of the engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest

from pd_cluster import wire
from pd_cluster.engine.handover.context import HandoverContext
from pd_cluster.engine.handover.in_links import InLinks
from pd_cluster.engine.handover.in_table import InLanes
from pd_cluster.engine.handover.links import PeerProgress, Side
from pd_cluster.kv.layout import KVLayout, keys_and_values, lanes
from pd_cluster.numerics import Numerics
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.events import Drained, Landed, LandFault, LinkEvent, LinkFailed, Report
from pd_cluster.types import TokenOutput

LAYOUT = KVLayout(num_layers=1, num_kv_heads=4, planes=keys_and_values(8), block_size=4, dtype="float32")


@dataclass
class End:
    """Both D's end of a lane and everything that its link calls; `log` has what others learn, in order."""

    log: list[object] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    received_nbytes: int = 0
    num_dropped: int = 0
    precision: str = ""

    def receive_end(self, conn: str, peer: str, opened: wire.LinkOpen, index: int, report: Report, note: Any) -> End:
        self.reports.append(report)
        return self

    def needs_pair(self, opened: wire.LinkOpen) -> bool:
        return False

    def send(self, conn: str, body: wire.Body) -> None:
        self.log.append((conn, body))

    def start(self) -> None: ...

    def note(self, transfer_id: str, what: str, **numbers: int) -> None:
        self.log.append(what)


def opened_link(num_source_ranks: int) -> End:
    end, source = End(), dataclasses.replace(LAYOUT, tp_size=num_source_ranks)
    side = Side("d@1", b"s", "m", Numerics(), LAYOUT, 8, 0, wire.KVOptions())
    own: Any = end
    context = HandoverContext(side, own, own, end.log.append, Timeouts(), lambda: 0.0, own)
    links = InLinks(context, InLanes(context, PeerProgress(lambda: 0.0)), own)
    ways = [wire.TransportOffer(transport="shm", data=b"")]
    offers = [
        wire.LaneOffer(source_rank=lane.source_rank, target_rank=lane.target_rank, offers=ways, probe_seed=1)
        for lane in lanes(source, LAYOUT)
    ]
    links.on_open("c", "p@1", wire.LinkOpen("l", "m", Numerics(), source.to_info(), 8, wire.KVOptions(), offers), True)
    return end


def landed(token_id: int = 5) -> Landed:
    return Landed("t", [TokenOutput("r", 0, 0, 0, token_id)], 10)


def test_the_engine_learns_of_a_landing_before_its_peer_can_answer() -> None:
    """Otherwise it would read `Confirmed` of a transfer that it takes to be landing still."""
    end = opened_link(1)
    end.reports[0](landed())
    assert end.log == [landed(), "landing complete", ("c", wire.Confirm("t"))]


def test_only_a_landing_over_all_lanes_is_confirmed() -> None:
    end = opened_link(4)
    for report in (end.reports[2], end.reports[0], end.reports[3]):
        report(landed())
    assert end.log == []
    end.reports[1](landed())
    assert end.log == [Landed("t", landed().first_tokens, 40), "landing complete", ("c", wire.Confirm("t"))]
    end = opened_link(2)
    end.reports[0](landed(5))
    end.reports[1](landed(6))
    assert [type(each) for each in end.log] == [LandFault]


@pytest.mark.parametrize("event", [LandFault("t", "odd"), Drained("t"), LinkFailed("c", "gone")])
def test_nothing_else_is_confirmed(event: LinkEvent) -> None:
    end = opened_link(1)
    end.reports[0](event)
    assert end.log == [event]
