"""Equal decode steps of the step scheduler, taken together where nothing can happen between them.

A test holds them against as many single steps. Knows nothing of time.
"""

from __future__ import annotations

from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.scheduling.step_plan import StepPlan

MADE_UP_TOKEN = (1 << 31) - 1  # of answers: in no prompt


def num_equal_steps(scheduler: StepScheduler) -> int:
    """Returns how many steps from now on give each running sequence a token, and end, admit or move nothing.

    Assumes that no mail comes. 0: the next one may be another kind of step.
    """
    running, waiting = scheduler.running, scheduler.waiting
    if not running or len(running) > scheduler.max_num_batched_tokens:
        return 0
    if waiting and len(running) < scheduler.max_num_seqs:
        return 0  # the next step may admit one
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
    """Records so many steps as computed, of at most `num_equal_steps`."""
    plan = StepPlan()
    for request in scheduler.running:
        has_capacity = scheduler.allocator.grow_ahead(request, num_steps)
        assert has_capacity, f"{request.key} has no blocks for {num_steps} equal steps"
        request.output_token_ids += [MADE_UP_TOKEN] * num_steps
        request.num_unsent += num_steps
        plan.add(request, num_steps)
    scheduler.computed(plan)
