"""What rank 0 of an instance tells its followers, and what they tell it. msgpack over a socket pair of the parent's.

`conn` and `lane` name one end of a lane. Nobody but rank 0 can write to a follower's socket.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pd_cluster import wire
from pd_cluster.kv.layout import Lane
from pd_cluster.kv.swap import Kind
from pd_cluster.transport.events import LinkEvent


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all of them."""


# ---- rank 0 -> follower: what to compute


class Step(Message, frozen=True):
    """A StepInput of model/batch.py: int64 numbers, little endian.

    `is_ahead`: rank 0's device hands out the input ids, which no host knows yet. `by_layers`: rank 0 follows the step
    layer by layer, and so does everybody.
    """

    rows: bytes
    input_ids: bytes
    blocks: bytes
    is_ahead: bool
    by_layers: bool


class Moves(Message, frozen=True):
    moves: Sequence[tuple[Kind, int, int]]


class Reached(msgspec.Struct, frozen=True, order=True, array_like=True):
    """How far an engine is: steps begun, and layers that the last of them has written."""

    num_steps: int = 0
    num_layers: int = 0


class Ping(Message, frozen=True):
    """`Pong` is the answer, whatever this rank computes."""


# ---- rank 0 -> follower: P's ends of lanes


class OpenSend(Message, frozen=True):
    """`Offers` follows, or `Reported` with the failure."""

    conn: str
    lane: int
    link_id: str
    peer: str
    between: Lane


class Open(Message, frozen=True):
    conn: str
    lane: int
    transport: wire.TransportName
    peer: wire.LayoutInfo


class Settle(Message, frozen=True):
    conn: str
    lane: int


class SendProbe(Message, frozen=True):
    conn: str
    lane: int


class Ship(Message, frozen=True):
    """Once this rank is as far as `after`: rank 0 was, when it said so."""

    conn: str
    lane: int
    transfer_id: str
    index: int
    piece: wire.KVPiece
    after: Reached


class ShipEnd(Message, frozen=True):
    conn: str
    lane: int
    end: wire.KVEnd
    after: Reached


class Drop(Message, frozen=True):
    conn: str
    lane: int
    transfer_id: str


class CloseSend(Message, frozen=True):
    conn: str
    lane: int


# ---- rank 0 -> follower: D's ends of lanes


class OpenReceive(Message, frozen=True):
    conn: str
    lane: int
    peer: str
    host: str
    opened: wire.LinkOpen


class StartReceive(Message, frozen=True):
    conn: str
    lane: int


class Frame(Message, frozen=True):
    conn: str
    lane: int
    frame: wire.KVFrame


class Begin(Message, frozen=True):
    """Once this rank has launched what rank 0 had: that may still write what its last owner left to these blocks."""

    conn: str
    lane: int
    transfer_id: str
    block_ids: list[int]
    first_token: int
    num_tokens: int
    after: Reached


class Forget(Message, frozen=True):
    conn: str
    lane: int
    transfer_id: str


class CloseReceive(Message, frozen=True):
    conn: str
    lane: int


# ---- follower -> rank 0


class Pong(Message, frozen=True):
    pass


class Offers(Message, frozen=True):
    """What this rank offers in a lane, how large its payloads may be, and what its probe block holds."""

    conn: str
    lane: int
    offers: list[wire.TransportOffer]
    max_payloads: dict[wire.TransportName, int]
    probe_seed: int


class Posted(Message, frozen=True):
    """To be sent over the link's connection."""

    conn: str
    body: wire.Body


class Reported(Message, frozen=True):
    conn: str
    lane: int
    event: LinkEvent


class Counted(Message, frozen=True):
    """Of one end of a lane, since it was opened."""

    conn: str
    lane: int
    nbytes: int
    num_dropped: int = 0


ToFollower = (
    Step
    | Moves
    | Ping
    | OpenSend
    | Open
    | Settle
    | SendProbe
    | Ship
    | ShipEnd
    | Drop
    | CloseSend
    | OpenReceive
    | StartReceive
    | Frame
    | Begin
    | Forget
    | CloseReceive
)
OfLanes = Offers | Posted | Reported | Counted
FromFollower = Pong | OfLanes
