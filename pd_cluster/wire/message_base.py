"""The base, sizes and type names that all messages share."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec

PROTOCOL_VERSION = 31
MAX_MESSAGE_NBYTES = 64 << 20
MAX_OFFER_NBYTES = 4096  # of a transport's description of itself
KEY_NBYTES = 32
MOST_GROUPS = 3  # of a model's layers, each with a pool of its own
OWNER_NBYTES = 8  # of what stands for a client
Owner = Annotated[bytes, msgspec.Meta(max_length=OWNER_NBYTES)]
PublicKey = Annotated[bytes, msgspec.Meta(max_length=KEY_NBYTES)]  # of a process's CURVE key pair; b"": none yet
MOST_NODE_KEYS = 2  # of one node at a time: the new one and the one before, while it is rotated
MOST_TEXT = 256
ShortText = Annotated[str, msgspec.Meta(max_length=MOST_TEXT)]
TransportName = Annotated[str, msgspec.Meta(max_length=32)]  # one of transport/transport_table.py
KVWireDtype = Literal["auto", "int8"]
PairWish = Literal["free", "none", "now"]


def owner_of(client: str) -> bytes:
    """Returns what stands for a client where clients share: workers need not know its name."""
    return hashlib.sha256(client.encode()).digest()[:OWNER_NBYTES]


class NodeProof(msgspec.Struct, frozen=True, array_like=True):
    """Proves that the sender has the private key of a node's public one; net/node_proofs.py computes it."""

    public_key: PublicKey
    mac: Annotated[bytes, msgspec.Meta(max_length=32)]


NodeProofs = Annotated[tuple[NodeProof, ...], msgspec.Meta(max_length=MOST_NODE_KEYS)]


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages in envelopes."""
