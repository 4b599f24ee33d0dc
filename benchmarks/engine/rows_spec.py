"""Messages between `benchmarks rows` and its child."""

from __future__ import annotations

import msgspec


class Times(msgspec.Struct, kw_only=True):
    """Seconds of decode steps, as two parallel lists; `own_s` without steps where the kernels can't run."""

    onednn_s: list[float]
    own_s: list[float]
