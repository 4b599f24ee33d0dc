"""Lists the tiers of an instance's KV blocks for display, so that a new tier needs no new display code.

Knows nothing of how the list is shown.
"""

from __future__ import annotations

from typing import Any

from pd_cluster.wire import Load


def tiers_of(load: Load) -> list[dict[str, Any]]:
    """Returns the tiers that have or may have blocks, fastest first.

    `num_blocks`: None if the size is not reported. `num_used_blocks`: blocks with content. `num_hit_tokens`: prompt
    tokens found in the tier so far; None if the tier is not searched. `token_s`: the measured seconds to load a token's
    KV cache from the tier; None if this was not measured, or nothing needs to be loaded.
    """
    pool = load.num_held_blocks + load.num_cached_blocks
    found = [_tier("pool", load.num_blocks, pool, load.num_prefix_hit_tokens)]
    if load.num_host_cache_blocks or load.num_host_hit_tokens:
        token_s = load.tier_token_s.get("host")
        found.append(_tier("host cache", None, load.num_host_cache_blocks, load.num_host_hit_tokens, token_s))
    if load.num_disk_cache_blocks or load.num_disk_hit_tokens:
        token_s = load.tier_token_s.get("disk")
        found.append(_tier("disk cache", None, load.num_disk_cache_blocks, load.num_disk_hit_tokens, token_s))
    if load.num_swap_blocks:
        found.append(_tier("swap", load.num_swap_blocks, load.num_swap_blocks - load.num_free_swap_blocks))
    return found


def _tier(
    name: str, num_blocks: int | None, num_used: int, num_hit_tokens: int | None = None, token_s: float | None = None
) -> dict[str, Any]:
    return {
        "name": name,
        "num_blocks": num_blocks,
        "num_used_blocks": num_used,
        "num_hit_tokens": num_hit_tokens,
        "token_s": token_s,
    }
