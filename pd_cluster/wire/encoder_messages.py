"""Messages between a prefill worker and an encoder, about images that the encoder computes."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pd_cluster.numerics import Numerics
from pd_cluster.types import Image
from pd_cluster.wire.message_base import Message, ShortText, TransportName

TOKEN_NBYTES = 16
ImageKey = Annotated[bytes, msgspec.Meta(max_length=1024)]  # an image's digest and its request's cache_salt
FileToken = Annotated[bytes, msgspec.Meta(min_length=TOKEN_NBYTES, max_length=TOKEN_NBYTES)]


class EncoderOpen(Message, frozen=True):
    """Opens a connection to an encoder: the model that both must serve, and the transports that the sender allows."""

    model_identity: str
    numerics: Numerics
    transports: Annotated[list[TransportName], msgspec.Meta(max_length=8)]


class EncoderAnswer(Message, frozen=True):
    """`problem`: why the two cannot be a pair; otherwise how features travel.

    `address` names the socket that hands them out on the same host, `group` a pair over `transport`; "": not allowed.
    """

    problem: str = ""
    address: ShortText = ""
    group: ShortText = ""
    transport: TransportName = ""


class EncoderMeet(Message, frozen=True):
    """The sender cannot reach the socket, and opens its end of the pair."""


class Encode(Message, frozen=True):
    """Asks for an image's features. `item` is the asker's own number, never used twice.

    `deadline_s`: seconds from now after which nobody waits for them.
    """

    item: int
    key: ImageKey
    image: Image
    deadline_s: float


class EncodeDone(Message, frozen=True):
    """The features are in a file that the socket gives for `token`, once; over a pair they are its next payload.

    `checksum`: transport/base.Checksum's.
    """

    item: int
    token: FileToken
    nbytes: int
    checksum: int


class EncodeFailed(Message, frozen=True):
    item: int
    reason: str


class EncodeAbort(Message, frozen=True):
    """Nobody waits for these any more."""

    items: list[int]
