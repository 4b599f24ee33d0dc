"""Chooses the frames of a video."""

from __future__ import annotations

import math

import msgspec


class FrameSampling(msgspec.Struct, frozen=True):
    """Reads at most `num_frames` frames, evenly spread, and at most `fps` per second; 0: no limit per second."""

    num_frames: int = 32
    fps: float = 0.0

    def indices(self, num_frames: int, fps: float, most: int | None = None) -> list[int]:
        """Returns the indices for a video with `num_frames` frames. `most`: the request's limit, if it sets one."""
        wanted = min(num_frames, self.num_frames if most is None else most)
        if self.fps:
            wanted = min(wanted, max(1, math.floor(num_frames / fps * self.fps)))
        step = (num_frames - 1) / (wanted - 1) if wanted > 1 else 0.0
        return [int(at * step) for at in range(wanted - 1)] + [num_frames - 1 if wanted > 1 else 0]
