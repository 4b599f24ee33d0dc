"""Which requests compute how many tokens in the next step, and which blocks they hold.

Integers only: no torch, no sockets, no clock of its own. There is no prefill or decode phase: every request has
`num_behind` tokens to catch up with, within one token budget.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from pd_cluster.kv.blocks import BlockPool
from pd_cluster.types import Request, Status


def arrival_order(request: Request) -> tuple[float, str]:
    return request.arrival_s, request.request_id


@dataclass(slots=True)
class StepPlan:
    """`chunks` holds (request, tokens to compute now); `preempted` and `admitted` changed place while planning."""

    chunks: list[tuple[Request, int]] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.chunks)


class Scheduler:
    """Holds every request of one engine. The oldest request always gets on: younger ones give way.

    A request takes the blocks of all its known tokens when it is admitted and grows by a block when it needs one.
    When there is none, the youngest running request is preempted: it gives its blocks back and computes its tokens
    again later, which gives the same tokens. Requests that are being handed over are never preempted.
    """

    def __init__(self, blocks: BlockPool, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []  # by arrival
        self.running: list[Request] = []
        self.num_preemptions = 0

    # ---- a request comes and goes

    def add(self, request: Request) -> None:
        """A request that will compute its tokens here."""
        self._refuse_double(request)
        self.requests[request.key] = request
        insort(self.waiting, request, key=arrival_order)

    def land(self, request: Request, num_tokens: int) -> None:
        """Takes landing blocks for `num_tokens` tokens. Raises OutOfBlocks and then changes nothing."""
        self._refuse_double(request)
        request.block_table = self.blocks.take(self.num_blocks_for(num_tokens))
        self.requests[request.key] = request
        request.status = Status.LANDING

    def landed(self, request: Request) -> None:
        """The peer's KV of all prompt tokens is in the blocks: the request joins the running ones."""
        request.num_computed_tokens = len(request.prompt_token_ids)
        request.status = Status.RUNNING
        self.running.append(request)

    def export(self, request: Request) -> None:
        """Computed; keeps its blocks until `finish`."""
        self.running.remove(request)
        request.status = Status.EXPORTING

    def finish(self, request: Request) -> None:
        """Ends a request in whatever state it is; its blocks come home."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        self.blocks.release(request.block_table)
        request.block_table = []
        request.status = Status.FINISHED
        del self.requests[request.key]

    def _refuse_double(self, request: Request) -> None:
        if request.key in self.requests:
            raise AssertionError(f"request {request.key} is here already")

    # ---- a step

    def plan(self) -> StepPlan:
        """The next step: decodes first, so that none waits for a prompt; then prompts; then who waits, in order."""
        plan = StepPlan()
        budget = self.max_num_batched_tokens
        for request in sorted(self.running, key=lambda r: (r.num_behind > 1, *arrival_order(r))):
            if not budget:
                break
            if request.status is not Status.RUNNING:  # preempted by one before it in this loop
                continue
            num_tokens = min(request.num_behind, budget)
            if self._make_room(request, request.num_computed_tokens + num_tokens, plan):
                plan.chunks.append((request, num_tokens))
                budget = self.max_num_batched_tokens - plan.num_tokens
        if not plan.preempted:
            self._admit(plan, budget)
        return plan

    def computed(self, plan: StepPlan) -> list[Request]:
        """Books a step that was computed; returns those that caught up and sample now, in the plan's order."""
        for request, num_tokens in plan.chunks:
            request.num_computed_tokens += num_tokens
        return [request for request, _ in plan.chunks if request.num_behind == 0]

    def can_land(self, num_tokens: int) -> bool:
        """Whether a transfer may be credited. Requests that are here already come first."""
        return (
            not self.waiting
            and self.num_seqs < self.max_num_seqs
            and self.num_blocks_for(num_tokens) + self._reserve() <= self.blocks.num_free
        )

    @property
    def num_seqs(self) -> int:
        """Sequences that take part in steps, or will as soon as their KV has landed."""
        return sum(1 for r in self.requests.values() if r.status in (Status.RUNNING, Status.LANDING))

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def check(self) -> None:
        """Every block is free or held by a counted request; lists and statuses agree. Raises AssertionError."""
        self.blocks.check([r.block_table for r in self.requests.values() if r.block_table])
        for status, members in ((Status.WAITING, self.waiting), (Status.RUNNING, self.running)):
            expected = {r.key for r in self.requests.values() if r.status is status}
            if expected != {r.key for r in members} or len(expected) != len(members):
                raise AssertionError(f"requests that are {status.value} and their list differ")

    def _reserve(self) -> int:
        """Blocks kept free for running requests to grow into, so that admitting does not preempt at once."""
        return len(self.running)

    def _admit(self, plan: StepPlan, budget: int) -> None:
        num_seqs = self.num_seqs
        while self.waiting and budget and num_seqs < self.max_num_seqs:
            request = self.waiting[0]
            num_blocks = self.num_blocks_for(request.num_tokens)
            if num_blocks + self._reserve() > self.blocks.num_free:
                return
            self.waiting.pop(0)
            request.block_table = self.blocks.take(num_blocks)
            request.status = Status.RUNNING
            self.running.append(request)
            num_tokens = min(request.num_behind, budget)
            plan.admitted.append(request)
            plan.chunks.append((request, num_tokens))
            budget -= num_tokens
            num_seqs += 1

    def _make_room(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Grows the block table to `num_tokens`, preempting younger requests. False: not in this step."""
        missing = self.num_blocks_for(num_tokens) - len(request.block_table)
        while missing > self.blocks.num_free:
            victims = [r for r in self.running if r.leg != "prefill" and arrival_order(r) > arrival_order(request)]
            if not victims:
                return False
            self._preempt(max(victims, key=arrival_order), plan)
        if missing > 0:
            request.block_table += self.blocks.take(missing)
        return True

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        self.running.remove(victim)
        plan.chunks = [chunk for chunk in plan.chunks if chunk[0] is not victim]
        plan.preempted.append(victim)
        self.blocks.release(victim.block_table)
        victim.block_table = []
        victim.num_computed_tokens = 0
        self.num_preemptions += 1
        victim.status = Status.WAITING
        insort(self.waiting, victim, key=arrival_order)
