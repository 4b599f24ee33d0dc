"""Messages between the instances of a unit, whose expert layers compute in step; docs/protocol/membership.md has
the tables.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from pd_cluster.wire.message_base import Message, ShortText

MAX_KEY_NBYTES = 1 << 16


class UnitTerms(Message, frozen=True):
    """The first message between two members: settings that must be equal, by flag. `rank`: the sender's in the unit."""

    rank: Annotated[int, msgspec.Meta(ge=0)]
    terms: Annotated[dict[ShortText, ShortText], msgspec.Meta(max_length=64)]


class UnitKey(Message, frozen=True):
    """A key by which ranks with the same tensor-parallel index find each other; see transport/meeting.py."""

    tp_rank: Annotated[int, msgspec.Meta(ge=0)]
    key: ShortText
    value: Annotated[bytes, msgspec.Meta(max_length=MAX_KEY_NBYTES)]


class UnitWake(Message, frozen=True):
    """The sender has rows to compute, and enters this round."""

    round: Annotated[int, msgspec.Meta(ge=0)]


class UnitDrain(Message, frozen=True):
    """The sender accepts no more requests, and the receiver must not either."""


class UnitDone(Message, frozen=True):
    """The sender has nothing left to compute and accepts nothing more. It ends once all members have sent UnitDone."""
