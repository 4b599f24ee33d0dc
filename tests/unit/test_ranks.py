"""Ranks of one instance: detection of a lost rank, the rank to blame, and links with different lanes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import queue
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import Raw, ValidationError, msgpack

from pd_cluster import wire
from pd_cluster.cluster.processes.worker_ranks import Ranks
from pd_cluster.engine.assembly import build_lanes
from pd_cluster.engine.handover.engine_events import Offered, StopEngine
from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.handover.links.link_ends import LinkName, LocalEndpoint, PeerProgress, ReceiveEnd, SendEnd
from pd_cluster.engine.handover.links.out_link_table import OutLinkTable
from pd_cluster.engine.handover.links.out_links import OutLinks
from pd_cluster.engine.ranks import hang_watchdog
from pd_cluster.engine.ranks import rank_messages as to
from pd_cluster.engine.ranks.follower import LaneHost, _input_of
from pd_cluster.engine.ranks.lead_runner import ALL_LAYERS, LeadRunner, Watch
from pd_cluster.engine.ranks.rank_channel import Channel
from pd_cluster.engine.ranks.remote_lanes import RankLanes
from pd_cluster.errors import InstanceLost, LinkError
from pd_cluster.kv.kv_layout import KVLayout, Lane, keys_and_values
from pd_cluster.model.inputs.step_input import StepInput
from pd_cluster.numerics import Numerics
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.link_events import Drained, LinkEvent, LinkFailed
from pd_cluster.types import note_nothing

WAIT_S = 60.0
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, planes=keys_and_values(8), block_size=4, dtype="float32")


@contextmanager
def channel_pair(timeout_s: float = WAIT_S) -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    ends = ((ours, to.FromFollower), (theirs, to.ToFollower))
    pair = tuple(Channel(end.detach(), kind, timeout_s) for end, kind in ends)
    try:
        yield pair  # type: ignore[misc]
    finally:
        for end in pair:
            end.close()


# ---- the channel


def test_messages_arrive_whole_and_in_order() -> None:
    with channel_pair() as (lead, follower):
        heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        follower.start("test", heard.put, lambda: heard.put("end"))
        sent = [to.Step(bytes(size), b"", b"x" * (size % 7), size > 0, size > 1) for size in (0, 1, 70_000, 3)]
        for message in sent:
            lead.send(message)
        assert [heard.get(timeout=WAIT_S) for _ in sent] == sent
        lead.close()
        assert heard.get(timeout=WAIT_S) == "end"


def test_a_message_that_nobody_takes_is_an_error_in_time() -> None:
    with channel_pair(timeout_s=0.2) as (lead, _), pytest.raises(InstanceLost, match="another rank of this instance"):
        lead.send(to.Step(bytes(100 << 20), b"", b"", False, False))


def test_what_a_message_raises_is_kept() -> None:
    with channel_pair() as (lead, follower):
        ended: queue.SimpleQueue[str] = queue.SimpleQueue()

        def handle(message: object) -> None:
            raise ValueError("no")

        follower.start("test", handle, lambda: ended.put("end"))
        lead.send(to.Ping())
        assert ended.get(timeout=WAIT_S) == "end"
        assert isinstance(follower.error, ValueError)


# ---- lost ranks


def test_a_follower_that_does_not_answer_or_whose_socket_ends_is_lost() -> None:
    """Holds also while nothing is computed; the follower that answers is not reported until its own end."""
    with channel_pair() as (silent, _), channel_pair() as (lead, follower):
        follower.start("follower", lambda message: follower.send(to.Pong()), lambda: None)
        lost: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        Watch([silent, lead], lambda message: None, lambda rank, why: lost.put((rank, why)), 0.5).start()
        assert lost.get(timeout=WAIT_S) == (1, "has not answered for 0.5 s")
    with channel_pair() as (lead, follower):
        gone: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        Watch([lead], lambda message: None, lambda rank, why: gone.put((rank, why)), WAIT_S).start()
        follower.close()
        assert gone.get(timeout=WAIT_S) == (1, "is gone")


@pytest.mark.parametrize(
    ("ended", "blamed"),
    [([(0, 3), (1, -9)], 1), ([(1, 1), (0, 3)], 1), ([(0, 3), (2, 0), (1, 1)], 1), ([(2, -9), (1, -6)], 2)],
)
def test_the_rank_that_ended_by_itself_is_blamed(ended: list[tuple[int, int]], blamed: int) -> None:
    """`ended`: (rank, exit code) in order of their ends; ranks that lost another one exit with 3 or 0."""
    ranks = Ranks.__new__(Ranks)
    ranks._ended = [SimpleNamespace(rank=rank, exit_code=code) for rank, code in ended]  # type: ignore[misc]
    assert ranks._first_to_blame().rank == blamed


# ---- a link with several lanes


class End:
    """A SendEnd without a thread."""

    max_payload_nbytes = sent_nbytes = probe_seed = 0

    def __init__(self, offers: list[wire.TransportOffer] | None) -> None:
        self.offers = offers
        self.is_closed = False
        self.log: list[object] = []

    def ship(self, *piece: object) -> None:
        self.log.append(piece)

    def ship_end(self, end: object) -> None:
        self.log.append(end)

    def open(self, *_: object) -> None: ...
    def settle(self) -> None: ...
    def close(self) -> None:
        self.is_closed = True


class World:
    """P's end of a link from one rank to two."""

    def __init__(self, *layouts: KVLayout) -> None:
        self.sent: list[wire.Body] = []
        self.layouts = layouts or (LAYOUT,)
        self.ends = [End([]), End(None)]  # the second end is on another rank, whose offer is unknown yet
        self.ends += [End([]) for _ in self.layouts[1:] for _ in range(2)]
        counts = (8,) * len(self.layouts)
        endpoint = LocalEndpoint("prefill-0@1", b"s", "m", Numerics(), self.layouts, counts, wire.KVOptions())
        ends = iter(self.ends)
        conns: Any = SimpleNamespace(connect=lambda *_: "c", disconnect=lambda _: None, send=self.send)
        lanes: Any = SimpleNamespace(send_end=lambda *_: next(ends))
        context = HandoverContext(endpoint, conns, lanes, lambda event: None, Timeouts(), lambda: 0.0)
        users: Any = SimpleNamespace(on_link_down=lambda conn, reason: None, uses=lambda conn: False)
        self.links = OutLinks(context, OutLinkTable(context, PeerProgress(lambda: 0.0)), users)
        about: dict[str, Any] = {"host": "h", "control_port": 1, "public_key": b"", "tp_size": 2}
        self.links.set_peers([wire.PeerInfo(name="decode-0", epoch=2, role="decode", **about)])
        self.links.on_opened("c")

    def send(self, conn: str, body: wire.Body) -> None:
        self.sent.append(body)

    @property
    def state(self) -> str:
        return str(self.links.states()["decode-0@2"])

    def announce(self) -> str:
        self.ends[1].offers = []
        self.links.on_offered("c")
        (opened,) = self.sent
        assert isinstance(opened, wire.LinkOpen)
        lanes = [Lane(0, rank, group) for group in range(len(self.layouts)) for rank in range(2)]
        assert [Lane(lane.source_rank, lane.target_rank, lane.group) for lane in opened.lanes] == lanes
        return opened.link_id


def test_a_link_is_up_when_all_of_its_lanes_are() -> None:
    world = World()
    assert world.sent == [], "a link must be announced once, when every rank has its end"
    link_id = world.announce()
    world.links.on_offered("c")
    assert len(world.sent) == 1
    world.links.on_ready("c", wire.LinkReady(link_id, "shm", "", 0))
    assert world.state == "opening"
    world.links.on_ready("c", wire.LinkReady(link_id, "dist", "", 7))  # a lane that does not exist
    assert world.state == "opening"
    world.links.on_ready("c", wire.LinkReady(link_id, "dist", "", 1))
    assert world.state == "up (dist+shm)"


@pytest.mark.parametrize(("own", "peer", "num_layers"), [("", "", 2), ("", "a", 2), ("a", "", 2), ("a", "a", 3)])
def test_a_link_carries_a_draft_heads_layer_to_the_same_head(own: str, peer: str, num_layers: int) -> None:
    def layout_with(draft_head: str) -> KVLayout:
        num = int(bool(draft_head))
        return dataclasses.replace(LAYOUT, num_layers=2 + num, num_draft_layers=num, draft_head=draft_head)

    world = World(layout_with(own))
    link_id = world.announce()
    for rank in range(2):
        layout = dataclasses.replace(layout_with(peer), tp_size=2, tp_rank=rank)
        world.links.on_answer("c", wire.LinkAnswer(link_id, "shm", layout.to_info(), rank))
    assert world.links.table.limits("c", 0).num_layers == num_layers


def test_each_group_of_layers_is_sent_over_its_own_lanes() -> None:
    """Each lane has its own limits; int8 keys beside exact states do not cause a retry."""
    state = dataclasses.replace(LAYOUT, num_layers=3, block_size=1, rule="state", layers=(0, 1, 3))
    world = World(LAYOUT, state)
    link_id = world.announce()
    for index, (layout, rank) in enumerate(itertools.product((LAYOUT, state), range(2))):
        peer = dataclasses.replace(layout, tp_size=2, tp_rank=rank)
        world.links.on_answer("c", wire.LinkAnswer(link_id, "shm", peer.to_info(), index))
        world.links.on_ready("c", wire.LinkReady(link_id, "shm", "" if layout is state else "int8", index))
    assert world.state == "up (shm, int8)"
    table, piece = world.links.table, wire.KVPiece(0, 1, 0, 3, [5])
    limits = [table.limits("c", group) for group in range(2)]
    assert [(each.peer_block_size, each.num_layers) for each in limits] == [(LAYOUT.block_size, 2), (1, 3)]
    table.ship("c", 1, "t", 0, piece)
    end = wire.KVEnd("t", 0, 4, [])
    table.ship_end("c", 0, end)
    assert [each.log for each in world.ends] == [[end], [end], [("t", 0, piece)], [("t", 0, piece)]]


def test_lanes_of_unequal_precision_are_tried_again() -> None:
    """D's blocks have one precision, so half of the heads in int8 must not count as exact."""
    world = World()
    link_id = world.announce()
    world.links.on_ready("c", wire.LinkReady(link_id, "shm", "", 0))
    world.links.on_ready("c", wire.LinkReady(link_id, "dist", "int8", 1))
    assert world.state == "waiting: some of its lanes are exact and some are not"
    assert all(end.is_closed for end in world.ends)


def test_an_answer_from_another_rank_is_refused() -> None:
    for tp_size, tp_rank in ((2, 0), (4, 1)):
        world = World()
        link_id = world.announce()
        layout = dataclasses.replace(LAYOUT, tp_size=tp_size, tp_rank=tp_rank)
        world.links.on_answer("c", wire.LinkAnswer(link_id, "shm", layout.to_info(), 1))
        assert world.state == f"refused: rank {tp_rank} of {tp_size} of decode-0 answered for rank 1 of 2"


class Closes(int):
    """A lane's number whose comparison closes the link, as the engine's thread may at that moment."""

    links: OutLinks

    def __lt__(self, other: int) -> bool:
        self.links.on_down("c", "gone")
        return super().__lt__(other)


def test_a_key_of_a_lane_that_is_closed_meanwhile_goes_nowhere() -> None:
    world = World()
    met: list[wire.LinkValue] = []
    for end in world.ends:
        end.meet = met.append  # type: ignore[attr-defined]
    world.links.meet("c", wire.LinkValue("dist", "key", b"", 1))
    assert len(met) == 1
    lane = Closes(1)
    lane.links = world.links
    world.links.meet("c", wire.LinkValue("dist", "key", b"", lane))
    assert world.state.startswith("waiting")
    world.links.meet("c", wire.LinkValue("dist", "key", b"", 1))
    assert len(met) <= 2


# ---- rank 0's messages about steps, and work that a follower delays until it has rank 0's progress


AT = ("conn", 1)


# ---- rank 0


class Runner:
    """A runner that records launches; steps have numbers in place of blocks."""

    eos_token_ids, vocab_size, goes_ahead, held = frozenset[int](), 8, True, None
    pool = SimpleNamespace(layout=LAYOUT)

    def __init__(self) -> None:
        self.may_launch = True
        self.progress_inside: list[to.Reached] = []
        self.lead: LeadRunner | None = None

    def can_launch(self, requests: Any) -> bool:
        return self.may_launch

    def step_of(self, chunks: Any) -> StepInput:
        return StepInput(np.array([[1, 5, 2, 1, 9, 0]]), np.array([7]), np.array([3, 4]), leaders=np.array([0]))

    def without_foreign_pixels(self, parts: Any) -> list[Any]:
        return list(parts)

    def launch_step(self, step: StepInput, chunks: Any, after: Any, on_layer: Any) -> str:
        assert self.lead is not None
        self.progress_inside.append(self.lead.progress)
        return "tokens"


def lead_of(runner: Runner) -> tuple[LeadRunner, list[to.Step]]:
    told: list[to.Step] = []
    follower = SimpleNamespace(send_encoded=lambda data: told.append(msgpack.decode(data, type=to.Step)))
    runner.lead = LeadRunner(runner, [follower])  # type: ignore[arg-type,list-item]
    return runner.lead, told


def test_followers_are_told_of_every_step_that_is_launched() -> None:
    runner = Runner()
    lead, told = lead_of(runner)
    for runner.may_launch in (False, True):
        assert lead.can_launch([]) == runner.may_launch, "expected tokens that its device can choose"
    assert (lead.progress, told) == (to.Reached(0, ALL_LAYERS), [])
    assert lead.goes_ahead
    assert lead.launch([]) == "tokens"  # type: ignore[comparison-overlap]
    assert lead.progress == to.Reached(1, ALL_LAYERS)
    assert lead.launch([], SimpleNamespace()) == "tokens"  # type: ignore[arg-type,comparison-overlap]
    assert lead.progress == to.Reached(2, ALL_LAYERS)
    assert runner.progress_inside == [to.Reached(1, 0), to.Reached(2, 0)]
    assert [(step.is_ahead, step.by_layers) for step in told] == [(False, False), (True, False)]
    assert np.frombuffer(told[0].input_ids, np.int64).tolist() == [7]
    received = _input_of(told[1])
    assert received.rows.tolist() == [[1, 5, 2, 1, 9, 0]]
    assert received.leaders is not None
    assert received.leaders.tolist() == [0]


# ---- a follower's ends of lanes


class RecordingEnd:
    """An end of a lane that records its calls."""

    offers, max_payloads = list[wire.TransportOffer](), {"shm": 9}
    received_nbytes = num_dropped = sent_nbytes = probe_seed = 0

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.done.append((name, *args))


class TwoRanks:
    """Rank 0's proxies of rank 1's lane ends, and rank 1's host of these ends; messages between them are encoded."""

    def __init__(self) -> None:
        self.end = RecordingEnd()
        self.can_open = True
        self.progress = to.Reached(2, ALL_LAYERS)
        self.reported: list[LinkEvent] = []
        self.told: list[Offered] = []
        ends: Any = SimpleNamespace(send_end=self.open, receive_end=self.open)
        self.host = LaneHost(ends, self.to_lead)
        channel: Any = SimpleNamespace(send=self.to_follower)
        unused: Any = None  # in place of rank 0's own lanes, and of the mailbox
        self.lanes = RankLanes(unused, [channel], lambda: self.progress, unused, self.told.append)

    def open(self, *opened: object) -> RecordingEnd:
        self.opened = opened
        if not self.can_open:
            raise LinkError("no room")
        return self.end

    def to_follower(self, message: to.RankMessage) -> None:
        decoded: Any = msgpack.decode(msgpack.encode(message), type=to.ToFollower)
        self.host.handle(decoded)

    def to_lead(self, message: to.RankMessage) -> None:
        decoded: Any = msgpack.decode(msgpack.encode(message), type=to.FromFollower)
        self.lanes.hear(decoded)

    def sending(self) -> SendEnd:
        return self.lanes.send_end(LinkName("conn", "id", "d@1"), 1, Lane(1, 0, 2), self.reported.append, note_nothing)

    def receiving(self) -> ReceiveEnd:
        lane_offers = [wire.LaneOffer(source_rank=0, target_rank=rank, offers=[], probe_seed=0) for rank in range(2)]
        about: dict[str, Any] = {"model_identity": "m", "numerics": Numerics(), "num_blocks": [8]}
        about |= {"options": wire.KVOptions(), "lanes": lane_offers}
        opened = wire.LinkOpen(link_id="id", layouts=[LAYOUT.to_info()], **about)
        return self.lanes.receive_end("conn", "p@1", opened, 1, self.reported.append, note_nothing)


def test_calls_of_ends_on_other_ranks_are_made_there() -> None:
    ranks = TwoRanks()
    ranks.host.reached(to.Reached(2, ALL_LAYERS))
    end = ranks.sending()
    assert (end.offers, ranks.told) == ([], [Offered("conn")])
    assert Lane(1, 0, 2) in ranks.opened, "the end must use its own group's pool"
    value, piece = wire.LinkValue("dist", "0/0", b"x", 1), wire.KVPiece(0, 4, 0, 2, [5])
    last = wire.KVEnd(transfer_id="t", num_chunks=1, num_tokens=4, first_tokens=[])
    end.open("shm", LAYOUT, dataclasses.replace(LAYOUT, tp_size=2))
    assert end.max_payload_nbytes == 9
    end.meet(value)
    end.settle()
    end.probe()
    end.ship("t", 0, piece)
    end.ship_end(last)
    end.drop("t")
    end.close()
    end.probe()  # the end is closed
    opened = ("open", "shm", LAYOUT, dataclasses.replace(LAYOUT, tp_size=2))
    shipped = [("ship", "t", 0, piece), ("ship_end", last), ("drop", "t"), ("close",)]
    assert ranks.end.done == [opened, ("meet", value), ("settle",), ("probe",), *shipped]


def test_blocks_are_landed_in_when_what_still_writes_to_them_was_launched_here() -> None:
    """A follower lands in blocks only once it has launched the steps that rank 0 had launched at their release."""
    ranks = TwoRanks()
    end, value, frame = ranks.receiving(), wire.LinkValue("dist", "0/0", b""), wire.KVFrame(0, b"", b"", 1)
    end.start()
    ranks.host.reached(to.Reached(1, ALL_LAYERS))
    end.begin("t", [3], 0, 4)
    end.meet(value)  # link values are not delayed
    end.put(frame)
    end.forget("t")
    end.close()
    assert ranks.end.done == [("start",), ("meet", value)]
    ranks.host.reached(to.Reached(2, 1))
    assert ranks.end.done == [("start",), ("meet", value)]
    ranks.host.reached(to.Reached(2, ALL_LAYERS))
    rest = [("begin", "t", [3], 0, 4), ("put", frame), ("forget", "t"), ("close",)]
    assert ranks.end.done == [("start",), ("meet", value), *rest]


def test_an_end_that_cannot_be_opened_there_fails_and_has_nothing_under_way() -> None:
    ranks = TwoRanks()
    ranks.can_open = False
    end = ranks.receiving()
    end.start()
    end.begin("t", [3], 0, 4)
    end.forget("t")
    end.close()
    assert ranks.reported == [LinkFailed("conn", "no room"), Drained("t")]
    assert ranks.end.done == []


def test_only_methods_of_ends_are_called_with_arguments_of_their_types() -> None:
    ranks = TwoRanks()
    assert not hasattr(ranks.sending(), "begin"), "expected a method of D's ends"
    for method, arguments in (("begin", ("t", [3], 0, 4)), ("_run", ()), ("__init__", ()), ("offers", ())):
        with pytest.raises(ValidationError, match=f"has no method {method}"):
            ranks.to_follower(to.Call(*AT, method, Raw(msgpack.encode(arguments)), None))
    for arguments in ((), (1,), ("t", "u")):
        with pytest.raises(ValidationError):
            ranks.to_follower(to.Call(*AT, "drop", Raw(msgpack.encode(arguments)), None))
    assert ranks.end.done == []


# ---- deadlines after a rank is lost


def test_who_has_lost_a_rank_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[float] = []
    monkeypatch.setattr(build_lanes, "end_within", ends.append)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    told: list[str] = []
    build_lanes.on_rank_lost(4, 3.0, inbox, told.append, 2, "has not answered for 3 s")
    assert told == ["rank 2 of 4 has not answered for 3 s"]
    event = inbox.get_nowait()
    assert isinstance(event, StopEngine)
    assert isinstance(event.error, InstanceLost)
    assert ends == [6.0]


def test_a_last_deadline_is_not_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later call extends neither the last deadline nor an earlier one."""
    armed: list[float] = [math.inf]
    clock = [100.0]
    monkeypatch.setattr(hang_watchdog.faulthandler, "dump_traceback_later", lambda s, exit: armed.append(clock[0] + s))
    for step_limit_s, ends_at_s in ((600.0, 106.0), (4.0, 104.0)):
        clock[0] = 100.0
        monkeypatch.setattr(hang_watchdog, "alarm", alarm := hang_watchdog.Alarm())
        on_round = hang_watchdog.ends_when_hung(step_limit_s, lambda: clock[0])
        on_round()
        alarm.make_final(clock[0], 6.0)
        clock[0] += 3
        on_round()
        assert armed[-1] == ends_at_s
