"""The base, sizes and type names that all messages share."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec

PROTOCOL_VERSION = 37
MAX_MESSAGE_NBYTES = 64 << 20
MAX_OFFER_NBYTES = 4096  # the size of a transport's data in an offer
KEY_NBYTES = 32
MAX_GROUPS = 3  # the most groups of layers of a model; each has its own pool
OWNER_NBYTES = 8  # the size of a client's pseudonym
Owner = Annotated[bytes, msgspec.Meta(max_length=OWNER_NBYTES)]
PublicKey = Annotated[bytes, msgspec.Meta(max_length=KEY_NBYTES)]  # a key of CURVE; b"": unknown
MOST_NODE_KEYS = 2  # keys of one node at a time: the new and the previous one during a rotation
MOST_TEXT = 256
ShortText = Annotated[str, msgspec.Meta(max_length=MOST_TEXT)]
TransportName = Annotated[str, msgspec.Meta(max_length=32)]  # a name in transport/transport_table.py
KVWireDtype = Literal["auto", "int8"]
PairWish = Literal["free", "none", "now"]


def owner_of(client: str) -> bytes:
    """Returns a pseudonym of a client, since workers need not know its name."""
    return hashlib.sha256(client.encode()).digest()[:OWNER_NBYTES]


class NodeProof(msgspec.Struct, frozen=True, array_like=True):
    """Proves that the sender has the private key of a node's public key; extras/node_keys computes it."""

    public_key: PublicKey
    mac: Annotated[bytes, msgspec.Meta(max_length=32)]


NodeProofs = Annotated[tuple[NodeProof, ...], msgspec.Meta(max_length=MOST_NODE_KEYS)]


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages in envelopes."""
