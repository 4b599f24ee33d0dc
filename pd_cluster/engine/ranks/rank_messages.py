"""Messages between rank 0 of an instance and its followers. msgpack over a socket pair made by the parent.

`conn` and `lane` identify one end of a lane. Only rank 0 can write to a follower's socket.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pd_cluster import wire
from pd_cluster.kv.layout import Lane
from pd_cluster.kv.memory import Move
from pd_cluster.kv.tier_orders import AnyOrder, LowerKind, TierContents, TierDone
from pd_cluster.transport.events import LinkEvent
from pd_cluster.types import Image


class RankMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


# ---- rank 0 -> follower: steps


class StepImage(msgspec.Struct, frozen=True, array_like=True):
    """An ImagePart of model/image_rows.py. The image has pixels only for the rank that computes its features."""

    row: int
    start: int
    num_tokens: int
    key: bytes
    image: Image
    is_landed: bool


class Step(RankMessage, frozen=True, omit_defaults=True):
    """A StepInput of model/batch.py: int64 numbers, little endian. `rope_positions`, `adapters` and `virtual` are empty
    where they are None there.

    `is_ahead`: rank 0's device broadcasts the input ids, which no host knows yet. `by_layers`: rank 0 tracks the step
    layer by layer, and so do all followers.
    """

    rows: bytes
    input_ids: bytes
    blocks: bytes
    is_ahead: bool
    by_layers: bool
    rope_positions: bytes = b""
    adapters: bytes = b""
    images: tuple[StepImage, ...] = ()
    virtual: bytes = b""


class Moves(RankMessage, frozen=True):
    moves: Sequence[tuple[Move, int, int]]


class TierOrders(RankMessage, frozen=True):
    """Orders for the rank's part of a tier, behind all moves before them. A follower answers with `TierReport`."""

    kind: LowerKind
    orders: list[AnyOrder]


class LoadAdapter(RankMessage, frozen=True):
    """A follower answers with `LoadedAdapter`; `path` is its folder."""

    digest: str
    path: str
    slot: int
    max_rank: int


class DropAdapter(RankMessage, frozen=True):
    """Takes effect between the steps before and behind it."""

    digest: str


class Rest(RankMessage, frozen=True):
    """The rank's share of the memory goes to this level of sleep, between the steps before and behind it."""

    level: wire.SleepLevel


class Reached(msgspec.Struct, frozen=True, order=True, array_like=True):
    """An engine's progress: steps begun, and layers that the last of them has written."""

    num_steps: int = 0
    num_layers: int = 0


class Ping(RankMessage, frozen=True):
    """A follower answers with `Pong`, whatever it computes."""


# ---- rank 0 -> follower: P's ends of lanes


class OpenSend(RankMessage, frozen=True):
    """`Offers` follows, or `Reported` with the failure."""

    conn: str
    lane: int
    link_id: str
    peer: str
    between: Lane


class Open(RankMessage, frozen=True):
    conn: str
    lane: int
    transport: wire.TransportName
    peer: wire.LayoutInfo


class Settle(RankMessage, frozen=True):
    conn: str
    lane: int


class SendProbe(RankMessage, frozen=True):
    conn: str
    lane: int


class Ship(RankMessage, frozen=True):
    """Takes effect once this rank has reached `after`, rank 0's progress when it sent this."""

    conn: str
    lane: int
    transfer_id: str
    index: int
    piece: wire.KVPiece
    after: Reached


class ShipEnd(RankMessage, frozen=True):
    conn: str
    lane: int
    end: wire.KVEnd
    after: Reached


class Drop(RankMessage, frozen=True):
    conn: str
    lane: int
    transfer_id: str


class CloseSend(RankMessage, frozen=True):
    conn: str
    lane: int


# ---- rank 0 -> follower: either end of a lane


class Value(RankMessage, frozen=True):
    conn: str
    lane: int
    value: wire.LinkValue


# ---- rank 0 -> follower: D's ends of lanes


class OpenReceive(RankMessage, frozen=True):
    conn: str
    lane: int
    peer: str
    opened: wire.LinkOpen


class StartReceive(RankMessage, frozen=True):
    conn: str
    lane: int


class Frame(RankMessage, frozen=True):
    conn: str
    lane: int
    frame: wire.KVFrame


class Begin(RankMessage, frozen=True):
    """Takes effect once this rank has launched all that rank 0 had, since that may still write to these blocks."""

    conn: str
    lane: int
    transfer_id: str
    block_ids: list[int]
    first_token: int
    num_tokens: int
    after: Reached


class Forget(RankMessage, frozen=True):
    conn: str
    lane: int
    transfer_id: str


class CloseReceive(RankMessage, frozen=True):
    conn: str
    lane: int


# ---- follower -> rank 0


class Pong(RankMessage, frozen=True):
    pass


class LoadedAdapter(RankMessage, frozen=True):
    """`problem`: why it could not be loaded; "" if it was."""

    rank: int
    digest: str
    problem: str


class TierReport(RankMessage, frozen=True):
    report: TierDone | TierContents


class Offers(RankMessage, frozen=True):
    """This rank's offers for a lane, its largest payloads, and the content of its probe block."""

    conn: str
    lane: int
    offers: list[wire.TransportOffer]
    max_payloads: dict[wire.TransportName, int]
    probe_seed: int


class Posted(RankMessage, frozen=True):
    """A message to send over the link's connection."""

    conn: str
    body: wire.Body


class Reported(RankMessage, frozen=True):
    conn: str
    lane: int
    event: LinkEvent


class Counted(RankMessage, frozen=True):
    """Totals of one end of a lane since it was opened."""

    conn: str
    lane: int
    nbytes: int
    num_dropped: int = 0


ToFollower = (
    Step
    | Moves
    | TierOrders
    | LoadAdapter
    | DropAdapter
    | Rest
    | Ping
    | OpenSend
    | Open
    | Settle
    | SendProbe
    | Ship
    | ShipEnd
    | Drop
    | CloseSend
    | Value
    | OpenReceive
    | StartReceive
    | Frame
    | Begin
    | Forget
    | CloseReceive
)
OfLanes = Offers | Posted | Reported | Counted
FromFollower = Pong | LoadedAdapter | TierReport | OfLanes
