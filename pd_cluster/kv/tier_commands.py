"""Commands of rank 0 to the ranks for the tiers below host memory, and the ranks' reports.

`slot` is a block's slot in the host's cache; `content` its hash.
"""

from __future__ import annotations

from typing import Literal

import msgspec

LowerKind = Literal["disk", "shared"]
UNKNOWN = -1  # the report for a command that a rank could not try; it proves nothing about the rank's store


class TierCommand(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all commands."""


class Write(TierCommand, frozen=True):
    """The rank reports 1, or 0 if the block could not be written. Until its report the slot keeps its content."""

    job: int
    content: bytes
    slot: int


class Fetch(TierCommand, frozen=True):
    """Reads blocks into slots that nothing else uses; the rank reports the number of leading blocks that it read
    correctly.
    """

    job: int
    contents: list[bytes]
    slots: list[int]


class Look(TierCommand, frozen=True):
    """The rank reports how many of the leading contents its store has."""

    job: int
    contents: list[bytes]


class Discard(TierCommand, frozen=True):
    contents: list[bytes]


class Clear(TierCommand, frozen=True):
    """Discards everything of this instance."""


AnyTierCommand = Write | Fetch | Look | Discard | Clear


class TierDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank's report of a job.

    `num`: the number that the command's class describes, or UNKNOWN. `num_bad`: blocks so far that were read with
    another content than written.
    """

    kind: LowerKind
    job: int
    rank: int
    num: int
    num_bad: int = 0


class TierContents(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The contents of a rank's store at its start, the least recently used first: joined hashes."""

    kind: LowerKind
    rank: int
    contents: bytes
