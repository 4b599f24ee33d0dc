"""Allocates blocks to the sequences of one engine, and preempts sequences for others.

Uses only integers. Shares the scheduler's lists of requests; knows nothing of steps' token budgets. A sequence gets all
the blocks that it lacks, in all groups of layers, or none.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from pd_cluster.engine.scheduling.block_holdings import Hit, Holdings
from pd_cluster.engine.scheduling.group_holdings import GroupHoldings, Lack
from pd_cluster.engine.scheduling.step_plan import Move, StepPlan, service_order
from pd_cluster.types import Request, Status


class BlockAllocator:
    """Gives blocks to requests, and takes them from younger requests if necessary. See StepScheduler for the rules.

    `requests`, `waiting` and `running` are the scheduler's own lists; a preemption moves a request between them.
    """

    def __init__(
        self, holdings: Holdings, requests: dict[str, Request], waiting: list[Request], running: list[Request]
    ) -> None:
        self._holdings, self._groups, self._blocks = holdings, holdings.groups, holdings.blocks
        self._requests, self._waiting, self._running = requests, waiting, running
        self.num_preemptions = 0
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        self.num_tier_hit_tokens = 0

    def reserve(self, group: GroupHoldings) -> int:
        """Returns the number of blocks to keep free for running requests, so that admission causes no preemption."""
        return 0 if group.is_state else len(self._running)

    def num_missing(self, request: Request, hit: Hit) -> list[int] | None:
        """Returns how many blocks the request needs in each group besides the hit's; None: there are not enough."""
        start = request.num_computed_tokens if request.is_swapped else hit.num_blocks * self._holdings.block_size
        missing = []
        for each, known in zip(self._groups, hit.tables, strict=True):
            num_blocks = each.num_on_entry(request, start)
            if not each.is_state:
                num_blocks -= self._num_before(each, request, start) + len(known)
            missing.append(num_blocks)
        return missing if self.has(missing, hit.tables) else None

    def has(self, missing: Sequence[int], known: Sequence[list[int]]) -> bool:
        """Whether each group has this many free blocks besides the cached (`known`) and the reserved ones."""
        return all(
            num_blocks + self.reserve(each) <= each.blocks.num_available - each.blocks.num_unheld(held)
            for each, num_blocks, held in zip(self._groups, missing, known, strict=True)
        )

    def enter(self, request: Request, plan: StepPlan) -> Hit | None:
        """Takes blocks for the request's tokens that are not cached. Returns None if there are not enough blocks."""
        holdings = self._holdings
        hit = holdings.find(request, request.num_tokens - 1)  # the last token must be computed for its logits
        if (missing := self.num_missing(request, hit)) is None:
            return None
        start = hit.num_blocks * holdings.block_size
        in_tier = holdings.in_tier(request, request.num_tokens - 1, len(hit.tables[0]))
        if request.is_swapped:
            self._swap_in(request, missing, plan)
            return hit
        for each, known, num_blocks in zip(self._groups, hit.tables, missing, strict=True):
            if each.is_state:
                self._begin_state(each, request, known, plan)
                continue
            before = [each.padding_block] * self._num_before(each, request, start)
            request.tables[each.at] = before + (
                holdings.take_with(known, in_tier, num_blocks) if each.at == 0 else _take(each, known, num_blocks)
            )
        holdings.keep_below(request, hit.tables[0])
        request.num_computed_tokens = start + len(in_tier) * holdings.block_size
        request.num_hashed_blocks = hit.num_blocks
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed_tokens
            self.num_prefix_query_tokens += len(request.prompt_token_ids) if holdings.prefix is not None else 0
            self.num_prefix_hit_tokens += request.num_cached_tokens
            self.num_tier_hit_tokens += len(in_tier) * holdings.block_size
        return hit

    def _swap_in(self, request: Request, missing: Sequence[int], plan: StepPlan) -> None:
        num_hashed = []
        for each, num_blocks in zip(self._groups, missing, strict=True):
            swapped = request.swap_tables[each.at]
            num_before = each.num_passed(request, request.num_computed_tokens)
            taken = each.blocks.take(num_blocks)
            plan.moves += [Move("in", source, target, each.at) for source, target in zip(swapped, taken, strict=False)]
            each.swap.release(swapped)
            request.swap_tables[each.at], request.tables[each.at] = [], [each.padding_block] * num_before + taken
            if not each.is_state:
                num_hashed.append(num_before)
        request.num_hashed_blocks = min(num_hashed)  # earlier blocks are not hashed again

    def _num_before(self, group: GroupHoldings, request: Request, start: int) -> int:
        """Counts the padding blocks at the beginning of the table of a request that is computed from `start` on."""
        return group.num_passed(request, start) if request.is_swapped else group.num_before(request, start)

    def _begin_state(self, group: GroupHoldings, request: Request, known: list[int], plan: StepPlan) -> None:
        """Gives the request its own state: a copy of the cached state, or zeros."""
        group.blocks.share(known)
        (own,) = group.blocks.take(1)
        plan.moves += [Move("copy", block, own, group.at) for block in known] or [Move("clear", own, own, group.at)]
        group.blocks.release(known)
        request.tables[group.at] = [own]

    def num_missing_to_land(self, request: Request, hit: Hit, num_tokens: int, num_further: int = 0) -> list[int]:
        """Returns how many blocks a landing of `num_tokens` tokens needs in each group besides the hit's.

        Each further sequence needs one more block, but the total is never more than the pool has.
        """
        missing = []
        for each, known in zip(self._groups, hit.tables, strict=True):
            before = each.num_before(request, len(request.prompt_token_ids))
            num_blocks = each.num_blocks_for(num_tokens) - before
            missing.append(min(num_blocks + num_further, max(num_blocks, each.blocks.num_blocks)) - len(known))
        return missing

    def land(self, request: Request, hit: Hit, missing: Sequence[int], in_tier: Sequence[bytes]) -> list[int]:
        """Takes landing blocks; some are loaded from host memory.

        Returns the first token that must land in each group; see StepScheduler.land.
        """
        num_prompt, nums_known = len(request.prompt_token_ids), []
        for each, known, num_blocks in zip(self._groups, hit.tables, missing, strict=True):
            before = each.num_before(request, num_prompt)
            request.tables[each.at] = [each.padding_block] * before + (
                self._holdings.take_with(known, in_tier, num_blocks) if each.at == 0 else _take(each, known, num_blocks)
            )
            nums_known.append(before + len(known))
        self._holdings.keep_below(request, hit.tables[0])
        pairs = zip(self._groups, nums_known, strict=True)
        request.num_hashed_blocks = min(num_known for each, num_known in pairs if not each.is_state)
        nums_known[0] += len(in_tier)
        return [num_known * self._holdings.block_size for num_known in nums_known]

    def lend(self, request: Request, hit: Hit, in_tier: Sequence[bytes]) -> None:
        """Holds the cached blocks of a prompt's beginning; some are loaded from host memory."""
        for each, known in zip(self._groups, hit.tables, strict=True):
            before = 0 if each.is_state else each.num_before(request, request.num_computed_tokens)
            request.tables[each.at] = [each.padding_block] * before + (
                self._holdings.take_with(known, in_tier, len(in_tier)) if each.at == 0 else _take(each, known, 0)
            )

    def grow(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Grows the block tables to `num_tokens` tokens, and preempts younger requests if necessary.

        Returns False if the request must wait for a later step.

        A block with several holders is replaced by a copy before it is written.
        """
        while lacks := self._lacks(request, num_tokens):
            if all(lack.num_to_take <= lack.group.blocks.num_available for lack in lacks):
                break
            victims = [r for r in self._running if r.leg != "prefill" and service_order(r) > service_order(request)]
            victims += self.parked(request)
            if not victims:
                return False
            self.preempt(max(victims, key=service_order), plan)
        for each, num_blocks, copied in lacks:
            table = request.tables[each.at]
            if copied is not None:
                (own,) = each.blocks.take(1)
                plan.moves.append(Move("copy", table[copied], own, each.at))
                each.blocks.release([table[copied]])
                table[copied] = own
            table += each.blocks.take(num_blocks)
        return True

    def _lacks(self, request: Request, num_tokens: int) -> list[Lack]:
        """Returns, for each group that lacks blocks, those needed to compute a request's tokens up to `num_tokens`."""
        return [lack for each in self._groups if (lack := each.lack(request, num_tokens)) is not None]

    def enters_with_moves(self, request: Request) -> bool:
        """Whether admission of the request would load blocks from host memory, or evict or copy blocks to it."""
        if self._blocks.tier is None:
            return False
        cached = self._holdings.find(request, request.num_tokens - 1).tables[0]
        num_missing = self._holdings.num_blocks_for(request.num_tokens) - len(cached)
        return (
            num_missing > self._blocks.num_free
            or bool(self._holdings.in_tier(request, request.num_tokens - 1, len(cached)))
            or bool(self._holdings.missing_below(request, len(cached)))
        )

    def grow_ahead(self, request: Request, num_tokens: int) -> bool:
        """Takes blocks for the request's next `num_tokens` tokens.

        Returns False if there are too few blocks, or if one must be copied.
        """
        lacks = self._lacks(request, request.num_computed_tokens + num_tokens)
        for each, num_blocks, copied in lacks:
            most = each.blocks.num_available if each.blocks.tier is None else each.blocks.num_free
            if copied is not None or num_blocks > most:
                return False
        for each, num_blocks, _ in lacks:
            request.tables[each.at] += each.blocks.take(num_blocks)
        return True

    def grow_for_drafts(self, request: Request, num_drafts: int) -> int:
        """Takes blocks for drafts after all of a request's tokens.

        Returns how many drafts have blocks. Takes only free blocks beyond the reserve, so drafts neither preempt nor
        evict anything.
        """
        for each in self._groups:
            table = request.tables[each.at]
            num_blocks = each.num_blocks_for(request.num_tokens + num_drafts) - len(table)
            if (num_blocks := min(num_blocks, each.blocks.num_free - self.reserve(each))) > 0:
                table += each.blocks.take(num_blocks)
            num_drafts = min(num_drafts, len(table) * self._holdings.block_size - request.num_tokens)
        return num_drafts

    def parked(self, request: Request) -> list[Request]:
        """Returns the parked beams that may lose blocks to a request: those of its own search or of younger ones."""
        parked = [r for r in self._requests.values() if r.status is Status.PARKED and r.tables[0]]
        return [r for r in parked if r.leg_key == request.leg_key or service_order(r) > service_order(request)]

    def preempt(self, victim: Request, plan: StepPlan) -> None:
        wanted = [each.to_swap(victim) for each in self._groups]
        fits = all(len(blocks) <= each.swap.num_available for each, blocks in zip(self._groups, wanted, strict=True))
        swapped = [
            each.swap.take(len(blocks)) if fits else [] for each, blocks in zip(self._groups, wanted, strict=True)
        ]
        for each, blocks, slots in zip(self._groups, wanted, swapped, strict=True):
            plan.moves += [Move("out", source, slot, each.at) for source, slot in zip(blocks, slots, strict=False)]
        self._holdings.give_back(victim)
        victim.swap_tables = swapped
        if not victim.is_swapped:
            victim.num_computed_tokens = 0
        self.num_preemptions += 1
        victim.num_preemptions += 1
        if victim.status is Status.PARKED:  # it stays parked, and computes its tokens again only when it runs
            return
        self._running.remove(victim)
        plan.chunks = [chunk for chunk in plan.chunks if chunk[0] is not victim]
        plan.preempted.append(victim)
        victim.status = Status.WAITING
        insort(self._waiting, victim, key=service_order)


def _take(group: GroupHoldings, known: list[int], num_blocks: int) -> list[int]:
    """Shares cached blocks and takes others. Returns all of them, in order."""
    group.blocks.share(known)
    return known + group.blocks.take(num_blocks)
