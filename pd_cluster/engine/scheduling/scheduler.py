"""Decides how many tokens each request computes in the next step, and which blocks it holds.

Uses only integers: no torch, sockets or clock. There is no prefill or decode phase: every request has `num_behind`
tokens still to compute, and all share one token budget. After a prefix hit, a landing or a swap, `num_computed_tokens`
only starts at a higher number.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pd_cluster.costs.linear_costs import StepCost
from pd_cluster.engine.scheduling.block_allocator import BlockAllocator
from pd_cluster.engine.scheduling.block_holdings import Holdings
from pd_cluster.engine.scheduling.count_histogram import CountHistogram
from pd_cluster.engine.scheduling.group_holdings import GroupHoldings, LayerGroup
from pd_cluster.engine.scheduling.lora_rotation import LoraRotation, StepAdapters
from pd_cluster.engine.scheduling.sequence_limit import SequenceLimit
from pd_cluster.engine.scheduling.state_checkpoints import Checkpoints, KeepRule
from pd_cluster.engine.scheduling.step_plan import (
    MAX_PROMPT_LOGPROB_TOKENS,
    Move,
    StepPlan,
    pooling_chunk_of,
    service_order,
)
from pd_cluster.engine.scheduling.step_share import GivingWay, StepShare
from pd_cluster.errors import OutOfBlocks
from pd_cluster.kv.prefix_index import PrefixScope
from pd_cluster.numerics import Numerics
from pd_cluster.types import Request, Status, TokenOutput, sibling
from pd_cluster.types.variants import num_given_tokens
from pd_cluster.wire import PREEMPTIONS_BOUNDS

KEEP_ALIGNED = KeepRule()


class StepSizes(NamedTuple):
    """The limits of a step. `most_adapters`: the most LoRA adapters in a step; 0: there are no adapters.

    `keeps_images_whole`: no chunk ends inside an image. `cost` returns the measured cost of steps, which limits chunks
    that follow a long context.
    """

    block_size: int  # tokens
    max_num_seqs: int
    max_num_batched_tokens: int
    most_adapters: int = 0
    keeps_images_whole: bool = False
    cost: Callable[[], StepCost] = StepCost


class StepScheduler:
    """Holds every request of one engine. The first in order of service always advances; others are preempted if needed.

    The order of service is by priority, then by arrival; below, "older" means earlier in this order.

    When a request is admitted, it takes the blocks for all its tokens, and later another block whenever it needs one.
    If none is free, the youngest running request is preempted: its KV is copied to `swap` if there is space; otherwise
    it releases its blocks and computes its tokens again later, with the same result. Prefill legs, which are handed
    over, are never preempted. block_holdings.py describes `prefix`.

    A pooled prompt is computed in chunks that end at fixed positions, whatever else a step computes, because the last
    bits of attention depend on where a chunk begins. A chunk waits for a step that can take all of it, and younger
    requests wait for it.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        sizes: StepSizes,
        prefix: PrefixScope | None = None,
        keep_rule: KeepRule = KEEP_ALIGNED,
    ) -> None:
        self.blocks, self.swap = groups[0].blocks, groups[0].swap
        self.block_size, max_num_seqs, max_num_batched_tokens, most_adapters, keeps_images_whole, cost = sizes
        self._pooling_chunk = chunk = pooling_chunk_of(max_num_batched_tokens, self.block_size)
        self.groups = [
            GroupHoldings(at, group, self.block_size, max_num_batched_tokens) for at, group in enumerate(groups)
        ]
        self.holdings = holdings = Holdings(self.groups, self.block_size, prefix, chunk)
        self._checkpoints = Checkpoints(holdings, keep_rule)
        self.num_blocks_for = holdings.num_blocks_for
        self.known = self._checkpoints.reached or self.blocks  # cached blocks from which a request can continue
        self._turns = LoraRotation(most_adapters) if most_adapters else None
        self._keeps_images_whole = keeps_images_whole
        self._share = StepShare(max_num_batched_tokens, self.block_size, cost)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.requests: dict[str, Request] = {}
        self.places = SequenceLimit(max_num_seqs, self.requests)
        self.waiting: list[Request] = []  # in order of service
        self.running: list[Request] = []
        self.preemptions = CountHistogram(PREEMPTIONS_BOUNDS)  # counts the preemptions of sequences that have ended
        self.move_now: Callable[[list[Move]], None] = lambda moves: None  # makes moves between steps
        self.allocator = BlockAllocator(holdings, self.requests, self.waiting, self.running)

    # ---- arrival and end of requests

    def add(self, request: Request) -> None:
        """Adds a request that will compute its tokens here."""
        self._take_in(request)
        insort(self.waiting, request, key=service_order)

    def land(self, request: Request, num_tokens: int) -> list[int]:
        """Takes landing blocks for `num_tokens` tokens in every group.

        Returns, for each group, the first token of the prompt that must land; earlier tokens are cached, or no later
        token attends to them. A state counts as one token. Raises OutOfBlocks; then nothing has changed.
        """
        hit = self.holdings.landing(request)
        missing = self.allocator.num_missing_to_land(request, hit, num_tokens)
        for group, known, num_missing in zip(self.groups, hit.tables, missing, strict=True):
            if num_missing > group.blocks.num_available - group.blocks.num_unheld(known):
                raise OutOfBlocks(wanted=num_missing, free=group.blocks.num_available)
        self._take_in(request)
        moves = self._begin_moves([])
        in_tier = self.holdings.in_tier(request, len(request.prompt_token_ids), len(hit.tables[0]))
        first = self.allocator.land(request, hit, missing, in_tier)
        if moves:
            self.move_now(moves)  # before any KV lands
        request.status = Status.LANDING
        self.allocator.num_tier_hit_tokens += len(in_tier) * self.block_size
        return first

    def lend(self, request: Request, root: bytes) -> bool:
        """Holds the cached beginning of a prompt for a peer that pulls it, and cuts the prompt after it.

        Returns False if nothing is cached, or if the peer, whose root this is, would cache it under other hashes.
        """
        if root != self.root(request):
            return False
        num_tokens = len(request.prompt_token_ids)
        hit = self.holdings.find(request, num_tokens)
        in_tier = self.holdings.in_tier(request, num_tokens, hit.num_blocks)
        in_tier = in_tier[: self.blocks.num_available - self.blocks.num_unheld(hit.tables[0])]
        num_blocks = hit.num_blocks + len(in_tier)
        if not num_blocks:
            return False
        self._take_in(request)
        request.num_computed_tokens = num_blocks * self.block_size
        request.prompt_token_ids = request.prompt_token_ids[: request.num_computed_tokens]
        moves = self._begin_moves([])
        self.allocator.lend(request, hit, in_tier)
        if moves:
            self.move_now(moves)  # before any KV is sent
        request.status = Status.EXPORTING
        return True

    def keep_pulled(self, request: Request) -> None:
        """Adds a pulled beginning, which has landed, to the prefix cache, and ends its request."""
        request.num_computed_tokens = len(request.prompt_token_ids)
        self.holdings.remember(request)
        self._checkpoints.landed(request)
        self.finish(request)

    def num_known_tokens(self, request: Request) -> int:
        """Counts the prompt's first tokens that need not be computed, because device or host memory has them."""
        most = len(request.prompt_token_ids) - 1
        hit = self.holdings.find(request, most)
        return (hit.num_blocks + len(self.holdings.in_tier(request, most, hit.num_blocks))) * self.block_size

    def prompt_hashes(self, request: Request) -> list[bytes]:
        """See Holdings."""
        return self.holdings.prompt_hashes(request)

    def root(self, request: Request) -> bytes:
        """See Holdings."""
        return self.holdings.root(request)

    def _begin_moves(self, moves: list[Move]) -> list[Move]:
        """From now on, collects the moves of evicted and loaded blocks in `moves`.

        All earlier moves must already have been made.
        """
        if self.blocks.tier is not None:
            self.blocks.tier.begin(lambda kind, source, target: moves.append(Move(kind, source, target)))
        return moves

    def landed(self, request: Request) -> None:
        """Makes a landed request run: the peer has written the KV of all its prompt tokens."""
        request.num_computed_tokens = len(request.prompt_token_ids)
        request.status = Status.RUNNING
        self.running.append(request)
        self.holdings.remember(request)

    def fork(self, parent: Request, index: int) -> Request:
        """Starts another sequence of the same prompt.

        It shares computed blocks, and copies a block before it writes to it. If too many sequences run, it waits, and
        later computes the prompt again or finds it in the prefix cache.
        """
        runs = self.places.num_free_for_further > 0
        child = sibling(parent, index=index, block_hashes=list(parent.block_hashes))
        self._take_in(child)
        if not runs:
            insort(self.waiting, child, key=service_order)
            return child
        child.status = Status.RUNNING
        child.num_computed_tokens = parent.num_computed_tokens
        child.tables = self.share_tables(parent)
        child.num_hashed_blocks = parent.num_hashed_blocks
        self.running.append(child)
        return child

    def start_sequences(self, request: Request, first_tokens: Sequence[TokenOutput]) -> list[Request]:
        """Starts the sequences of a computed prompt from their first tokens. They run, or wait for admission."""
        going_on = [t for t in first_tokens if t.finish_reason is None and t.index not in request.dropped]
        sequences = [request if t.index == request.index else self.fork(request, t.index) for t in going_on]
        for sequence, token in zip(sequences, going_on, strict=True):
            sequence.output_token_ids.append(token.token_id)
        if request not in sequences:
            self.finish(request)
        return sequences

    def export(self, request: Request) -> None:
        """Marks a computed request as exporting; it keeps its blocks until `finish`."""
        self.running.remove(request)
        request.status = Status.EXPORTING

    def park(self, request: Request) -> None:
        """Parks a computed beam until the other beams of its search are computed; see engine/step/beam_groups.py."""
        self.running.remove(request)
        request.status = Status.PARKED

    def finish(self, request: Request) -> None:
        """Ends a request in any state and frees its blocks."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        self.holdings.give_back(request)
        if not request.is_pull:
            self.preemptions.add(request.num_preemptions)
        request.status = Status.FINISHED
        del self.requests[request.key]

    def share_tables(self, request: Request) -> list[list[int]]:
        """Returns tables of a request's computed tokens for another sequence, which becomes a holder of these blocks.

        A sequence copies a shared block before it writes to it. So each sequence that shares a state copies the state,
        except the last one to write.
        """
        return [each.share(request, request.num_computed_tokens) for each in self.groups]

    def _take_in(self, request: Request) -> None:
        self._refuse_double(request)
        request.tables = [[] for _ in self.groups]
        request.swap_tables = [[] for _ in self.groups]
        self.requests[request.key] = request

    def _refuse_double(self, request: Request) -> None:
        if request.key in self.requests:
            raise AssertionError(f"request {request.key} already exists here")

    # ---- steps

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits, so that a plan may have chunks."""
        return bool(self.running or self.waiting)

    def plan(self) -> StepPlan:
        """Plans the next step: decodes first, so that none waits for a prompt; then prompts; then waiting requests.

        There are two exceptions: a waiting request comes before prompts of a lower priority that have begun, and
        shorter prompts come before long ones, but get only a share of the step.
        """
        plan = StepPlan()
        self._begin_moves(plan.moves)
        budget = self.max_num_batched_tokens
        due = sorted(self.running, key=lambda r: (r.num_behind > 1, *service_order(r)))
        first = self.places.next(self.waiting)
        turn = None if self._turns is None else self._turns.next([*due, *self.waiting[first : first + 1]])
        later = [request for request in due if self._gives_way(request)] if self.waiting else []
        way = self._giving_way(due, first) if not later else None
        if way is not None:
            later, budget = way.later, way.num_tokens
        budget = self._continue([r for r in due if r not in later] if later else due, plan, budget, turn)
        if not plan.preempted:
            self._admit(plan, budget, may_enter=lambda r: _may_enter(r, turn, way))
        if later and (budget or way is not None) and not plan.preempted:
            self._continue(later, plan, self.max_num_batched_tokens - plan.num_tokens, turn)
        plan.keeps = self._checkpoints.plan(plan.chunks)
        return plan

    def _gives_way(self, request: Request) -> bool:
        """Whether a prompt that has begun comes after the first waiting request."""
        return request.num_behind > 1 and self.waiting[0].priority < request.priority

    def _giving_way(self, due: Sequence[Request], first: int) -> GivingWay | None:
        """Returns which long prompts give way to shorter ones. `first`: the index of the next waiting request."""
        if not due or due[-1].num_behind == 1 or self._keeps_images_whole:
            return None
        return self._share.giving_way(due, next(iter(self.waiting[first : first + 1]), None), self._pooling_chunk)

    def _continue(self, due: Sequence[Request], plan: StepPlan, budget: int, turn: StepAdapters | None) -> int:
        """Adds chunks of running requests, in this order. Returns the budget that is left."""
        most = plan.num_tokens + budget
        for request in due:
            if not budget:
                break
            if request.status is not Status.RUNNING:  # preempted earlier in this loop
                continue
            if turn is not None and not turn.has(request):
                continue
            num_tokens = self._chunk(request, budget, plan)
            if not num_tokens and (request.pooling is not None or self._keeps_images_whole):
                return 0
            if num_tokens and self.allocator.grow(request, request.num_computed_tokens + num_tokens, plan):
                plan.add(request, num_tokens)
                budget = most - plan.num_tokens if plan.preempted else budget - num_tokens
        return budget

    def plan_ahead(self, leaving: Sequence[Request], may_go: Callable[[Request], bool]) -> StepPlan | None:
        """Plans the step after one that is recorded as computed, but whose tokens are not known yet.

        It follows the rules of `plan`. A sequence whose next token is still being chosen computes that token in this
        step. Sequences in `leaving` end with that token: their places are free, but not yet their blocks. Returns None
        if `plan` must plan the step, once the tokens are known. Possible reasons: a sequence may not go ahead, or gives
        way; a block must be copied or swapped; there are too few blocks; the first waiting request needs blocks that
        will soon be freed; the model has states.
        """
        if self.holdings.states is not None:
            return None
        plan, budget, gone = StepPlan(), self.max_num_batched_tokens, {request.key for request in leaving}
        due = sorted(self.running, key=lambda r: (r.num_behind > 1, *service_order(r)))
        if self._giving_way(due, self.places.next(self.waiting)) is not None:
            return None
        for request in due:
            if request.key in gone:
                continue
            if not budget:
                break
            num_tokens = self._share.limited(plan.chunks, request, min(max(1, request.num_behind), budget))
            num_tokens = self._whole(request, num_tokens, budget)
            if self.waiting and self._gives_way(request):
                return None
            if not num_tokens or not may_go(request) or not self.allocator.grow_ahead(request, num_tokens):
                return None
            plan.add(request, num_tokens)
            budget -= num_tokens
        at = self.places.next(self.waiting)
        if at < len(self.waiting) and budget and self.num_seqs - len(gone) < self.max_num_seqs:
            first = self.waiting[at]
            hit = self.holdings.find(first, first.num_tokens - 1)
            if self.allocator.num_missing(first, hit) is None:
                return None if gone or self.allocator.parked(first) else plan
            if not self._enters_ahead(first, may_go):
                return None
            self._admit(plan, budget, len(gone), lambda request: self._enters_ahead(request, may_go))
        return plan

    def _enters_ahead(self, request: Request, may_go: Callable[[Request], bool]) -> bool:
        """Whether a request can enter a step that is planned ahead.

        It must not need the host, blocks from host memory, or blocks of a parked beam. A request that lacks pixels
        may fail at admission, and only a step that is not planned ahead can report this.
        """
        needs_host = request.lacks_pixels or request.is_swapped or self.allocator.parked(request)
        return may_go(request) and not (needs_host or self.allocator.enters_with_moves(request))

    def computed(self, plan: StepPlan) -> list[Request]:
        """Records a computed step.

        Returns the requests that sample now, because their last token is computed, in the plan's order.
        """
        self._checkpoints.computed(plan.keeps, plan.chunks)
        for request, num_tokens in plan.chunks:
            self._advance(request, num_tokens)
        return [request for request, _ in plan.chunks if request.num_behind == 0]

    def accepted(self, request: Request) -> None:
        """Records that a request's last token is computed: it was a draft of the step that is being recorded."""
        self._advance(request, 1)

    def _advance(self, request: Request, num_tokens: int) -> None:
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens // self.block_size > request.num_hashed_blocks:
            self.holdings.remember(request)
        self.holdings.free_passed_blocks(request)

    def expire(self, now_s: float) -> None:
        """Ends retentions that have expired."""
        for each in self.groups:
            each.blocks.expire(now_s)

    def forget(self) -> None:
        """Forgets all cached contents, in all groups, so that nothing computed so far is reused."""
        for each in self.groups:
            each.blocks.forget()

    def change_numerics(self, numerics: Numerics) -> None:
        """Forgets all cached contents, and hashes later ones with these numerics. There must be no requests."""
        self.forget()
        self.holdings.change_numerics(numerics)

    def can_land(self, request: Request, num_tokens: int) -> bool:
        """Whether a transfer may be credited.

        Requests that wait here come first, unless the transfer has a higher priority. Each further sequence needs one
        more block, but the total is never more than the pool has.
        """
        if not request.is_pull and not self.places.may_land(request, self.waiting):
            return False
        num_sequences = min(request.sampling.num_sequences, self.max_num_seqs - self.num_seqs)
        hit, num_further = self.holdings.landing(request), 0 if request.is_pull else num_sequences - 1
        missing = self.allocator.num_missing_to_land(request, hit, num_tokens, num_further)
        return self.allocator.has(missing, hit.tables)

    @property
    def num_preemptions(self) -> int:
        return self.allocator.num_preemptions

    @property
    def num_prefix_query_tokens(self) -> int:
        return self.allocator.num_prefix_query_tokens

    @property
    def num_prefix_hit_tokens(self) -> int:
        return self.allocator.num_prefix_hit_tokens

    @property
    def num_tier_hit_tokens(self) -> int:
        return self.allocator.num_tier_hit_tokens

    @property
    def num_queued_tokens(self) -> int:
        """Counts the prompt tokens that running and waiting requests still have to compute."""
        behind = [request.num_behind for request in (*self.waiting, *self.running)]
        return sum(behind) - behind.count(1)

    @property
    def num_seqs(self) -> int:
        """Counts sequences that take part in steps or will do so once their KV has landed."""
        return self.places.num_taken

    def held(self, group: GroupHoldings) -> list[list[int]]:
        """Returns a group's blocks by holder. Holders are requests, and a planned step that copies states to blocks."""
        copies = [self._checkpoints.taken] if group.is_state else []
        return [*(group.held(request) for request in self.requests.values()), *copies]

    def num_held(self, group: GroupHoldings) -> int:
        """Counts the blocks that `held` returns; a block counts once for each holder."""
        copies = len(self._checkpoints.taken) if group.is_state else 0
        return sum(map(group.num_held, self.requests.values())) + copies

    def check(self) -> None:
        """Checks that every block is free, cached or held by a counted request, and that lists and statuses agree.

        Raises AssertionError.
        """
        for each in self.groups:
            each.blocks.check(self.held(each))
            each.swap.check([r.swap_tables[each.at] for r in self.requests.values()])
        for status, members in ((Status.WAITING, self.waiting), (Status.RUNNING, self.running)):
            expected = {r.key for r in self.requests.values() if r.status is status}
            if expected != {r.key for r in members} or len(expected) != len(members):
                raise AssertionError(f"the requests with status {status.value} do not match their list")
        if any(any(r.tables) for r in self.waiting):
            raise AssertionError("a waiting request holds blocks")

    # ---- admission

    def _chunk(self, request: Request, budget: int, plan: StepPlan) -> int:
        """Returns how many of the request's tokens the step can take.

        This is 0 if other prompts' logprobs fill the step, or if what is left of the step is too small for a pooled
        prompt's chunk or for an image that must not be split.
        """
        if request.pooling is not None:
            size = self._pooling_chunk
            num_tokens = min(request.num_behind, size - request.num_computed_tokens % size)
            return num_tokens if num_tokens <= budget else 0
        rows = MAX_PROMPT_LOGPROB_TOKENS - plan.num_prompt_rows if request.wants_prompt_logprobs else budget
        num_tokens = self._share.limited(plan.chunks, request, min(request.num_behind, budget, rows))
        if request.num_virtual_tokens > request.num_computed_tokens:  # later rows read these tokens' KV
            given = num_given_tokens(request.order.variant) - request.num_computed_tokens
            num_tokens = min(num_tokens, given) if given > 0 else num_tokens
        return self._whole(request, num_tokens, budget)

    def _whole(self, request: Request, num_tokens: int, budget: int) -> int:
        """Returns `num_tokens`, or another number of tokens if the chunk would end inside an image.

        The chunk then ends before the image. If it begins in the image, it takes the rest of the image if the budget
        allows that, and otherwise no tokens.
        """
        if not self._keeps_images_whole:
            return num_tokens
        first = request.num_computed_tokens
        for span in request.order.spans:
            if span.start < first + num_tokens < span.stop:
                if span.start > first:
                    return span.start - first
                return span.stop - first if span.stop - first <= budget else 0
        return num_tokens

    def _admit(
        self,
        plan: StepPlan,
        budget: int,
        num_leaving: int = 0,
        may_enter: Callable[[Request], bool] = lambda request: True,
    ) -> None:
        """Admits waiting requests in order, as long as there are places, up to the first that may not enter."""
        num_seqs, at = self.num_seqs - num_leaving if self.waiting else 0, 0
        while budget and (at := self.places.next(self.waiting, at)) < len(self.waiting) and may_enter(self.waiting[at]):
            request = self.waiting[at]
            num_seqs += 1
            if num_seqs > self.max_num_seqs or not self._chunk(request, budget, plan):
                return
            while (hit := self.allocator.enter(request, plan)) is None:
                if not (victims := self.allocator.parked(request)):
                    return
                self.allocator.preempt(max(victims, key=service_order), plan)
            self._checkpoints.entered(request, hit)
            self.waiting.pop(at)
            request.status = Status.RUNNING
            self.running.append(request)
            if request.lacks_pixels:
                self.finish(request)
                plan.lacking.append(request)
                num_seqs -= 1
                continue
            num_tokens = self._chunk(request, budget, plan)
            plan.admitted.append(request)
            if not num_tokens:  # the cached tokens end inside an image; the next step computes its rest
                return
            plan.add(request, num_tokens)
            budget -= num_tokens


def _may_enter(request: Request, turn: StepAdapters | None, way: GivingWay | None) -> bool:
    return (turn is None or turn.admits(request)) and (way is None or request.priority <= way.priority)
