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
    """An ImagePart of model/inputs/image_rows.py. Only the rank that computes the image's features gets its pixels."""

    row: int
    start: int
    num_tokens: int
    key: bytes
    image: Image
    is_landed: bool


class Step(RankMessage, frozen=True, omit_defaults=True):
    """A StepInput of model/inputs/step_input.py, as little-endian int64 values.

    `rope_positions`, `adapters`, `virtual`, `leaders` and `keeps` are empty if they are None there; `further` has the
    blocks of other groups by sequence. `unit_rows`: the rows of each member of the unit, if there is one. `is_ahead`:
    rank 0's device broadcasts the input ids, which no host knows yet. `by_layers`: rank 0 tracks the step layer by
    layer, and so do all followers.
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
    leaders: bytes = b""
    further: tuple[tuple[bytes, bytes], ...] = ()
    keeps: bytes = b""
    unit_rows: tuple[int, ...] = ()


class TakePart(RankMessage, frozen=True):
    """A step of a unit in which this instance has no rows: it computes its experts for the other members' rows."""

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
    """Takes effect between the preceding and the following step."""

    digest: str


class Rest(RankMessage, frozen=True):
    """Changes the rank's memory to this level of sleep, between the preceding and the following step."""

    level: wire.SleepLevel


class LoadWeights(RankMessage, frozen=True):
    """Loads the weights of a folder whose files have this stamp, between the preceding and the following step."""

    path: str
    stamp: Stamp


class Reached(msgspec.Struct, frozen=True, order=True, array_like=True):
    """An engine's progress: begun steps, and layers that the last of them has written."""

    num_steps: int = 0
    num_layers: int = 0


class Ping(RankMessage, frozen=True):
    """A follower answers with `Pong` at once, even while it computes."""


# ---- rank 0 -> follower: ends of lanes


class OpenSend(RankMessage, frozen=True):
    """P's end. `Offers` follows, or `Reported` with the failure."""

    conn: str
    lane: int
    link_id: str
    peer: str
    between: Lane


class OpenReceive(RankMessage, frozen=True):
    """D's end. `Reported` follows if it fails."""

    conn: str
    lane: int
    peer: str
    opened: wire.LinkOpen


class Call(RankMessage, frozen=True):
    """A method of an end, with its arguments as an array; see lane_calls.py.

    Takes effect after the preceding calls, once this rank has reached `after`; None: at once.
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
    """The totals of one end of a lane since it was opened."""

    conn: str
    lane: int
    nbytes: int
    num_dropped: int = 0


ToLanes = OpenSend | OpenReceive | Call
ToFollower = Step | TakePart | Moves | TierCommands | LoadAdapter | DropAdapter | Rest | LoadWeights | Ping | ToLanes
OfLanes = Offers | Posted | Reported | Counted
FromFollower = Pong | LoadedAdapter | TierReport | OfLanes
