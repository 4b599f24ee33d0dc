"""Messages between `bench rows` and its child."""

from __future__ import annotations

import msgspec


class Times(msgspec.Struct, kw_only=True):
    """Seconds of decode steps, as two parallel lists."""

    unpadded_s: list[float]
    padded_s: list[float]
