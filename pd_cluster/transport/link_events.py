"""Events that links' threads send to the engine's thread, and the figures of pieces for timelines."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from pd_cluster import wire
from pd_cluster.types import TokenOutput


class LinkFailed(msgspec.Struct, frozen=True, tag=True):
    """This end of the link is unusable."""

    conn: str
    reason: str


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """The whole KV cache of a transfer has arrived. The transfer's end follows, with the first tokens."""

    transfer_id: str


class Landed(msgspec.Struct, frozen=True, tag=True):
    transfer_id: str
    first_tokens: list[TokenOutput]
    nbytes: int


class LandFault(msgspec.Struct, frozen=True, tag=True):
    transfer_id: str
    reason: str


class Drained(msgspec.Struct, frozen=True, tag=True):
    """The landing blocks of this transfer will not be written any more."""

    transfer_id: str


LinkEvent = LinkFailed | Arrived | Landed | LandFault | Drained
Report = Callable[[LinkEvent], None]


def numbers_of(piece: wire.KVPiece, nbytes: int, started_s: float) -> dict[str, int]:
    """Returns a timeline's figures for a piece that was sent or has landed."""
    return {
        "start": piece.first_token,
        "stop": piece.stop_token,
        "first_layer": piece.first_layer,
        "num_layers": piece.num_layers,
        "nbytes": nbytes,
        "took_us": round((time.monotonic() - started_s) * 1e6),
    }
