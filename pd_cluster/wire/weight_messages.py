"""Messages by which an instance without the files of a version gets them from another process.

docs/protocol/weights.md, "Copies", has the state × event table.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from pd_cluster.wire.membership_messages import WeightVersion
from pd_cluster.wire.message_base import Message, PublicKey, ShortText

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class SeekWeights(Message, frozen=True):
    """The sender lacks the files of the version with this epoch. `failed`: sources that did not deliver them.

    `is_over`: the sender now has the files, so its source is free for others.
    """

    epoch: int
    failed: Annotated[list[ShortText], msgspec.Meta(max_length=1024)] = []
    is_over: bool = False


class TakeWeights(Message, frozen=True):
    """The receiver listens for the owner of `public_key`, and answers with `WeightAddress`.

    `source`: the owner's name. "": no source is free now; with a `problem`, none can send the files.
    """

    epoch: int
    source: ShortText = ""
    public_key: PublicKey = b""
    problem: ShortText = ""


class WeightAddress(Message, frozen=True):
    """Where the sender listens for `source`, and its key for this connection."""

    epoch: int
    source: ShortText
    port: Port
    public_key: PublicKey


class SendWeights(Message, frozen=True):
    """The receiver sends the files of a version to this address, with the key of its mailbox."""

    version: WeightVersion
    host: ShortText
    port: Port
    public_key: PublicKey
