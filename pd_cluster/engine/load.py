"""The load that a worker reports with every heartbeat, collected from the parts that know it."""

from __future__ import annotations

from typing import Any

from pd_cluster import wire
from pd_cluster.engine.handover.exports import Exports
from pd_cluster.engine.handover.imports import Imports
from pd_cluster.engine.handover.in_links import InLinks
from pd_cluster.engine.handover.out_links import OutLinks
from pd_cluster.engine.pace import StepPace
from pd_cluster.engine.step.core import EngineCore
from pd_cluster.engine.step.scheduler import StepScheduler
from pd_cluster.types import Status


def load_of(
    core: EngineCore,
    exports: Exports,
    imports: Imports,
    out_links: OutLinks,
    in_links: InLinks,
    pace: StepPace,
    is_draining: bool,
    adapters: tuple[str, ...] | None,
    sleep_level: wire.SleepLevel,
) -> wire.Load:
    scheduler = core.scheduler
    blocks = scheduler.blocks
    to_compute = [r.num_behind for r in scheduler.requests.values() if r.status in (Status.WAITING, Status.RUNNING)]
    statuses = [request.status for request in scheduler.requests.values()]
    return wire.Load(
        num_running=statuses.count(Status.RUNNING),
        num_waiting=len(scheduler.waiting) + imports.num_queued,
        num_expected=imports.num_expected,
        num_landing=statuses.count(Status.LANDING),
        num_exporting=statuses.count(Status.EXPORTING),
        num_blocks=blocks.num_blocks,
        num_free_blocks=blocks.num_free,
        num_cached_blocks=blocks.num_cached,
        num_held_blocks=blocks.num_held,
        num_preemptions=scheduler.num_preemptions,
        num_swap_blocks=scheduler.swap.num_blocks,
        num_free_swap_blocks=scheduler.swap.num_free,
        num_prefix_query_tokens=scheduler.num_prefix_query_tokens,
        num_prefix_hit_tokens=scheduler.num_prefix_hit_tokens,
        num_host_cache_blocks=0 if blocks.tier is None else len(blocks.tier),
        num_host_hit_tokens=scheduler.num_tier_hit_tokens,
        **_of_lower_tiers(scheduler),
        tier_token_s={} if blocks.tier is None else blocks.tier.token_s,
        num_queued_tokens=sum(num_behind for num_behind in to_compute if num_behind > 1),
        prefill_tokens_per_s=pace.prefill_tokens_per_s,
        decode_step_s=pace.decode_step_s,
        num_steps=core.num_steps,
        num_landings=imports.num_landings,
        kv_sent_nbytes=out_links.sent_nbytes,
        kv_received_nbytes=in_links.received_nbytes,
        num_dropped_kv_frames=in_links.num_dropped,
        num_handed_over=exports.num_handed_over,
        num_failed_handovers=exports.num_failed,
        num_expired_credits=exports.num_expired_credits,
        num_expired_holds=exports.num_expired_holds + imports.num_expired,
        num_wanted_tokens=imports.num_wanted_tokens,
        num_landed_tokens=imports.num_landed_tokens,
        step_tokens=pace.step_tokens.told(),
        preemptions=scheduler.preemptions.told(),
        num_encoded_images=core.runner.encoded.num_images,
        image_encode_s=core.runner.encoded.seconds,
        num_cache_resets=blocks.num_resets,
        num_quarantined_blocks=imports.num_quarantined_blocks,
        num_leaked_blocks=num_leaked_blocks(scheduler),
        links=out_links.states(),
        is_draining=is_draining,
        adapters=adapters,
        sleep_level=sleep_level,
    )


def _of_lower_tiers(scheduler: StepScheduler) -> dict[str, Any]:
    """Returns the figures of the tiers below host memory, by their names in a load."""
    lower = {} if scheduler.blocks.tier is None else {each.kind: each for each in scheduler.blocks.tier.lower}
    fetched = {kind: each.counts.num_fetched * scheduler.block_size for kind, each in lower.items()}
    counts = [each.counts for each in lower.values()]
    return {
        "num_disk_cache_blocks": len(lower["disk"]) if "disk" in lower else 0,
        "num_disk_hit_tokens": fetched.get("disk", 0),
        "num_shared_hit_tokens": fetched.get("shared", 0),
        "num_lower_written": sum(each.num_written for each in counts),
        "num_lower_dropped": sum(each.num_dropped + each.num_failed for each in counts),
        "num_lower_bad": sum(sum(each.num_bad.values()) for each in counts),
    }


def num_leaked_blocks(scheduler: StepScheduler) -> int:
    """Returns a lower bound on the blocks held by no request: a block shared by several counts for each of them.

    The bound is exact while there are no requests; `StepScheduler.check` finds the blocks, but looks at each one.
    """
    named = sum(len(request.block_table) for request in scheduler.requests.values())
    return max(0, scheduler.blocks.num_held - named)
