"""A slow and obvious reference for the scheduler's rules: blocks are objects, contents are tuples, lists are scanned.

Shares no code with the real one; a test compares both after every step.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

_ticks = itertools.count()


@dataclass(eq=False)
class Block:
    holders: int = 0
    content: tuple[object, ...] | None = None  # (salt, all tokens up to its end) when known and full
    dropped_at: int = 0


@dataclass(eq=False)
class Job:
    """A sequence. `tokens` are all known ones; `prompt` counts the given ones."""

    key: str
    order: tuple[int, float, str, int]  # priority, arrival, name, index
    tokens: list[int]
    prompt: int
    salt: str
    leg: str
    num_sequences: int = 1  # in the whole request
    status: str = "waiting"
    computed: int = 0
    blocks: list[Block | None] = field(default_factory=list)  # None: released when the window had passed it
    swapped: int = 0
    asked: int = 0  # blocks offered to the cache; one with content already cached is not offered again

    @property
    def behind(self) -> int:
        return len(self.tokens) - self.computed


class Reference:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_seqs: int,
        budget: int,
        caches: bool,
        num_swap_blocks: int,
        window: int | None,
    ) -> None:
        self.pool = [Block() for _ in range(num_blocks)]
        self.block_size = block_size
        self.max_seqs = max_seqs
        self.budget = budget
        self.caches = caches
        self.swap_room = num_swap_blocks
        self.window = window
        self.jobs: dict[str, Job] = {}

    # ---- blocks

    def free(self) -> list[Block]:
        return [b for b in self.pool if not b.holders and b.content is None]

    def cached(self) -> list[Block]:
        return sorted((b for b in self.pool if not b.holders and b.content is not None), key=lambda b: b.dropped_at)

    def held(self) -> list[Block]:
        return [b for b in self.pool if b.holders]

    def take(self, count: int) -> list[Block]:
        taken = (self.free() + self.cached())[:count]
        assert len(taken) == count
        for block in taken:
            block.holders, block.content = 1, None
        return taken

    def let_go(self, job: Job) -> None:
        for block in reversed(job.blocks):
            self.drop(block)
        job.blocks, job.asked = [], 0
        self.swap_room += job.swapped
        job.swapped = 0

    def drop(self, block: Block | None) -> None:
        if block is not None:
            block.holders -= 1
            block.dropped_at = next(_ticks)

    def is_passed(self, job: Job, at: int) -> bool:
        """Returns whether neither the job's next token nor a later one sees its block `at`."""
        if self.window is None or job.leg == "prefill":
            return False
        return all(position <= job.computed - self.window for position in self.positions(at))

    def passed(self, job: Job) -> list[Block | None]:
        return [None for at in range(self.need(job.computed)) if self.is_passed(job, at)]

    def positions(self, at: int) -> range:
        return range(at * self.block_size, (at + 1) * self.block_size)

    def slide(self, job: Job) -> None:
        for at in reversed(range(len(job.blocks))):
            if self.is_passed(job, at):
                self.drop(job.blocks[at])
                job.blocks[at] = None

    def need(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def remember(self, job: Job) -> None:
        if not self.caches:
            return
        full = job.computed // self.block_size
        for at in range(job.asked, full):
            content = (job.salt, *job.tokens[: (at + 1) * self.block_size])
            block = job.blocks[at]
            if block is not None and block.content is None and not any(b.content == content for b in self.pool):
                block.content = content
        job.asked = max(job.asked, full)

    def match(self, job: Job, at: int) -> Block | None:
        content = (job.salt, *job.tokens[: (at + 1) * self.block_size])
        return next((b for b in self.pool if self.caches and b.content == content), None)

    def unseen(self, num_tokens: int) -> int:
        """Returns how many first blocks none of the tokens from `num_tokens` on sees."""
        if self.window is None:
            return 0
        return sum(
            all(position <= num_tokens - self.window for position in self.positions(at))
            for at in range(self.need(num_tokens))
        )

    def known(self, job: Job, num_tokens: int) -> list[Block | None]:
        """Returns the blocks of the longest beginning of which all that is seen from behind it is cached."""
        for num_blocks in range(num_tokens // self.block_size, 0, -1):
            first = self.unseen(num_blocks * self.block_size)
            found = [self.match(job, at) for at in range(first, num_blocks)]
            if self.caches and all(found):
                return [None] * first + found
        return []

    def landing(self, job: Job) -> list[Block | None]:
        """Returns the blocks before those that must land: unseen ones, and cached ones behind these."""
        found: list[Block | None] = [None] * self.unseen(job.prompt)
        while len(found) < job.prompt // self.block_size and (block := self.match(job, len(found))) is not None:
            found.append(block)
        return found

    def num_idle(self, blocks: list[Block | None]) -> int:
        return sum(1 for b in blocks if b is not None and not b.holders)

    def share(self, blocks: list[Block | None]) -> None:
        for block in blocks:
            if block is not None:
                block.holders += 1

    # ---- the rules

    def of(self, status: str) -> list[Job]:
        return sorted((j for j in self.jobs.values() if j.status == status), key=lambda j: j.order)

    def seqs(self) -> int:
        return sum(1 for j in self.jobs.values() if j.status in ("running", "landing"))

    def kept(self) -> int:
        """For requests that begin."""
        return max(1, self.max_seqs // 8)

    def most_further(self) -> int:
        return max(1, self.max_seqs - self.kept())

    def further(self) -> int:
        return sum(1 for j in self.jobs.values() if j.status in ("running", "landing") and j.order[-1])

    def room(self) -> int:
        return len(self.free()) + len(self.cached())

    def can_land(self, job: Job, num_tokens: int) -> bool:
        shared, unseen = self.landing(job), self.unseen(job.prompt)
        slots = min(job.num_sequences, self.max_seqs - self.seqs())
        wanted = min(self.need(num_tokens) - unseen + slots - 1, len(self.pool)) - (len(shared) - unseen)
        fits = wanted + len(self.of("running")) <= self.room() - self.num_idle(shared)
        begins = self.seqs() - self.further() < self.kept() or self.further() >= self.most_further()
        before = [j for j in self.of("waiting") if not (begins and j.order[-1])]
        is_first = all(job.order[0] < other.order[0] for other in before[:1])
        return is_first and self.seqs() < self.max_seqs and fits

    def land(self, job: Job, num_tokens: int) -> int:
        shared = self.landing(job)
        self.share(shared)
        job.blocks = shared + self.take(self.need(num_tokens) - len(shared))
        job.asked, job.status = len(shared), "landing"
        self.jobs[job.key] = job
        return len(shared) * self.block_size

    def plan(self) -> tuple[list[tuple[str, int]], list[str], list[str]]:
        """Returns (chunks, admitted, preempted), by key."""
        chunks: dict[str, int] = {}
        admitted: list[str] = []
        preempted: list[str] = []
        for job in sorted(self.of("running"), key=lambda j: (j.behind > 1, j.order)):
            left = self.budget - sum(chunks.values())
            if left and job.status == "running" and self.grow(job, min(left, job.behind), chunks, preempted):
                chunks[job.key] = min(left, job.behind)
        while not preempted and sum(chunks.values()) < self.budget:
            is_full = self.further() >= self.most_further()
            able = [j for j in self.of("waiting") if not (is_full and j.order[-1])]
            if not able:
                break
            job = able[0]
            if self.seqs() >= self.max_seqs or not self.enter(job):
                break
            admitted.append(job.key)
            chunks[job.key] = min(job.behind, self.budget - sum(chunks.values()))
        return list(chunks.items()), admitted, preempted

    def enter(self, job: Job) -> bool:
        shared = self.passed(job) if job.swapped else self.known(job, len(job.tokens) - 1)
        most, start = len(job.tokens), job.computed if job.swapped else len(shared) * self.block_size
        if self.window is not None and job.leg != "prefill":
            most = min(most, start + self.budget)
        missing = self.need(most) - len(shared)
        if missing + len(self.of("running")) > self.room() - self.num_idle(shared):
            return False
        self.share(shared)
        job.blocks = shared + self.take(missing)
        if job.swapped:
            job.asked = len(shared)
        else:
            job.computed, job.asked = len(shared) * self.block_size, len(shared)
        self.swap_room += job.swapped
        job.swapped, job.status = 0, "running"
        return True

    def grow(self, job: Job, num_tokens: int, chunks: dict[str, int], preempted: list[str]) -> bool:
        while True:
            at = job.computed // self.block_size
            current = job.blocks[at] if at < len(job.blocks) else None
            copy = current is not None and current.holders > 1
            missing = max(0, self.need(job.computed + num_tokens) - len(job.blocks))
            if missing + copy <= self.room():
                break
            younger = [j for j in self.of("running") if j.order > job.order and j.leg != "prefill"]
            if not younger:
                return False
            victim = younger[-1]
            chunks.pop(victim.key, None)
            preempted.append(victim.key)
            num_blocks = self.need(victim.computed) - len(self.passed(victim))
            self.let_go(victim)
            victim.status = "waiting"
            if 0 < num_blocks <= self.swap_room:
                victim.swapped = num_blocks
                self.swap_room -= num_blocks
            else:
                victim.computed = 0
        if copy and current is not None:
            (own,) = self.take(1)
            current.holders -= 1
            job.blocks[at] = own
        job.blocks += self.take(missing)
        return True

    def finish(self, job: Job) -> None:
        self.let_go(job)
        del self.jobs[job.key]

    def fork(self, job: Job, index: int) -> Job:
        key = f"{job.key}/{index}"
        order = (*job.order[:-1], index)
        child = Job(key, order, list(job.tokens), job.prompt, job.salt, job.leg)
        if self.seqs() >= self.max_seqs or self.further() >= self.most_further():
            self.jobs[key] = child
            return child
        child.status, child.computed, child.asked = "running", job.computed, job.asked
        child.blocks = job.blocks[: self.need(job.computed)]
        for block in child.blocks:
            if block is not None:
                block.holders += 1
        self.jobs[key] = child
        return child
