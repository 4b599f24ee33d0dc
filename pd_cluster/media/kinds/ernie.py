"""Pictures of ERNIE 4.5 VL: as Qwen2-VL's with one frame a patch; experts of their own compute them, marks included."""

from __future__ import annotations

from pd_cluster.media.given import Given
from pd_cluster.media.kinds.qwen import GridRules, grid_rules

SIZES = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 6177}


def ernie(given: Given) -> GridRules:
    """Raises ModelError."""
    marks = (
        given.token_id("image_start_token_id", default=101304),
        given.token_id("image_end_token_id", default=101305),
    )
    return grid_rules(given, 14, 100295, SIZES, num_frames=1, marks=marks)
