"""Which requests compute how many tokens in the next step, and which blocks they hold.

Integers only: no torch, no sockets, no clock of its own. There is no prefill or decode phase: every request has
`num_behind` tokens to catch up with, within one token budget. What a prefix cache, a landing or a swap brings is the
same arithmetic: `num_computed_tokens` starts higher.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from pd_cluster.engine.plan import MAX_PROMPT_LOGPROB_TOKENS, Move, StepPlan, service_order
from pd_cluster.errors import OutOfBlocks
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.kv.prefix import PrefixScope, chain_hashes
from pd_cluster.types import Request, Status, TokenOutput


class Scheduler:
    """Holds every request of one engine. The first in order of service always gets on: later ones give way.

    That order is by priority, then by arrival; below, "older" means earlier in it.

    A request takes the blocks of all its known tokens when it is admitted and grows by a block when it needs one.
    When there is none, the youngest running request is preempted: its KV goes to `swap` if there is room, else it
    gives its blocks back and computes its tokens again later, which gives the same tokens. Requests that are being
    handed over are never preempted. `prefix` None: nothing is looked up or kept.

    `window`: no layer sees more tokens than that; blocks that no later token sees come home early, and the block table
    names the padding block in their place, which no kernel reads.
    """

    def __init__(
        self,
        blocks: BlockPool,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix: PrefixScope | None = None,
        swap: BlockPool | None = None,
        window: int | None = None,
    ) -> None:
        self.blocks = blocks
        self.swap = swap if swap is not None else BlockPool(0)
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._prefix = prefix
        self._window = window
        self._nobodys = blocks.num_blocks  # the pool's block for padding
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []  # in order of service
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0

    # ---- a request comes and goes

    def add(self, request: Request) -> None:
        """A request that will compute its tokens here."""
        self._take_in(request)
        insort(self.waiting, request, key=service_order)

    def land(self, request: Request, num_tokens: int) -> int:
        """Takes landing blocks for `num_tokens` tokens; how many of the prompt's tokens need not land: they are cached.

        Raises OutOfBlocks and then changes nothing.
        """
        cached = self._cached_blocks(request, len(request.prompt_token_ids))
        num_missing = self.num_blocks_for(num_tokens) - len(cached)
        if num_missing > self.blocks.num_available - self.blocks.num_unheld(cached):
            raise OutOfBlocks(wanted=num_missing, free=self.blocks.num_available)
        self._take_in(request)
        self.blocks.share(cached)
        request.block_table = cached + self.blocks.take(num_missing)
        request.num_hashed_blocks = len(cached)
        request.status = Status.LANDING
        return len(cached) * self.block_size

    def landed(self, request: Request) -> None:
        """The peer's KV of all prompt tokens is in the blocks: the request joins the running ones."""
        request.num_computed_tokens = len(request.prompt_token_ids)
        request.status = Status.RUNNING
        self.running.append(request)
        self._remember(request)

    def fork(self, parent: Request, index: int) -> Request:
        """Another sequence of the same prompt; it shares what is computed and copies what it would change.

        When as many run as may, it waits instead, and computes the prompt again, or finds it in the prefix cache.
        """
        runs = self.num_seqs < self.max_num_seqs
        child = Request(
            parent.request_id,
            parent.prompt_token_ids,
            parent.sampling,
            attempt=parent.attempt,
            index=index,
            cache_salt=parent.cache_salt,
            kv_precision=parent.kv_precision,
            priority=parent.priority,
            arrival_s=parent.arrival_s,
            leg=parent.leg,
            transfer_id=parent.transfer_id,
            peer=parent.peer,
            client=parent.client,
            gathers=parent.gathers,
            batch=parent.batch,
            num_cached_tokens=parent.num_cached_tokens,
            block_hashes=list(parent.block_hashes),
            prompt_logprobs=parent.prompt_logprobs,
        )
        self._take_in(child)
        if not runs:
            insort(self.waiting, child, key=service_order)
            return child
        child.status = Status.RUNNING
        child.num_computed_tokens = parent.num_computed_tokens
        child.block_table = parent.block_table[: self.num_blocks_for(parent.num_computed_tokens)]
        child.num_hashed_blocks = parent.num_hashed_blocks
        self.blocks.share(self.held(child.block_table))
        self.running.append(child)
        return child

    def start_sequences(self, request: Request, first_tokens: Sequence[TokenOutput]) -> list[Request]:
        """The prompt is computed and each sequence's first token chosen: those that go on run, or wait for room to."""
        going_on = [t for t in first_tokens if t.finish_reason is None and t.index not in request.dropped]
        sequences = [request if t.index == request.index else self.fork(request, t.index) for t in going_on]
        for sequence, token in zip(sequences, going_on, strict=True):
            sequence.output_token_ids.append(token.token_id)
        if request not in sequences:
            self.finish(request)
        return sequences

    def export(self, request: Request) -> None:
        """Computed; keeps its blocks until `finish`."""
        self.running.remove(request)
        request.status = Status.EXPORTING

    def park(self, request: Request) -> None:
        """Computed, and needs nothing until the other beams of its search are; see engine/beam_groups.py."""
        self.running.remove(request)
        request.status = Status.PARKED

    def finish(self, request: Request) -> None:
        """Ends a request in whatever state it is; its blocks come home."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        self._give_back(request)
        request.status = Status.FINISHED
        del self.requests[request.key]

    def _take_in(self, request: Request) -> None:
        self._refuse_double(request)
        self.requests[request.key] = request

    def _refuse_double(self, request: Request) -> None:
        if request.key in self.requests:
            raise AssertionError(f"request {request.key} is here already")

    def _give_back(self, request: Request) -> None:
        self.blocks.release(self.held(request.block_table))
        self.swap.release(request.swap_table)
        request.block_table, request.swap_table = [], []
        request.num_hashed_blocks = 0

    # ---- a step

    def plan(self) -> StepPlan:
        """The next step: decodes first, so that none waits for a prompt; then prompts; then who waits, in order."""
        plan = StepPlan()
        budget = self.max_num_batched_tokens
        for request in sorted(self.running, key=lambda r: (r.num_behind > 1, *service_order(r))):
            if not budget:
                break
            if request.status is not Status.RUNNING:  # preempted by one before it in this loop
                continue
            num_tokens = self._chunk(request, budget, plan)
            if num_tokens and self._make_room(request, request.num_computed_tokens + num_tokens, plan):
                plan.add(request, num_tokens)
                budget = self.max_num_batched_tokens - plan.num_tokens if plan.preempted else budget - num_tokens
        if not plan.preempted:
            self._admit(plan, budget)
        return plan

    def grow_ahead(self, requests: Sequence[Request]) -> bool:
        """Room for the token after the one that each computes now, whose block is its own. All get it or none."""
        missing = [r for r in requests if self.num_blocks_for(r.num_computed_tokens + 2) > len(r.block_table)]
        if len(missing) > self.blocks.num_available:
            return False
        for request in missing:
            request.block_table += self.blocks.take(1)
        return True

    def computed(self, plan: StepPlan) -> list[Request]:
        """Books a step that was computed; returns those that caught up and sample now, in the plan's order."""
        for request, num_tokens in plan.chunks:
            request.num_computed_tokens += num_tokens
            if request.num_computed_tokens // self.block_size > request.num_hashed_blocks:
                self._remember(request)
            self._let_pass(request)
        return [request for request, _ in plan.chunks if request.num_behind == 0]

    def can_land(self, request: Request, num_tokens: int) -> bool:
        """Whether a transfer may be credited. Requests that wait here come first, unless it has the higher priority.

        Each further sequence is given room for a block, but never is more asked than an empty pool has.
        """
        if self.waiting and self.waiting[0].priority <= request.priority:
            return False
        if self.num_seqs >= self.max_num_seqs:
            return False
        num_sequences = min(request.sampling.num_sequences, self.max_num_seqs - self.num_seqs)
        cached = self._cached_blocks(request, len(request.prompt_token_ids))
        num_blocks = min(self.num_blocks_for(num_tokens) + num_sequences - 1, self.blocks.num_blocks)
        num_available = self.blocks.num_available - self.blocks.num_unheld(cached)
        return num_blocks - len(cached) + self._reserve() <= num_available

    @property
    def num_seqs(self) -> int:
        """Sequences that take part in steps, or will as soon as their KV has landed."""
        return sum(1 for r in self.requests.values() if r.status in (Status.RUNNING, Status.LANDING))

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def check(self) -> None:
        """Every block is free, cached or held by a counted request; lists and statuses agree. Raises AssertionError."""
        self.blocks.check([self.held(r.block_table) for r in self.requests.values()])
        self.swap.check([r.swap_table for r in self.requests.values()])
        for status, members in ((Status.WAITING, self.waiting), (Status.RUNNING, self.running)):
            expected = {r.key for r in self.requests.values() if r.status is status}
            if expected != {r.key for r in members} or len(expected) != len(members):
                raise AssertionError(f"requests that are {status.value} and their list differ")
        if any(r.block_table for r in self.waiting):
            raise AssertionError("a request that waits holds blocks")

    # ---- room

    def _chunk(self, request: Request, budget: int, plan: StepPlan) -> int:
        """Tokens of it that the step can take; 0 when other prompts whose logprobs are wanted have its place."""
        rows = MAX_PROMPT_LOGPROB_TOKENS - plan.num_prompt_rows if request.wants_prompt_logprobs else budget
        return min(request.num_behind, budget, rows)

    def _reserve(self) -> int:
        """Blocks kept free for running requests to grow into, so that admitting does not preempt at once."""
        return len(self.running)

    def _admit(self, plan: StepPlan, budget: int) -> None:
        num_seqs = self.num_seqs if self.waiting else 0
        while self.waiting and budget:
            request = self.waiting[0]
            num_seqs += 1
            if num_seqs > self.max_num_seqs or not self._chunk(request, budget, plan):
                return
            while not self._enter(request, plan):
                if not (victims := self._parked(request)):
                    return
                self._preempt(max(victims, key=service_order), plan)
            self.waiting.pop(0)
            request.status = Status.RUNNING
            self.running.append(request)
            num_tokens = self._chunk(request, budget, plan)
            plan.admitted.append(request)
            plan.add(request, num_tokens)
            budget -= num_tokens

    def _enter(self, request: Request, plan: StepPlan) -> bool:
        """Takes blocks for all known tokens, as far as they are not cached. False: there are not enough."""
        cached = self._cached_blocks(request, request.num_tokens - 1)  # the last token gives the logits
        num_missing = self.num_blocks_for(request.num_tokens) - len(cached)
        if num_missing + self._reserve() > self.blocks.num_available - self.blocks.num_unheld(cached):
            return False
        self.blocks.share(cached)
        request.block_table = cached + self.blocks.take(num_missing)
        if request.swap_table:
            plan.moves += [Move("in", s, t) for s, t in zip(request.swap_table, request.block_table, strict=False)]
            self.swap.release(request.swap_table)
            request.swap_table = []
            request.num_hashed_blocks = self._num_passed(request)  # what these held is lost
            return True
        request.num_computed_tokens = len(cached) * self.block_size
        request.num_hashed_blocks = len(cached)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed_tokens
            self.num_prefix_query_tokens += len(request.prompt_token_ids) if self._prefix is not None else 0
            self.num_prefix_hit_tokens += request.num_cached_tokens
        return True

    def _make_room(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Grows the block table to `num_tokens`, preempting younger requests. False: not in this step.

        A block that others hold too is replaced by a copy before it is written.
        """
        while True:
            first = request.num_computed_tokens // self.block_size
            is_shared = first < len(request.block_table) and self.blocks.is_shared(request.block_table[first])
            missing = max(0, self.num_blocks_for(num_tokens) - len(request.block_table))
            if missing + is_shared <= self.blocks.num_available:
                break
            victims = [r for r in self.running if r.leg != "prefill" and service_order(r) > service_order(request)]
            victims += self._parked(request)
            if not victims:
                return False
            self._preempt(max(victims, key=service_order), plan)
        if is_shared:
            (own,) = self.blocks.take(1)
            plan.moves.append(Move("copy", request.block_table[first], own))
            self.blocks.release([request.block_table[first]])
            request.block_table[first] = own
        if missing:
            request.block_table += self.blocks.take(missing)
        return True

    def _parked(self, request: Request) -> list[Request]:
        """Beams that give their blocks to a request: those of its own search and of younger requests."""
        parked = [r for r in self.requests.values() if r.status is Status.PARKED and r.block_table]
        return [r for r in parked if r.leg_key == request.leg_key or service_order(r) > service_order(request)]

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        num_blocks = self.num_blocks_for(victim.num_computed_tokens)
        swap_table = self.swap.take(num_blocks) if num_blocks <= self.swap.num_available else []
        pairs = zip(victim.block_table, swap_table, strict=False)
        plan.moves += [Move("out", source, target) for source, target in pairs if source != self._nobodys]
        self._give_back(victim)
        victim.swap_table = swap_table
        if not swap_table:
            victim.num_computed_tokens = 0
        self.num_preemptions += 1
        if victim.status is Status.PARKED:  # and stays so: nothing of it is computed again before its turn
            return
        self.running.remove(victim)
        plan.chunks = [chunk for chunk in plan.chunks if chunk[0] is not victim]
        plan.preempted.append(victim)
        victim.status = Status.WAITING
        insort(self.waiting, victim, key=service_order)

    # ---- the window

    def held(self, block_table: list[int]) -> list[int]:
        """Without the places of blocks that have gone home."""
        return block_table if self._window is None else [block for block in block_table if block != self._nobodys]

    def _num_passed(self, request: Request) -> int:
        """Of its first blocks, those that no token sees that is yet to compute. A prompt is handed over whole."""
        if self._window is None or request.leg == "prefill":
            return 0
        return max(0, request.num_computed_tokens - self._window + 1) // self.block_size

    def _let_pass(self, request: Request) -> None:
        """Blocks that have come before the window go home, those whose content is known to the prefix cache."""
        table = request.block_table
        first = stop = self._num_passed(request)
        while first and table[first - 1] != self._nobodys:
            first -= 1
        self.blocks.release(table[first:stop])
        table[first:stop] = [self._nobodys] * (stop - first)

    # ---- the prefix cache

    def _cached_blocks(self, request: Request, num_tokens: int) -> list[int]:
        """Blocks that have the beginning of its first `num_tokens` tokens."""
        if self._prefix is None or request.swap_table or request.wants_prompt_logprobs:
            return []
        return self.blocks.find(self._hashes(request, num_tokens // self.block_size))

    def _remember(self, request: Request) -> None:
        """Makes its full blocks known, so that others can share them."""
        if self._prefix is None:
            return
        num_blocks = request.num_computed_tokens // self.block_size
        hashes = self._hashes(request, num_blocks)
        for at in range(request.num_hashed_blocks, num_blocks):
            self.blocks.remember(request.block_table[at], hashes[at])
        request.num_hashed_blocks = num_blocks

    def _hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        assert self._prefix is not None
        known = request.block_hashes
        if len(known) < num_blocks:
            if known:
                parent = known[-1]
            else:
                parent = self._prefix.root(request.cache_salt, request.kv_precision, request.most_tokens)
            token_ids = request.token_ids(len(known) * self.block_size, num_blocks * self.block_size)
            known += chain_hashes(parent, token_ids, self.block_size)
        return known[:num_blocks]
