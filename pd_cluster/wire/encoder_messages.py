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
    """Opens a connection to an encoder: states the model that both must serve and the transports that P allows."""

    model_identity: str
    numerics: Numerics
    transports: Annotated[list[TransportName], msgspec.Meta(max_length=8)]


class EncoderAnswer(Message, frozen=True):
    """`problem`: why the two cannot work together; if empty, the other fields say how features are sent.

    `address`: the socket that serves features on the same host. `group`: the name of a pair over `transport`. If one of
    them is "", features are not sent that way.
    """

    problem: str = ""
    address: ShortText = ""
    group: ShortText = ""
    transport: TransportName = ""


class EncoderMeet(Message, frozen=True):
    """The sender cannot reach the socket, and opens its end of the pair instead."""


class Encode(Message, frozen=True):
    """Asks for an image's features. `item` is a number that the sender uses only once.

    `deadline_s`: the seconds after which the sender stops waiting for the features.
    """

    item: int
    key: ImageKey
    image: Image
    deadline_s: float


class EncodeDone(Message, frozen=True):
    """The features are ready. The socket serves them once, for `token`; over a pair, they are the next payload.

    `checksum`: as in transport/transport_interface.py.
    """

    item: int
    token: FileToken
    nbytes: int
    checksum: int


class EncodeFailed(Message, frozen=True):
    item: int
    reason: str


class EncodeAbort(Message, frozen=True):
    """The sender no longer waits for these features."""

    items: list[int]
