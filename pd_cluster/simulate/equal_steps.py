"""Combines equal decode steps of the step scheduler if nothing can happen between them.

A test compares the result with that of single steps. Knows nothing of time.
"""

from __future__ import annotations

from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.scheduling.step_plan import StepPlan

MADE_UP_TOKEN = (1 << 31) - 1  # the token of all answers; never in a prompt


def num_equal_steps(scheduler: StepScheduler) -> int:
    """Returns for how many next steps each running sequence gets one token and nothing else happens.

    Assumes that no mail comes. 0: the next step may be of another kind.
    """
    running, waiting = scheduler.running, scheduler.waiting
    if not running or len(running) > scheduler.max_num_batched_tokens:
        return 0
    if waiting and len(running) < scheduler.max_num_seqs:
        return 0  # the next step may admit a request
    left = min(r.sampling.max_tokens - len(r.output_token_ids) for r in running) - 1
    if left < 1 or any(r.num_behind != 1 or r.leg == "prefill" for r in running):
        return 0
    return left if _has_blocks(scheduler, left) else _most_with_blocks(scheduler, left)


def _has_blocks(scheduler: StepScheduler, num_steps: int) -> bool:
    size, blocks = scheduler.block_size, scheduler.blocks
    most = blocks.num_available if blocks.tier is None else blocks.num_free
    running = scheduler.running
    return sum(max(0, -(-(r.num_computed_tokens + num_steps) // size) - len(r.tables[0])) for r in running) <= most


def _most_with_blocks(scheduler: StepScheduler, most: int) -> int:
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if _has_blocks(scheduler, middle):
            low = middle
        else:
            high = middle - 1
    return low


def take_equal_steps(scheduler: StepScheduler, num_steps: int) -> None:
    """Records this many steps as computed; at most `num_equal_steps` are allowed."""
    plan = StepPlan()
    for request in scheduler.running:
        has_capacity = scheduler.allocator.grow_ahead(request, num_steps)
        assert has_capacity, f"{request.key} has no blocks for {num_steps} equal steps"
        request.output_token_ids += [MADE_UP_TOKEN] * num_steps
        request.num_unsent += num_steps
        plan.add(request, num_steps)
    scheduler.computed(plan)
