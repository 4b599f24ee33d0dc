"""One link to a decode instance at P's end: its state and its lanes. Knows nothing of other links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pd_cluster import wire
from pd_cluster.engine.handover.links.link_ends import LocalEndpoint, SendEnd, joined_precision
from pd_cluster.errors import LinkError
from pd_cluster.kv.kv_layout import KVLayout, Lane
from pd_cluster.types import LinkState

WAITING = LinkState("waiting")
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.5, 5.0


@dataclass(slots=True)
class OutLane:
    """P's end of one lane.

    `answered`: the transports that D's rank has chosen so far. `ready`: set once a probe has arrived over one of them.
    `peer`: the layout of D's pool on that rank, set once the rank has answered.
    """

    lane: Lane
    end: SendEnd
    answered: set[wire.TransportName] = field(default_factory=set)
    ready: wire.LinkReady | None = None
    peer: KVLayout | None = None


@dataclass(slots=True)
class OutLink:
    """`on_change` is called with every new state."""

    info: wire.PeerInfo
    on_change: Callable[[], None]
    conn: str = ""
    link_id: str = ""
    lanes: list[OutLane] = field(default_factory=list)
    is_connected: bool = False
    is_announced: bool = False  # LinkOpen has been sent
    due_s: float = 0.0  # while waiting, the time of the next attempt; while opening, the deadline
    backoff_s: float = FIRST_BACKOFF_S
    used_s: float = 0.0  # when KV cache was last sent over it
    probed_s: float = 0.0
    timeout_s: float = 0.0  # while opening, the time limit, which ends at `due_s`
    pair: wire.PairWish = "free"
    has_pair: bool = False  # it has an open communicator, which counts toward the limit
    must_rest: bool = False  # it will rest once no transfer is under way
    is_unproven: bool = False  # its communicator has failed; no requests are routed to it until a new one works
    is_rested: bool = False  # it is at rest, and opens again only for a transfer
    over: tuple[str, ...] = ()  # the transports that it used last
    awaited_s: float | None = None  # since when a transfer waits for it
    _state: LinkState = WAITING

    @property
    def state(self) -> LinkState:
        return self._state

    @state.setter
    def state(self, state: LinkState) -> None:
        self._state = state
        self.on_change()

    @property
    def sent_nbytes(self) -> int:
        return sum(lane.end.sent_nbytes for lane in self.lanes)

    @property
    def shown(self) -> LinkState:
        """Returns the state to show others. A link at rest is shown as resting until it is up again."""
        return LinkState("resting", self.over) if self.is_rested else self.state

    @property
    def is_closing(self) -> bool:
        """Whether this end is at rest and waits for the other end to confirm that."""
        return self.state.phase == "resting" and bool(self.conn)

    def to_open(self, endpoint: LocalEndpoint) -> wire.LinkOpen:
        """Returns the link's first message. All ranks must have reported their offers."""
        return wire.LinkOpen(
            link_id=self.link_id,
            model_identity=endpoint.model_identity,
            numerics=endpoint.numerics,
            layouts=[layout.to_info() for layout in endpoint.layouts],
            num_blocks=list(endpoint.num_blocks),
            options=endpoint.options,
            lanes=[
                wire.LaneOffer(
                    source_rank=each.lane.source_rank,
                    target_rank=each.lane.target_rank,
                    group=each.lane.group,
                    offers=each.end.offers or [],
                    probe_seed=each.end.probe_seed,
                )
                for each in self.lanes
            ],
            pair=self.pair,
        )

    def lanes_of(self, group: int) -> list[OutLane]:
        """Returns the lanes of a group of layers."""
        return [each for each in self.lanes if each.lane.group == group]

    @property
    def precision(self) -> str:
        """Returns the losses of precision of all groups of layers, or "" if there are none.

        All lanes must be ready. Raises LinkError if the lanes of a group differ, because D could not tell the precision
        of its blocks.
        """
        found: dict[int, set[str]] = {}
        for each in self.lanes:
            found.setdefault(each.lane.group, set()).add(each.ready.precision if each.ready is not None else "")
        if any(len(of_group) > 1 for of_group in found.values()):
            raise LinkError("some of its lanes are exact and some are not", retry=True)
        return joined_precision(each for of_group in found.values() for each in of_group)

    def close_lanes(self) -> int:
        """Closes this end of all lanes and releases the link's capacity. Returns the number of bytes sent over them."""
        sent_nbytes = self.sent_nbytes
        for lane in self.lanes:
            lane.end.close()
        self.lanes, self.has_pair, self.must_rest = [], False, False
        return sent_nbytes

    def waits_for_pair(self, now_s: float) -> bool:
        if self.state.phase == "resting":
            return self.awaited_s is not None and not self.conn
        return self.state.phase == "waiting" and self.is_unproven and now_s >= self.due_s

    def wait(self, reason: str, now_s: float) -> None:
        """Schedules another attempt, with a longer delay each time."""
        self.state = LinkState("waiting", reason=reason)
        self.due_s = now_s + self.backoff_s
        self.backoff_s = min(2 * self.backoff_s, LAST_BACKOFF_S)


def lane_of(link: OutLink | None, index: int) -> OutLane | None:
    lanes = link.lanes if link is not None else []  # read once: another thread may close the link at any time
    return lanes[index] if 0 <= index < len(lanes) else None


def check_rank(lane: Lane, info: wire.PeerInfo, layout: KVLayout) -> None:
    """Raises LinkError when the peer's end of a lane is on another rank than expected."""
    if (layout.tp_size, layout.tp_rank) != (info.tp_size, lane.target_rank):
        raise LinkError(
            f"rank {layout.tp_rank} of {layout.tp_size} of {info.name} answered for rank {lane.target_rank} of "
            f"{info.tp_size}"
        )
