"""Messages of one transfer of KV cache, and the headers that announce its payloads."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pd_cluster.types import RequestSpec, TokenOutput
from pd_cluster.wire.message_base import MAX_GROUPS, Message, TransportName


class Offer(Message, frozen=True):
    """`variant`: the adapter that the KV cache was computed with, as in the request spec.

    `num_cached_tokens`: prompt tokens that P has not computed for this request.
    """

    transfer_id: str
    num_tokens: int
    variant: str = ""
    num_cached_tokens: int = 0


class Pull(Message, frozen=True):
    """Asks a prefill instance for the KV cache of the first `num_tokens` tokens of a request's prompt, if its caches
    have it.

    The answer is an `Offer` of at most this many tokens, or `Revoke`. `root`: the hash from which the sender chains the
    hashes of the prompt's blocks. If the receiver's differs, for example because its weights do, it has no such blocks.
    """

    transfer_id: str
    order: RequestSpec
    num_tokens: int
    root: bytes


class Credit(Message, frozen=True):
    """D has landing blocks in every group of layers.

    `first_tokens`: for each group, the first prompt token that D wants; 0 for a state, which counts as one token.
    """

    transfer_id: str
    first_tokens: Annotated[list[int], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]


class Revoke(Message, frozen=True):
    transfer_id: str


class Cancel(Message, frozen=True):
    transfer_id: str
    reason: str


class KVPiece(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [first_token, first_token + num_tokens) of a prompt in layers [first_layer, first_layer + num_layers).

    Layers are counted within the lane's group of layers; a state is token 0. `block_ids` are P's blocks of these
    tokens, for one-sided transports.
    """

    first_token: int
    num_tokens: int
    first_layer: int
    num_layers: int
    block_ids: list[int]

    @property
    def stop_token(self) -> int:
        return self.first_token + self.num_tokens

    @property
    def stop_layer(self) -> int:
        return self.first_layer + self.num_layers


class KVChunk(msgspec.Struct, frozen=True, tag=True):
    """Announces one payload. `index` counts the chunks of this transfer from 0; checksum 0: no checksum."""

    transfer_id: str
    index: int
    piece: KVPiece
    nbytes: int
    checksum: int


class KVEnd(msgspec.Struct, frozen=True, tag=True):
    """All chunks of a transfer have been sent in this lane.

    `num_tokens`: the prompt tokens that the lane's group of layers has, including cached ones; 1 for a state.
    """

    transfer_id: str
    num_chunks: int
    num_tokens: int
    first_tokens: list[TokenOutput]


class KVProbe(msgspec.Struct, frozen=True, tag=True):
    """Announces the probe block as a payload of this transport."""

    transport: TransportName
    chunk: KVChunk


KVHeader = KVChunk | KVEnd | KVProbe


class KVFrame(Message, frozen=True):
    """A header in transit: `sequence` counts the frames of its lane from 0; see transport/link_frames.py."""

    sequence: int
    header: bytes
    mac: bytes
    lane: int = 0


class Confirm(Message, frozen=True):
    transfer_id: str


class Confirmed(Message, frozen=True):
    transfer_id: str
    held: bool
