"""Blocks for the sequences of one engine: who gets them, who grows, who gives way.

Integers only. Shares the scheduler's lists of requests; knows nothing of steps' token budgets.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from pd_cluster.engine.step.holdings import Holdings
from pd_cluster.engine.step.plan import Move, StepPlan, service_order
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.types import Request, Status


class BlockRoom:
    """Gives blocks to requests and takes them from younger ones. See StepScheduler for the rules.

    `requests`, `waiting` and `running` are the scheduler's own; a preemption moves a request between them.
    """

    def __init__(
        self,
        holdings: Holdings,
        blocks: BlockPool,
        swap: BlockPool,
        requests: dict[str, Request],
        waiting: list[Request],
        running: list[Request],
    ) -> None:
        self._holdings, self._blocks, self._swap = holdings, blocks, swap
        self._requests, self._waiting, self._running = requests, waiting, running
        self.num_preemptions = 0
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        self.num_tier_hit_tokens = 0

    def reserve(self) -> int:
        """Returns the blocks kept free for running requests' growth, so that admission does not preempt at once."""
        return len(self._running)

    def num_missing(self, request: Request, cached: Sequence[int]) -> int | None:
        """Returns how many blocks it takes besides its cached ones; None: there are not enough."""
        num_missing = self._holdings.num_blocks_for(request.num_tokens) - len(cached)
        num_available = self._blocks.num_available - self._blocks.num_unheld(cached)
        return num_missing if num_missing + self.reserve() <= num_available else None

    def enter(self, request: Request, plan: StepPlan) -> bool:
        """Takes blocks for all known tokens that are not cached. False: there are not enough."""
        cached = self._holdings.cached(request, request.num_tokens - 1)  # the last token gives the logits
        num_missing = self.num_missing(request, cached)
        if num_missing is None:
            return False
        in_tier = self._holdings.in_tier(request, request.num_tokens - 1, len(cached))
        request.tables[0] = self._holdings.take_with(cached, in_tier, num_missing)
        self._holdings.keep_below(request, cached)
        if request.swap_tables[0]:
            plan.moves += [Move("in", s, t) for s, t in zip(request.swap_tables[0], request.tables[0], strict=False)]
            self._swap.release(request.swap_tables[0])
            request.swap_tables[0] = []
            request.num_hashed_blocks = self._holdings.num_passed(request)  # the former blocks' hashes are lost
            return True
        request.num_computed_tokens = (len(cached) + len(in_tier)) * self._holdings.block_size
        request.num_hashed_blocks = len(cached)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed_tokens
            self.num_prefix_query_tokens += len(request.prompt_token_ids) if self._holdings.prefix is not None else 0
            self.num_prefix_hit_tokens += request.num_cached_tokens
            self.num_tier_hit_tokens += len(in_tier) * self._holdings.block_size
        return True

    def make_room(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Grows the block table to `num_tokens`, preempting younger requests. False: not in this step.

        A block that others hold too is replaced by a copy before it is written.
        """
        while True:
            missing, is_shared = self._lacks(request, num_tokens)
            if missing + is_shared <= self._blocks.num_available:
                break
            victims = [r for r in self._running if r.leg != "prefill" and service_order(r) > service_order(request)]
            victims += self.parked(request)
            if not victims:
                return False
            self.preempt(max(victims, key=service_order), plan)
        if is_shared:
            first = request.num_computed_tokens // self._holdings.block_size
            (own,) = self._blocks.take(1)
            plan.moves.append(Move("copy", request.tables[0][first], own))
            self._blocks.release([request.tables[0][first]])
            request.tables[0][first] = own
        if missing:
            request.tables[0] += self._blocks.take(missing)
        return True

    def enters_with_moves(self, request: Request) -> bool:
        """Whether it would load blocks from the host's cache, or evict or copy some to there."""
        if self._blocks.tier is None:
            return False
        cached = self._holdings.cached(request, request.num_tokens - 1)
        num_missing = self._holdings.num_blocks_for(request.num_tokens) - len(cached)
        return (
            num_missing > self._blocks.num_free
            or bool(self._holdings.in_tier(request, request.num_tokens - 1, len(cached)))
            or bool(self._holdings.not_below(request, len(cached)))
        )

    def grow_ahead(self, request: Request, num_tokens: int) -> bool:
        """Takes blocks for its next `num_tokens` tokens; False if some are missing or one must be copied."""
        missing, is_shared = self._lacks(request, request.num_computed_tokens + num_tokens)
        most = self._blocks.num_available if self._blocks.tier is None else self._blocks.num_free
        if is_shared or missing > most:
            return False
        if missing:
            request.tables[0] += self._blocks.take(missing)
        return True

    def grow_for_drafts(self, request: Request, num_drafts: int) -> int:
        """Takes blocks for drafts behind all its tokens; returns for how many there is room.

        Only free ones beyond the reserve: drafts neither preempt nor evict anything.
        """
        num_blocks = self._holdings.num_blocks_for(request.num_tokens + num_drafts) - len(request.tables[0])
        if (num_blocks := min(num_blocks, self._blocks.num_free - self.reserve())) > 0:
            request.tables[0] += self._blocks.take(num_blocks)
        return min(num_drafts, len(request.tables[0]) * self._holdings.block_size - request.num_tokens)

    def _lacks(self, request: Request, num_tokens: int) -> tuple[int, bool]:
        """Returns how many blocks its first `num_tokens` tokens lack, and whether the first to be written is shared."""
        first = request.num_computed_tokens // self._holdings.block_size
        is_shared = first < len(request.tables[0]) and self._blocks.is_shared(request.tables[0][first])
        return max(0, self._holdings.num_blocks_for(num_tokens) - len(request.tables[0])), is_shared

    def parked(self, request: Request) -> list[Request]:
        """Returns the beams that give their blocks to a request: those of its own search and of younger requests."""
        parked = [r for r in self._requests.values() if r.status is Status.PARKED and r.tables[0]]
        return [r for r in parked if r.leg_key == request.leg_key or service_order(r) > service_order(request)]

    def preempt(self, victim: Request, plan: StepPlan) -> None:
        num_blocks = self._holdings.num_blocks_for(victim.num_computed_tokens)
        swap_table = self._swap.take(num_blocks) if num_blocks <= self._swap.num_available else []
        pairs = zip(victim.tables[0], swap_table, strict=False)
        plan.moves += [Move("out", source, target) for source, target in pairs if source != self._holdings.nobodys]
        self._holdings.give_back(victim)
        victim.swap_tables[0] = swap_table
        if not swap_table:
            victim.num_computed_tokens = 0
        self.num_preemptions += 1
        victim.num_preemptions += 1
        if victim.status is Status.PARKED:  # it stays parked: none of its tokens are computed again before its turn
            return
        self._running.remove(victim)
        plan.chunks = [chunk for chunk in plan.chunks if chunk[0] is not victim]
        plan.preempted.append(victim)
        victim.status = Status.WAITING
        insort(self._waiting, victim, key=service_order)
