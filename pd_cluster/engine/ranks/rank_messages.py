"""Messages between rank 0 of an instance and its followers: msgpack over a socket pair made by the parent.

`conn` and `lane` identify one end of a lane. Only rank 0 can write to a follower's socket.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pd_cluster import wire
from pd_cluster.checkpoints.replaced_weights import Stamp
from pd_cluster.kv.kv_layout import Lane
from pd_cluster.kv.pool_memory import GroupMove
from pd_cluster.kv.tier_commands import AnyTierCommand, LowerKind, TierContents, TierDone
from pd_cluster.transport.link_events import LinkEvent
from pd_cluster.types import Image


class RankMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


# ---- rank 0 -> follower: steps


class StepImage(msgspec.Struct, frozen=True, array_like=True):
    """An ImagePart of model/inputs/image_rows.py. Only the rank that computes its features gets the pixels."""

    row: int
    start: int
    num_tokens: int
    key: bytes
    image: Image
    is_landed: bool


class Step(RankMessage, frozen=True, omit_defaults=True):
    """A StepInput of model/inputs/step_input.py, as little-endian int64 values.

    `rope_positions`, `adapters`, `virtual`, `leaders` and `keeps` are empty where the StepInput has None.
    """

    rows: bytes
    input_ids: bytes
    blocks: bytes
    is_ahead: bool  # no host knows the input ids yet, so rank 0's device broadcasts them
    by_layers: bool  # all ranks track their progress layer by layer
    rope_positions: bytes = b""
    adapters: bytes = b""
    images: tuple[StepImage, ...] = ()
    virtual: bytes = b""
    leaders: bytes = b""
    further: tuple[tuple[bytes, bytes], ...] = ()  # by further group: the sequences' numbers of blocks, and the blocks
    keeps: bytes = b""
    unit_rows: tuple[int, ...] = ()  # the rows of each member of the unit, if there is a unit


class TakePart(RankMessage, frozen=True):
    """A step of a unit in which this instance has no rows; its experts compute for the other members' rows."""

    unit_rows: tuple[int, ...]


class Moves(RankMessage, frozen=True):
    moves: Sequence[GroupMove]


class TierCommands(RankMessage, frozen=True):
    """Commands for the rank's part of a tier, after all earlier moves. A follower answers with `TierReport`."""

    kind: LowerKind
    orders: list[AnyTierCommand]


class LoadAdapter(RankMessage, frozen=True):
    """Loads the adapter in the folder `path`. A follower answers with `LoadedAdapter`."""

    digest: str
    path: str
    slot: int
    max_rank: int


class DropAdapter(RankMessage, frozen=True):
    """Drops an adapter between the preceding and the following step."""

    digest: str


class Rest(RankMessage, frozen=True):
    """Changes the rank's memory to this level of sleep, between the preceding and the following step."""

    level: wire.SleepLevel


class LoadWeights(RankMessage, frozen=True):
    """Loads the weights of a folder whose files have this stamp, between the preceding and the following step."""

    path: str
    stamp: Stamp


class Reached(msgspec.Struct, frozen=True, order=True, array_like=True):
    """An engine's progress: the number of begun steps, and the number of layers that the last one has written."""

    num_steps: int = 0
    num_layers: int = 0


class Ping(RankMessage, frozen=True):
    """A follower answers with `Pong` at once, even while it computes."""


# ---- rank 0 -> follower: ends of lanes


class OpenSend(RankMessage, frozen=True):
    """Opens P's end of a lane. The follower answers with `Offers`, or with `Reported` if it fails."""

    conn: str
    lane: int
    link_id: str
    peer: str
    between: Lane


class OpenReceive(RankMessage, frozen=True):
    """Opens D's end of a lane. The follower sends `Reported` if it fails."""

    conn: str
    lane: int
    peer: str
    opened: wire.LinkOpen


class Call(RankMessage, frozen=True):
    """A call of a method of an end, with its arguments as an array; see lane_calls.py.

    It takes effect after the preceding calls, once this rank has reached `after`; None: at once.
    """

    conn: str
    lane: int
    method: str
    arguments: msgspec.Raw
    after: Reached | None


# ---- follower -> rank 0


class Pong(RankMessage, frozen=True):
    pass


class LoadedAdapter(RankMessage, frozen=True):
    """`problem`: why the adapter could not be loaded; "" if it was loaded."""

    rank: int
    digest: str
    problem: str


class TierReport(RankMessage, frozen=True):
    report: TierDone | TierContents


class Offers(RankMessage, frozen=True):
    """This rank's offers for a lane, its largest payload by transport, and the seed of its probe block."""

    conn: str
    lane: int
    offers: list[wire.TransportOffer]
    max_payloads: dict[wire.TransportName, int]
    probe_seed: int


class Posted(RankMessage, frozen=True):
    """A message that rank 0 must send over the link's connection."""

    conn: str
    body: wire.Body


class Reported(RankMessage, frozen=True):
    conn: str
    lane: int
    event: LinkEvent


class Counted(RankMessage, frozen=True):
    """The totals of one end of a lane since it was opened."""

    conn: str
    lane: int
    nbytes: int
    num_dropped: int = 0


ToLanes = OpenSend | OpenReceive | Call
ToFollower = Step | TakePart | Moves | TierCommands | LoadAdapter | DropAdapter | Rest | LoadWeights | Ping | ToLanes
OfLanes = Offers | Posted | Reported | Counted
FromFollower = Pong | LoadedAdapter | TierReport | OfLanes
