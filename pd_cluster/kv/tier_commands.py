"""Orders of rank 0 to each rank about the tiers below host memory, and the ranks' reports.

`slot` is a block's place in the host's cache; `content` its hash.
"""

from __future__ import annotations

from typing import Literal

import msgspec

LowerKind = Literal["disk", "shared"]
UNKNOWN = -1  # what a rank reports of an order that it could not try: nothing is said about what its store has


class TierCommand(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all orders."""


class Write(TierCommand, frozen=True):
    """The slot keeps its content until the rank has reported 1, or 0 if it could not be written."""

    job: int
    content: bytes
    slot: int


class Fetch(TierCommand, frozen=True):
    """Reads blocks into slots that nothing else uses; the rank reports how many at the beginning are right."""

    job: int
    contents: list[bytes]
    slots: list[int]


class Look(TierCommand, frozen=True):
    """The rank reports how many contents at the beginning are there."""

    job: int
    contents: list[bytes]


class Discard(TierCommand, frozen=True):
    contents: list[bytes]


class Clear(TierCommand, frozen=True):
    """Discards everything of this instance's own."""


AnyTierCommand = Write | Fetch | Look | Discard | Clear


class TierDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank's report of a job. `num`: see its order, or UNKNOWN.

    `num_bad`: its blocks so far that were not what had been written.
    """

    kind: LowerKind
    job: int
    rank: int
    num: int
    num_bad: int = 0


class TierContents(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The contents of a rank's store at its start, the least recently used first: hashes, joined."""

    kind: LowerKind
    rank: int
    contents: bytes
