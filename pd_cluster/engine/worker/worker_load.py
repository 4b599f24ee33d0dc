"""Collects the load that a worker reports with every heartbeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pd_cluster import wire
from pd_cluster.engine.handover.handover import Handover
from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.legs.legs import Legs
from pd_cluster.engine.lifecycle.availability import Availability
from pd_cluster.engine.scheduling.group_holdings import GroupHoldings
from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.stages.stage import Stage
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.engine.step.step_timing import StepTiming
from pd_cluster.types import LinkState, Status

LOAD_S = 0.02  # the reported load is at most this old, plus a step's duration


class LoadReport:
    """The load that heartbeats read. It is refreshed only as often as necessary."""

    def __init__(
        self, core: EngineCore, legs: Legs, stages: Sequence[Stage], state: Availability, context: HandoverContext
    ) -> None:
        self.load = wire.Load()  # the mailbox's thread reads it, so it is replaced, never changed
        self.timing = core.timing
        self.is_old = False
        self.is_shared = False  # whether several schedulers send requests to this worker
        self._core, self._legs, self._stages, self._state = core, legs, stages, state
        self._post, self._clock = context.post, context.clock
        self._next_s = 0.0

    def left_s(self) -> float:
        """Returns how long the load may stay unchanged."""
        return max(0.001, self._next_s - self._clock())

    def publish(self, at_once: bool = False) -> None:
        """Refreshes the load if it is due.

        Does not wait for the next heartbeat, which would be too late: changes of links are sent at once, other changes
        within LOAD_S.
        """
        links, state = self._legs.handover.out_links.states(), self._state
        for stage in self._stages:
            if own := stage.links():
                links = {**links, **own}
        was = self.load
        now = links, state.drain.has_begun, state.sleep.level, state.weights.status
        has_news = now != (was.links, was.is_draining, was.sleep_level, was.weights)
        now_s = self._clock()
        self.is_old = not has_news and not at_once and now_s < self._next_s
        if self.is_old:
            return
        self._next_s = now_s + LOAD_S
        if was.sleep_level and not state.sleep.level:
            self.timing.start_over()
        load = load_of(self._core, self._legs.handover, self.timing, state, links)
        if self.is_shared:  # only other schedulers read these figures
            weights = self._legs.table.outstanding()
            outstanding = {peer: weights.get(conn, 0) for conn, peer in state.schedulers.items()}
            load = msgspec.structs.replace(load, outstanding=outstanding)
        for stage in self._stages:
            load = stage.counted(load, state.schedulers)
        self.load = load
        if has_news:
            self._post.beat()
        elif was.shown_now != load.shown_now:
            self._post.beat_soon()


def load_of(
    core: EngineCore, handover: Handover, timing: StepTiming, state: Availability, links: dict[str, LinkState]
) -> wire.Load:
    scheduler, exports, imports, lanes = core.scheduler, handover.exports, handover.imports, handover.in_links.table
    blocks = scheduler.blocks
    statuses = [request.status for request in scheduler.requests.values()]
    received_nbytes, num_dropped = lanes.counts()
    return wire.Load(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting) + imports.num_queued,
        num_expected=imports.num_expected,
        num_landing=statuses.count(Status.LANDING),
        num_exporting=statuses.count(Status.EXPORTING),
        num_blocks=blocks.num_blocks,
        num_free_blocks=blocks.num_free,
        num_cached_blocks=blocks.num_cached,
        num_held_blocks=blocks.num_held,
        groups=tuple(map(_group_load, scheduler.groups[1:])),
        num_preemptions=scheduler.num_preemptions,
        num_swap_blocks=scheduler.swap.num_blocks,
        num_free_swap_blocks=scheduler.swap.num_free,
        num_prefix_query_tokens=scheduler.num_prefix_query_tokens,
        num_prefix_hit_tokens=scheduler.num_prefix_hit_tokens,
        num_host_cache_blocks=0 if blocks.tier is None else len(blocks.tier),
        num_host_hit_tokens=scheduler.num_tier_hit_tokens,
        **_of_lower_tiers(scheduler),
        tier_token_s={} if blocks.tier is None else blocks.tier.token_s,
        num_queued_tokens=scheduler.num_queued_tokens,
        step_cost=timing.cost,
        prompt_work=timing.prompt_work,
        decode_work=timing.decode_work,
        handover_costs=handover.timing.costs,
        tokens_per_step=timing.tokens_per_step,
        drafts=core.drafting.totals.counts(),
        num_steps=core.num_steps,
        num_landings=imports.num_landings,
        kv_sent_nbytes=handover.out_links.table.sent_nbytes,
        kv_received_nbytes=received_nbytes,
        num_dropped_kv_frames=num_dropped,
        num_handed_over=exports.num_handed_over,
        num_failed_handovers=exports.num_failed,
        num_expired_credits=exports.num_expired_credits,
        num_expired_holds=exports.num_expired_holds + imports.num_expired,
        num_wanted_tokens=imports.num_wanted_tokens,
        num_landed_tokens=imports.num_landed_tokens,
        step_tokens=timing.step_tokens.tally(),
        preemptions=scheduler.preemptions.tally(),
        num_encoded_images=core.runner.encoded.num_images,
        image_encode_s=core.runner.encoded.seconds,
        num_cache_resets=blocks.num_resets,
        num_quarantined_blocks=imports.num_quarantined_blocks,
        num_leaked_blocks=num_leaked_blocks(scheduler),
        links=links,
        is_draining=state.drain.has_begun,
        sleep_level=state.sleep.level,
        weights=state.weights.status,
    )


def _group_load(group: GroupHoldings) -> wire.GroupLoad:
    blocks = group.blocks
    return wire.GroupLoad(group.rule.name, blocks.num_free, blocks.num_cached, blocks.num_held)


def _of_lower_tiers(scheduler: StepScheduler) -> dict[str, Any]:
    """Returns the figures of the tiers below host memory, by the names of a load's fields."""
    if scheduler.blocks.tier is None:
        return {}
    lower = {each.kind: each for each in scheduler.blocks.tier.lower}
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
    """Returns a lower bound on the number of held blocks that no holder accounts for, in all groups of layers.

    It is the number of held blocks minus the number of holders' entries, so a block with several holders is subtracted
    several times. The bound is exact when there are no requests. `StepScheduler.check` finds the leaked blocks
    themselves, but must examine each block.
    """
    return sum(max(0, each.blocks.num_held - scheduler.num_held(each)) for each in scheduler.groups)
