"""Describes the memory at both ends of a lane over NIXL, and the byte ranges of a piece. Does not need NIXL."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pd_cluster.devices.device import Device
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.wire import KVPiece

HOST, DEVICE = "DRAM", "VRAM"  # NIXL's names for kinds of memory
PACKED = ""  # the kind of a pool that is not registered
NUM_LANE_BUFFERS = 2  # buffers of a lane with packed payloads: one is filled while the other is read
SLOTS = "slots"  # the key under which P sends the numbers of a lane's buffers

ByteRanges = list[tuple[int, int]]  # (offset, bytes)


class AgentOffer(msgspec.Struct, frozen=True, kw_only=True):
    """P's agent, and the addresses of its pool and buffers.

    These addresses are used only with P's agent: D computes from them which ranges to read at P, within the bounds of
    P's layout. D never writes to P's memory, and never takes a local address from the offer.
    """

    agent: Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
    metadata: Annotated[bytes, msgspec.Meta(max_length=3072)]
    kind: Annotated[str, msgspec.Meta(pattern=f"^({HOST}|{DEVICE})?$")]
    device: Annotated[int, msgspec.Meta(ge=0, lt=1024)]
    pool: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    buffers: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    num_buffers: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    buffer_nbytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    lane: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


LaneBuffers = Annotated[list[int], msgspec.Meta(min_length=NUM_LANE_BUFFERS, max_length=NUM_LANE_BUFFERS)]


def kind_of(device: Device) -> str:
    """Returns NIXL's kind of memory for pools on this device; PACKED if payloads must be packed in host memory."""
    return {"cpu": HOST, "cuda": DEVICE}.get(device.kind, PACKED)


def notice_of(lane: bytes, turn: int) -> bytes:
    """Returns the notice that a lane's payload number `turn` has been read. All notices have the same length."""
    return lane + turn.to_bytes(8, "big")


def byte_ranges_of(layout: KVLayout, piece: KVPiece, blocks: list[int]) -> ByteRanges:
    """Returns the byte ranges of a piece's layers in these blocks of a block-major pool, in the payload's order."""
    at = layout.layers_nbytes(0, piece.first_layer)
    nbytes = layout.layers_nbytes(piece.first_layer, piece.stop_layer)
    places: ByteRanges = []
    for block in blocks:
        offset = block * layout.block_nbytes + at
        if places and sum(places[-1]) == offset:
            places[-1] = (places[-1][0], places[-1][1] + nbytes)
        else:
            places.append((offset, nbytes))
    return places


def cut(source: ByteRanges, target: ByteRanges) -> tuple[ByteRanges, ByteRanges]:
    """Cuts two lists of byte ranges of equal total length so that corresponding ranges have equal lengths."""
    pairs: tuple[ByteRanges, ByteRanges] = ([], [])
    rest, others = list(reversed(source)), list(reversed(target))
    while rest:
        (of, most), (to, room) = rest.pop(), others.pop()
        nbytes = min(most, room)
        pairs[0].append((of, nbytes))
        pairs[1].append((to, nbytes))
        if most > nbytes:
            rest.append((of + nbytes, most - nbytes))
        if room > nbytes:
            others.append((to + nbytes, room - nbytes))
    return pairs
