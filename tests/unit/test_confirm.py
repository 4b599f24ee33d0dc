"""D confirms a landed transfer on the landing thread, without waiting for an engine step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest

from pd_cluster import wire
from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.handover.links.in_lanes import InLanes
from pd_cluster.engine.handover.links.in_links import InLinks
from pd_cluster.engine.handover.links.link_ends import LocalEndpoint, PeerProgress
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.layer_groups import lanes_of
from pd_cluster.numerics import Numerics
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.link_events import Drained, Landed, LandFault, LinkEvent, LinkFailed, Report
from pd_cluster.types import TokenOutput

LAYOUT = KVLayout(num_layers=1, num_kv_heads=4, planes=keys_and_values(8), block_size=4, dtype="float32")

STATE = dataclasses.replace(LAYOUT, block_size=1, rule="state", layers=(1,))


@dataclass
class End:
    """D's end of a lane and everything that its link calls; `log` records all messages in order."""

    log: list[object] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    received_nbytes: int = 0
    num_dropped: int = 0
    precision: str = ""
    table: InLanes = field(init=False)

    def receive_end(self, conn: str, peer: str, opened: wire.LinkOpen, index: int, report: Report, note: Any) -> End:
        self.reports.append(report)
        return self

    def needs_pair(self, opened: wire.LinkOpen) -> bool:
        return False

    def send(self, conn: str, body: wire.Body) -> None:
        self.log.append((conn, body))

    def start(self) -> None: ...

    def begin(self, *landing: object) -> None:
        self.log.append(landing)

    def note(self, transfer_id: str, what: str, **numbers: int) -> None:
        self.log.append(what)


def opened_link(num_source_ranks: int, layouts: tuple[KVLayout, ...] = (LAYOUT,)) -> End:
    end, sources = End(), [dataclasses.replace(layout, tp_size=num_source_ranks) for layout in layouts]
    endpoint = LocalEndpoint("d@1", b"s", "m", Numerics(), layouts, (8,) * len(layouts), wire.KVOptions())
    own: Any = end
    context = HandoverContext(endpoint, own, own, end.log.append, Timeouts(), lambda: 0.0, own)
    end.table = InLanes(context, PeerProgress(lambda: 0.0))
    links = InLinks(context, end.table, own)
    ways = [wire.TransportOffer(transport="shm", data=b"")]
    offers = [wire.LaneOffer(**lane._asdict(), offers=ways, probe_seed=1) for lane in lanes_of(sources, layouts)]
    infos, counts = [each.to_info() for each in sources], [8] * len(sources)
    links.on_open("c", "p@1", wire.LinkOpen("l", "m", Numerics(), infos, counts, wire.KVOptions(), offers), True)
    return end


def landed(token_id: int = 5) -> Landed:
    return Landed("t", [TokenOutput("r", 0, 0, 0, token_id)], 10)


def test_the_engine_learns_of_a_landing_before_its_peer_can_answer() -> None:
    """The engine must not read `Confirmed` for a transfer that it believes to be still landing."""
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
    end = opened_link(2, (LAYOUT, STATE))
    for report in end.reports[:3]:  # all keys and values, and half of the state
        report(landed())
    assert end.log == []
    end.reports[3](landed())
    assert end.log[-1] == ("c", wire.Confirm("t"))
    end = opened_link(2)
    end.reports[0](landed(5))
    end.reports[1](landed(6))
    assert [type(each) for each in end.log] == [LandFault]


def test_a_landing_begins_in_each_lane_with_the_blocks_of_its_group() -> None:
    end = opened_link(2, (LAYOUT, STATE))
    end.table.begin("c", "t", [[4, 5, 6], [9]], [4, 0], 7)
    assert end.log == [("t", [4, 5], 4, 7)] * 2 + [("t", [9], 0, 1)] * 2


@pytest.mark.parametrize("event", [LandFault("t", "odd"), Drained("t"), LinkFailed("c", "gone")])
def test_nothing_else_is_confirmed(event: LinkEvent) -> None:
    end = opened_link(1)
    end.reports[0](event)
    assert end.log == [event]
