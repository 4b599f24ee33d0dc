"""What `bench rows` and its child tell each other."""

from __future__ import annotations

import msgspec


class Times(msgspec.Struct, kw_only=True):
    """Seconds of decode steps, one list beside the other."""

    unpadded_s: list[float]
    padded_s: list[float]
