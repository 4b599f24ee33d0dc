"""A slow, obvious reference for the scheduler's rules, over groups of layers (reference_groups.py).

Shares no code with the real one; a test compares both after every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.reference_groups import Block, Content, Mode, ReferenceGroup

PEER_BLOCK = 5  # largest block size of another instance, in tokens
Table = list[Block | None]  # None: a block released after the window passed it, or never taken


@dataclass(eq=False)
class Job:
    """A sequence. `tokens`: all known tokens; `prompt`: the number of prompt tokens."""

    key: str
    order: tuple[int, float, str, int]  # priority, arrival, name, index
    tokens: list[int]
    prompt: int
    salt: str
    leg: str
    num_sequences: int = 1  # of the whole request
    status: str = "waiting"
    computed: int = 0
    tables: list[Table] = field(default_factory=list)  # by group
    swapped: list[int] = field(default_factory=list)
    asked: int = 0  # number of blocks offered to the cache, including those whose content was cached already
    parting: int = 0  # cached tokens of attention layers at admission, if no state was kept there
    rolling: Content | None = None  # the content under which its latest state is kept while it generates

    @property
    def behind(self) -> int:
        return len(self.tokens) - self.computed

    def content(self, num_tokens: int) -> Content:
        return (self.salt, *self.tokens[:num_tokens])


@dataclass
class ReferencePlan:
    chunks: dict[str, int] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    moves: Counter[tuple[str, int]] = field(default_factory=Counter)  # (kind, group)
    keeps: list[tuple[Job, int, Block]] = field(default_factory=list)


class Reference:
    def __init__(
        self, groups: Sequence[ReferenceGroup], max_seqs: int, budget: int, caches: bool, mode: Mode, interval: int
    ) -> None:
        self.groups = groups
        self.block_size = groups[0].block_size
        self.max_seqs = max_seqs
        self.budget = budget
        self.caches = caches
        self.mode, self.interval = mode, interval
        self.jobs: dict[str, Job] = {}

    def add(self, job: Job) -> None:
        job.tables, job.swapped = [[] for _ in self.groups], [0 for _ in self.groups]
        self.jobs[job.key] = job

    # ---- blocks

    def let_go(self, job: Job) -> None:
        for at, group in enumerate(self.groups):
            for block in reversed(job.tables[at]):
                group.drop(block)
            group.swap_room += job.swapped[at]
            job.tables[at], job.swapped[at] = [], 0
        job.asked = 0

    def passed(self, job: Job, group: ReferenceGroup, num_tokens: int | None = None) -> int:
        """Counts the first blocks that no token from `num_tokens` (default: the next token) on sees.

        For a prompt to be handed over, keeps up to PEER_BLOCK - 1 tokens more, because the receiver's larger blocks may
        begin earlier; group 0 then keeps all blocks.
        """
        num_tokens = job.computed if num_tokens is None else num_tokens
        if job.leg != "prefill":
            return group.unseen(num_tokens)
        return 0 if group is self.groups[0] else group.unseen(max(0, num_tokens - PEER_BLOCK + 1))

    def slide(self, job: Job) -> None:
        for group, table in zip(self.groups, job.tables, strict=True):
            for at in reversed(range(self.passed(job, group))):
                group.drop(table[at])
                table[at] = None

    def remember(self, job: Job) -> None:
        full = job.computed // self.block_size
        for group, table in zip(self.groups, job.tables, strict=True):
            if self.caches and not group.is_state:
                for at in range(job.asked, full):
                    group.is_known_as(table[at], job.content((at + 1) * self.block_size))
        job.asked = max(job.asked, full)

    def found(self, job: Job, group: ReferenceGroup, num_blocks: int) -> Table | None:
        """Returns a table of the first `num_blocks` blocks if all of them that the next token sees are cached."""
        if group.is_state:
            kept = group.has(job.content(num_blocks * self.block_size))
            return None if kept is None else [kept]
        first = self.passed(job, group, num_blocks * self.block_size)
        seen = [group.has(job.content((at + 1) * self.block_size)) for at in range(first, num_blocks)]
        return [None] * first + seen if all(seen) else None

    def known(self, job: Job) -> tuple[int, int, list[Table]]:
        """Returns the longest cached prefix in blocks, the longest one ignoring states, and the first one's tables."""
        num_known = 0
        for num_blocks in range((len(job.tokens) - 1) // self.block_size, 0, -1):
            tables = [self.found(job, group, num_blocks) for group in self.groups]
            if self.caches and all(t is not None or g.is_state for g, t in zip(self.groups, tables, strict=True)):
                num_known = num_known or num_blocks
                if all(t is not None for t in tables):
                    return num_blocks, num_known, [t for t in tables if t is not None]
        return 0, num_known, [[] for _ in self.groups]

    def landing(self, job: Job, group: ReferenceGroup) -> Table:
        """Returns a table's first entries, which need not land: None for blocks no longer seen, then cached blocks."""
        found: Table = [None] * group.unseen(job.prompt)
        while self.caches and not group.is_state and len(found) < job.prompt // self.block_size:
            block = group.has(job.content((len(found) + 1) * self.block_size))
            if block is None:
                break
            found.append(block)
        return found

    # ---- the rules

    def of(self, status: str) -> list[Job]:
        return sorted((j for j in self.jobs.values() if j.status == status), key=lambda j: j.order)

    def seqs(self) -> int:
        return sum(1 for j in self.jobs.values() if j.status in ("running", "landing"))

    def kept(self) -> int:
        """Returns the number of places reserved for first sequences of requests."""
        return max(1, self.max_seqs // 8)

    def most_further(self) -> int:
        return max(1, self.max_seqs - self.kept())

    def further(self) -> int:
        return sum(1 for j in self.jobs.values() if j.status in ("running", "landing") and j.order[-1])

    def reserve(self, group: ReferenceGroup) -> int:
        return 0 if group.is_state else len(self.of("running"))

    def can_land(self, job: Job, num_tokens: int) -> bool:
        slots = min(job.num_sequences, self.max_seqs - self.seqs())
        fits = True
        for group in self.groups:
            shared, unseen = self.landing(job, group), group.unseen(job.prompt)
            wanted = min(group.need(num_tokens) - unseen + slots - 1, group.num_blocks) - (len(shared) - unseen)
            fits = fits and wanted + self.reserve(group) <= group.room_beside(shared)
        begins = self.seqs() - self.further() < self.kept() or self.further() >= self.most_further()
        before = [j for j in self.of("waiting") if not (begins and j.order[-1])]
        is_first = all(job.order[0] < other.order[0] for other in before[:1])
        return is_first and self.seqs() < self.max_seqs and fits

    def land(self, job: Job, num_tokens: int) -> list[int]:
        self.add(job)
        job.status = "landing"
        firsts = []
        for at, group in enumerate(self.groups):
            shared = self.landing(job, group)
            group.share(shared)
            job.tables[at] = shared + group.take(group.need(num_tokens) - len(shared))
            firsts.append(len(shared) * self.block_size)
        return firsts

    def plan(self) -> ReferencePlan:
        plan = ReferencePlan()
        due, first = sorted(self.of("running"), key=lambda j: (j.behind > 1, j.order)), self.of("waiting")[:1]
        later = [j for j in due if j.behind > 1 and any(other.order[0] < j.order[0] for other in first)]
        most, priority = self.budget, max((j.order[0] for j in self.jobs.values()), default=0)
        if not later and (long := [j for j in due if j.behind > 1 and self.is_long(j)]):
            worst = min(j.order[0] for j in long)
            ahead = [j for j in due if j.behind > 1 and not self.is_long(j) and j.order[0] <= worst]
            if ahead or any(j.order[0] <= worst for j in self.able()[:1]):
                later, priority = [j for j in due if j.behind > 1 and j not in ahead], worst
                most = self.for_others(sum(1 for j in due if j.behind == 1))
        self.go_on([j for j in due if j not in later], plan, most)
        while not plan.preempted and sum(plan.chunks.values()) < most:
            able = self.able()
            if not able or able[0].order[0] > priority:
                break
            job = able[0]
            if self.seqs() >= self.max_seqs or not self.enter(job, plan):
                break
            plan.admitted.append(job.key)
            plan.chunks[job.key] = min(job.behind, most - sum(plan.chunks.values()))
        if not plan.preempted:
            self.go_on(later, plan, self.budget)
        self.plan_keeps(plan)
        return plan

    def able(self) -> list[Job]:
        """Returns the waiting jobs that may get a place: no further sequences while all places for these are taken."""
        is_full = self.further() >= self.most_further()
        return [j for j in self.of("waiting") if not (is_full and j.order[-1])]

    def is_long(self, job: Job) -> bool:
        return len(job.tokens) > 8 * self.budget

    def for_others(self, num_decodes: int) -> int:
        """Returns a step's tokens for decodes, plus three quarters of the rest for prompts ahead of a long one."""
        return num_decodes + (self.budget - num_decodes) * 3 // 4

    def go_on(self, due: list[Job], plan: ReferencePlan, most: int) -> None:
        for job in due:
            left = most - sum(plan.chunks.values())
            if left and job.status == "running" and self.grow(job, min(left, job.behind), plan):
                plan.chunks[job.key] = min(left, job.behind)

    def enter(self, job: Job, plan: ReferencePlan) -> bool:
        is_swapped = any(job.swapped)
        num_blocks, num_known, shared = (0, 0, [[] for _ in self.groups]) if is_swapped else self.known(job)
        start = job.computed if is_swapped else num_blocks * self.block_size
        missing = []
        for at, group in enumerate(self.groups):
            most = len(job.tokens)
            if group.window is not None and job.leg != "prefill":
                most = min(most, start + self.budget)
            if is_swapped:
                shared[at] = [None] * self.passed(job, group)
            missing.append(1 if group.is_state else group.need(most) - len(shared[at]))
            if missing[at] + self.reserve(group) > group.room_beside(shared[at]):
                return False
        for at, group in enumerate(self.groups):
            group.share(shared[at])
            taken = group.take(missing[at])
            job.tables[at] = taken if group.is_state else shared[at] + taken
            if group.is_state and not is_swapped:
                plan.moves["copy" if shared[at] else "clear", at] += 1
                for block in shared[at]:
                    group.drop(block)
            plan.moves["in", at] += job.swapped[at]
            group.swap_room += job.swapped[at]
            job.swapped[at] = 0
        job.computed, job.asked, job.status = start, 0, "running"
        if num_known > num_blocks:
            job.parting = num_known * self.block_size
        return True

    def lacks(self, job: Job, num_tokens: int) -> list[tuple[int, int | None]]:
        """Returns per group the number of missing blocks, and the index of a shared block that the step would write."""
        found = []
        for group, table in zip(self.groups, job.tables, strict=True):
            at = 0 if group.is_state else job.computed // self.block_size
            current = table[at] if at < len(table) else None
            missing = max(0, group.need(job.computed + num_tokens) - len(table))
            found.append((missing, at if current is not None and current.holders > 1 else None))
        return found

    def grow(self, job: Job, num_tokens: int, plan: ReferencePlan) -> bool:
        while True:
            lacks = self.lacks(job, num_tokens)
            pairs = list(zip(self.groups, lacks, strict=True))
            if all(missing + (copied is not None) <= group.room() for group, (missing, copied) in pairs):
                break
            younger = [j for j in self.of("running") if j.order > job.order and j.leg != "prefill"]
            if not younger:
                return False
            self.preempt(younger[-1], plan)
        for number, (group, (missing, copied)) in enumerate(pairs):
            table = job.tables[number]
            if copied is not None:
                (own,) = group.take(1)
                group.drop(table[copied])
                table[copied] = own
                plan.moves["copy", number] += 1
            table += group.take(missing)
        return True

    def preempt(self, victim: Job, plan: ReferencePlan) -> None:
        plan.chunks.pop(victim.key, None)
        plan.preempted.append(victim.key)
        wanted = [g.need(victim.computed) - self.passed(victim, g) if victim.computed else 0 for g in self.groups]
        self.let_go(victim)
        victim.status = "waiting"
        fits = all(count <= group.swap_room for count, group in zip(wanted, self.groups, strict=True))
        if not fits or not any(wanted):
            victim.computed = 0
            return
        victim.swapped = wanted
        for at, group in enumerate(self.groups):
            group.swap_room -= wanted[at]
            plan.moves["out", at] += wanted[at]

    # ---- kept states

    def is_point(self, job: Job, at: int, stop: int) -> bool:
        """Returns whether a chunk that ends at `stop` keeps the state after `at` tokens."""
        size, later = self.block_size, range(at + 1, stop + 1)
        if at % size or self.mode == "none":
            return False
        if self.mode == "all":
            return True
        if at > job.prompt:
            return not any(other % size == 0 for other in later)
        is_last = at < job.prompt and not any(other % size == 0 for other in range(at + 1, job.prompt))
        return is_last or at == job.parting or at % self.interval == 0

    def plan_keeps(self, plan: ReferencePlan) -> None:
        for group in self.groups:
            for key, num_tokens in plan.chunks.items() if group.is_state and self.caches else ():
                job = self.jobs[key]
                stop = job.computed + num_tokens
                for at in (at for at in range(job.computed + 1, stop + 1) if self.is_point(job, at, stop)):
                    if group.has(job.content(at)) is None and group.room():
                        plan.keeps.append((job, at, *group.take(1)))

    def keep(self, plan: ReferencePlan) -> None:
        for job, at, block in plan.keeps:
            group, content = self.groups[-1], job.content(at)
            if job.key in plan.chunks:
                group.is_known_as(block, content)
                if at > job.prompt and self.mode != "all":
                    before = group.has(job.rolling) if job.rolling is not None else None
                    if before is not None:
                        before.content = None
                    job.rolling = content
            group.drop(block)

    def finish(self, job: Job) -> None:
        self.let_go(job)
        del self.jobs[job.key]

    def fork(self, job: Job, index: int) -> Job:
        key = f"{job.key}/{index}"
        order = (*job.order[:-1], index)
        child = Job(key, order, list(job.tokens), job.prompt, job.salt, job.leg)
        runs = self.seqs() < self.max_seqs and self.further() < self.most_further()
        self.add(child)
        if runs:
            child.status, child.computed, child.asked = "running", job.computed, job.asked
            child.tables = [t[: g.need(job.computed)] for g, t in zip(self.groups, job.tables, strict=True)]
            for group, table in zip(self.groups, child.tables, strict=True):
                group.share(table)
        return child
