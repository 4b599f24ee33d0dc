"""One link to a decode instance, seen from P: its state and its lanes. Knows nothing of other links."""

from __future__ import annotations

from dataclasses import dataclass, field

from pd_cluster import wire
from pd_cluster.engine.handover.links import SendEnd
from pd_cluster.errors import LinkError
from pd_cluster.kv.layout import KVLayout, Lane
from pd_cluster.types import LinkState

WAITING = LinkState("waiting")
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.5, 5.0


@dataclass(slots=True)
class OutLane:
    """`answered`: the transports that D's rank has chosen so far; `ready`: set once its probe has passed one."""

    lane: Lane
    end: SendEnd
    answered: set[wire.TransportName] = field(default_factory=set)
    ready: wire.LinkReady | None = None


@dataclass(slots=True)
class OutLink:
    info: wire.PeerInfo
    state: LinkState = WAITING
    conn: str = ""
    link_id: str = ""
    lanes: list[OutLane] = field(default_factory=list)
    is_connected: bool = False
    is_announced: bool = False  # LinkOpen has been sent
    due_s: float = 0.0  # waiting: time of the next attempt; opening: time to give up
    backoff_s: float = FIRST_BACKOFF_S
    peer_block_size: int = 0  # tokens
    used_s: float = 0.0  # when something was last sent over it

    @property
    def sent_nbytes(self) -> int:
        return sum(lane.end.sent_nbytes for lane in self.lanes)

    def wait(self, reason: str, now_s: float) -> None:
        """Schedules another attempt, with a longer delay each time."""
        self.state = LinkState("waiting", reason=reason)
        self.due_s = now_s + self.backoff_s
        self.backoff_s = min(2 * self.backoff_s, LAST_BACKOFF_S)


def lane_of(link: OutLink | None, index: int) -> OutLane | None:
    lanes = link.lanes if link is not None else []  # read once: another thread may close the link meanwhile
    return lanes[index] if 0 <= index < len(lanes) else None


def check_rank(lane: Lane, info: wire.PeerInfo, layout: KVLayout) -> None:
    """Raises LinkError when the peer's end of a lane is on another rank than expected."""
    if (layout.tp_size, layout.tp_rank) != (info.tp_size, lane.target_rank):
        raise LinkError(
            f"rank {layout.tp_rank} of {layout.tp_size} of {info.name} answered for rank {lane.target_rank} of "
            f"{info.tp_size}"
        )
