"""Rank 0's view of a tier below host memory: its contents, jobs under way, and commands for the ranks.

docs/protocol/handover.md has the state × event table.

Uses integers, hashes and an injected clock; moves no bytes and opens no files. The tier has a content once every rank
has stored its share. If one rank lacks its share, the content is missing for all ranks.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pd_cluster.kv.eviction_queue import EvictionQueue
from pd_cluster.kv.host_tier import HostTier, LoadCost, TierCounts
from pd_cluster.kv.tier_commands import AnyTierCommand, Clear, Discard, Fetch, Look, LowerKind, TierDone, Write
from pd_cluster.types import Retention, Tier

FETCH_BLOCKS = 16  # blocks of one job; a request can use them before the next job is done
KEEP_FETCHED_S = 30.0  # how long host memory keeps fetched blocks for their request


@dataclass(slots=True)
class _TierJob:
    command: Write | Fetch | Look
    since_s: float
    num_missing: int  # the number of ranks that have not reported
    generation: int
    retention: Retention | None  # the retention of the block that is written
    num: int = 1 << 30  # the smallest number that any rank has reported


class LowerTier:
    """`capacity`: the most blocks in the tier. The least recently used ones are discarded, retained ones after others.

    0: the store discards blocks itself and is shared with other instances, so `look` must ask for its contents.
    """

    def __init__(
        self,
        kind: LowerKind,
        host: HostTier,
        capacity: int,
        num_ranks: int,
        block_size: int,
        clock: Callable[[], float],
    ) -> None:
        self.kind = kind
        self.cost = LoadCost(block_size)
        self.counts = TierCounts()
        self._host, self._capacity, self._num_ranks, self._clock = host, capacity, num_ranks, clock
        self._index = EvictionQueue(capacity // 2)  # contents of the tier
        # Contents in host memory that must be written, and their retentions.
        self._backlog: OrderedDict[bytes, Retention | None] = OrderedDict()
        self._writing: dict[bytes, int] = {}  # content -> job
        self._fetching: dict[bytes, int] = {}
        self._jobs: dict[int, _TierJob] = {}
        self._kept: dict[bytes, float] = {}  # fetched content -> when host memory may drop it
        self._commands: list[AnyTierCommand] = []
        self._changed: set[bytes] = set()
        self._waits_for: set[int] | None = set(range(num_ranks)) if capacity else None  # ranks that have not reported
        self._next_job = self._generation = 0
        self._last_s = 0.0  # when the last fetch ended

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, content: bytes) -> bool:
        return content in self._index

    @property
    def num_jobs(self) -> int:
        """Counts jobs that at least one rank has not reported yet."""
        return len(self._jobs)

    @property
    def is_asked(self) -> bool:
        """Whether the store must be asked for its contents, because other instances change them."""
        return not self._capacity

    @property
    def places(self) -> dict[bytes, Tier]:
        """Returns the tier of each content that is reported to schedulers; contents of a shared store are not."""
        return dict.fromkeys(self._index, "disk") if self.kind == "disk" else {}

    def place(self, content: bytes) -> Tier | None:
        return "disk" if self.kind == "disk" and content in self._index else None

    def changes(self) -> set[bytes]:
        changed, self._changed = self._changed, set()
        return changed if self.kind == "disk" else set()

    def take_commands(self) -> list[AnyTierCommand]:
        """Returns the new commands for the ranks. The ranks must execute them after all moves so far."""
        commands, self._commands = self._commands, []
        return commands

    # ---- contents at the start

    def opened(self, rank: int, contents: Sequence[bytes]) -> None:
        """Records a rank's contents, the least recently used first.

        Once all ranks have reported, the tier has the contents that all of them have.
        """
        if self._waits_for is None:
            return
        if len(self._waits_for) == self._num_ranks:
            for each in contents:
                self._index.used(each)
        else:
            here = set(contents)
            lost = [each for each in self._index if each not in here] + [e for e in contents if e not in self._index]
            for each in lost:
                self._index.discard(each)
            self._discard(lost)
        self._waits_for.discard(rank)
        if not self._waits_for:
            self._waits_for = None
            self._changed.update(self._index)
            self._evict_for(0)

    @property
    def is_open(self) -> bool:
        return self._waits_for is None

    # ---- writes

    def entered(self, content: bytes, retention: Retention | None = None) -> None:
        """Schedules a block that has entered host memory to be written, unless this tier already has it."""
        if content in self._index:
            self._index.used(content, retention)
        elif content not in self._writing:
            self._backlog[content] = retention
            self._backlog.move_to_end(content)
            self._write_some()

    def has_or_will_have(self, content: bytes) -> bool:
        return content in self._index or content in self._writing or content in self._backlog

    def _write_some(self) -> None:
        """Writes as many blocks as may occupy slots at a time. If too many others wait, drops the oldest ones."""
        most = max(1, self._host.num_slots // 2)
        while self._backlog and self.is_open and len(self._writing) < most:
            content, retention = self._backlog.popitem(last=False)
            if content not in self._host:
                self.counts.num_dropped += 1
                continue
            self._evict_for(1)
            command = Write(self._next_job, content, self._host.begin_read(content))
            self._writing[content] = self._begin(command, retention)
        while len(self._backlog) > self._host.num_slots:
            self._backlog.popitem(last=False)
            self.counts.num_dropped += 1

    def _evict_for(self, num_blocks: int) -> None:
        if not self._capacity:
            while len(self._index) > 1 << 20:  # there is no quota, so only the index is bounded
                self._index.discard(next(iter(self._index)))
            return
        num_over = len(self._index) + len(self._writing) + num_blocks - self._capacity
        gone = list(itertools.islice(self._index, max(0, num_over)))
        for each in gone:
            self._index.discard(each)
        self._changed.update(gone)
        self._discard(gone)

    def _discard(self, contents: Sequence[bytes]) -> None:
        if contents:
            self._commands.append(Discard(list(contents)))

    # ---- reads

    def fetch(self, contents: Sequence[bytes]) -> set[int]:
        """Fetches blocks to host memory, as many as there are slots for. Returns the jobs to wait for."""
        jobs = {self._fetching[each] for each in contents if each in self._fetching}
        wanted = [each for each in contents if each not in self._fetching and each not in self._host]
        slots = self._host.reserve(len(wanted))
        for start in range(0, len(slots), FETCH_BLOCKS):
            some = wanted[start : start + FETCH_BLOCKS][: len(slots) - start]
            into = slots[start : start + len(some)]
            job = self._begin(Fetch(self._next_job, some, into))
            self._fetching.update(dict.fromkeys(some, job))
            jobs.add(job)
            for each in some:
                if each in self._index:
                    self._index.used(each)
        return jobs

    def look(self, contents: Sequence[bytes]) -> int:
        """Asks the store how many of the leading contents it has. Returns the job."""
        return self._begin(Look(self._next_job, list(contents)))

    # ---- reports

    def done(self, report: TierDone) -> tuple[list[bytes], bool]:
        """Handles a rank's report. Returns the contents that a Look has found, and whether the job is over."""
        self.counts.num_bad[report.rank] = max(report.num_bad, self.counts.num_bad.get(report.rank, 0))
        job = self._jobs.get(report.job)
        if job is None:
            return [], False
        job.num = min(job.num, report.num)
        job.num_missing -= 1
        if job.num_missing:
            return [], False
        del self._jobs[report.job]
        found: list[bytes] = []
        match job.command:
            case Write():
                self._written(job, job.command)
            case Fetch():
                self._fetched(job, job.command)
            case Look(contents=contents):
                found = contents[: max(0, job.num)]
        return found, True

    def _written(self, job: _TierJob, command: Write) -> None:
        self._host.end_read(command.slot)
        if self._writing.get(command.content) == command.job:
            del self._writing[command.content]
        if job.num == 1 and job.generation == self._generation:
            self._index.used(command.content, job.retention)
            self._changed.add(command.content)
            self.counts.num_written += 1
            self._evict_for(0)
        else:
            self.counts.num_failed += job.num != 1
            is_newer = command.content in self._index or command.content in self._writing  # by a later job
            if self._capacity and not is_newer:  # other ranks may have written their shares, which are useless now
                self._discard([command.content])
        self._write_some()

    def _fetched(self, job: _TierJob, command: Fetch) -> None:
        now_s = self._clock()
        began_s, self._last_s = max(job.since_s, self._last_s), now_s  # a job waits for earlier ones
        for at, (content, slot) in enumerate(zip(command.contents, command.slots, strict=True)):
            if self._fetching.get(content) == command.job:
                del self._fetching[content]
            if at < job.num and job.generation == self._generation:
                self._host.filled(content, slot)
                self._kept[content] = now_s + KEEP_FETCHED_S
            else:
                self._host.not_filled(slot)
        num = max(0, min(job.num, len(command.contents)))
        if num:
            self.counts.num_fetched += num
            self.cost.loaded(num, now_s - began_s)
        if num < len(command.contents):
            self.counts.num_failed += 1
            if job.num >= 0 and job.generation == self._generation:
                self._lose(command.contents[num])

    def _lose(self, content: bytes) -> None:
        """Forgets a content that a rank could not read."""
        if self._index.discard(content):
            self._changed.add(content)
            if self._capacity:
                self._discard([content])

    def tick(self) -> None:
        """Lets host memory drop fetched blocks that their requests did not load in time."""
        now_s = self._clock()
        for content in [each for each, until_s in self._kept.items() if until_s < now_s]:
            del self._kept[content]
            self._host.unpin(content)

    # ---- forgetting

    def host_forgot(self) -> None:
        """Called when host memory has forgotten all contents, so that writes and reads under way are useless."""
        self._backlog.clear()
        self._kept.clear()
        self._writing.clear()
        self._fetching.clear()
        self._generation += 1

    def clear(self) -> None:
        """Forgets all contents, and commands the store to discard them."""
        self._changed.update(self._index)
        self._index.clear()
        self._generation += 1
        self._commands.append(Clear())

    def expire(self, now_s: float) -> None:
        """Ends retentions that have expired."""
        self._index.expire(now_s)

    def _begin(self, command: Write | Fetch | Look, retention: Retention | None = None) -> int:
        """Begins a job with the next number. Returns the number."""
        self._next_job += 1
        self._jobs[command.job] = _TierJob(command, self._clock(), self._num_ranks, self._generation, retention)
        self._commands.append(command)
        return command.job
