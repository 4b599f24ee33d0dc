"""Rank 0's commands to the ranks for the tiers below host memory, and the ranks' reports.

`slot` is a block's slot in host memory; `content` is its hash.
"""

from __future__ import annotations

from typing import Literal

import msgspec

LowerKind = Literal["disk", "shared"]
UNKNOWN = -1  # reported for a command that the rank could not try; says nothing about the rank's store


class TierCommand(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all commands."""


class Write(TierCommand, frozen=True):
    """Writes a block. The rank reports 1, or 0 if it could not. Until the report, the slot keeps its content."""

    job: int
    content: bytes
    slot: int


class Fetch(TierCommand, frozen=True):
    """Reads blocks into slots that are not in use. The rank reports how many leading blocks it has read correctly."""

    job: int
    contents: list[bytes]
    slots: list[int]


class Look(TierCommand, frozen=True):
    """Asks how many of the leading contents the rank's store has. The rank reports the number."""

    job: int
    contents: list[bytes]


class Discard(TierCommand, frozen=True):
    contents: list[bytes]


class Clear(TierCommand, frozen=True):
    """Discards all blocks of this instance."""


AnyTierCommand = Write | Fetch | Look | Discard | Clear


class TierDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank's report of a job.

    `num`: the number that the docstring of the command's class defines, or UNKNOWN. `num_bad`: how many blocks read so
    far did not have the content that was written.
    """

    kind: LowerKind
    job: int
    rank: int
    num: int
    num_bad: int = 0


class TierContents(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The contents of a rank's store when it was opened: joined hashes, the least recently used first."""

    kind: LowerKind
    rank: int
    contents: bytes
