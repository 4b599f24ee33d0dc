"""Keeps in host memory, under the same keys, blocks that the prefix cache has evicted. Moves no bytes itself.

A key is a block's chain hash, whose root (model, numerics, variant, salt) separates tenants, as on the device. Blocks
are copied by moves of a step, in the same order on every rank of the instance, so all ranks have the same blocks in
host memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pd_cluster.kv.eviction_queue import EvictionQueue
from pd_cluster.kv.tier_commands import LowerKind
from pd_cluster.types import Retention, Tier

WEIGHT = 0.2  # the weight of the newest measurement
FADING = 0.99  # each step with prompts multiplies the cost of a load by this, so that expensive loads are tried again

Emit = Callable[[Literal["out", "in"], int, int], None]


class LoadCost:
    """Compares the measured time to load a block with the time to compute its tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._block_s = self._token_s = 0.0  # 0: not measured

    def loaded(self, num_blocks: int, took_s: float) -> None:
        self._block_s = _smoothed(self._block_s, took_s / num_blocks)

    def computed(self, num_tokens: int, took_s: float) -> None:
        """Records a step that mostly computed prompts."""
        self._token_s = _smoothed(self._token_s, took_s / num_tokens)
        self._block_s *= FADING

    @property
    def loading_token_s(self) -> float:
        """Returns the time to load one token's share of a block; 0: not measured."""
        return self._block_s / self._block_size

    def compute_s(self, num_blocks: int) -> float:
        """Returns the time to compute the tokens of this many blocks; 0: not measured."""
        return num_blocks * self._block_size * self._token_s

    def is_worth_it(self) -> bool:
        """Whether to load a block. As long as either time is unknown, blocks are loaded, so that loads are measured."""
        return not self._token_s or self._block_s < self._block_size * self._token_s


def _smoothed(before: float, new: float) -> float:
    return new if not before else (1 - WEIGHT) * before + WEIGHT * new


@dataclass(slots=True)
class TierCounts:
    """Counts blocks since the start."""

    num_written: int = 0
    num_dropped: int = 0  # not written, because too many blocks were waiting
    num_failed: int = 0  # writes and reads that failed on a rank
    num_fetched: int = 0
    num_bad: dict[int, int] = field(default_factory=dict)  # rank -> blocks whose content was not what had been written


class TierBelow(Protocol):
    """The interface of a tier below host memory. See kv/lower_tier.py."""

    kind: LowerKind
    cost: LoadCost
    counts: TierCounts

    def __len__(self) -> int: ...

    @property
    def places(self) -> dict[bytes, Tier]: ...

    def place(self, content: bytes) -> Tier | None: ...

    def has_or_will_have(self, content: bytes) -> bool: ...

    def changes(self) -> set[bytes]: ...

    def entered(self, content: bytes, retention: Retention | None) -> None: ...

    def expire(self, now_s: float) -> None: ...

    def host_forgot(self) -> None: ...


class HostTier:
    """Assigns `num_slots` slots of host memory, from `first_slot` on.

    The least recently used block is replaced first. Retained blocks, which fill at most half of the slots, are replaced
    after others. `begin` starts the moves of a step. A slot that occurs in a move keeps its content until the next
    `begin`.
    """

    def __init__(self, num_slots: int, first_slot: int, cost: LoadCost) -> None:
        self.cost = cost
        self.num_slots = num_slots
        self._free = list(reversed(range(first_slot, first_slot + num_slots)))
        self._slot_of: dict[bytes, int] = {}
        self._queue = EvictionQueue(num_slots // 2)  # has the same contents
        self._pinned: set[int] = set()
        self._read: Counter[int] = Counter()  # slots that lower tiers are reading -> number of readers
        self.filling: set[int] = set()  # slots that a lower tier writes
        self.kept: set[int] = set()  # slots filled for requests that have not been admitted yet
        self._retired: set[int] = set()  # slots whose content was dropped while lower tiers still read them
        self.lower: list[TierBelow] = []
        self._emit: Emit | None = None
        self._changed: set[bytes] = set()
        self.num_stored = self.num_loaded = 0

    def __contains__(self, content: bytes) -> bool:
        return content in self._slot_of

    def slot_of(self, content: bytes) -> int:
        return self._slot_of[content]

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def contents(self) -> dict[bytes, Tier]:
        """Returns all contents and the tier of each."""
        found: dict[bytes, Tier] = {}
        for lower in self.lower:
            found.update(lower.places)
        return found | dict.fromkeys(self._slot_of, "host")

    def place(self, content: bytes) -> Tier | None:
        if content in self._slot_of:
            return "host"
        return next((place for lower in self.lower if (place := lower.place(content)) is not None), None)

    @property
    def token_s(self) -> dict[Tier, float]:
        """Returns the measured time to load a token's KV from each tier."""
        found: dict[Tier, float] = {"host": self.cost.loading_token_s}
        for lower in self.lower:
            if lower.kind == "disk":
                found["disk"] = lower.cost.loading_token_s
        return {tier: token_s for tier, token_s in found.items() if token_s}

    def computed(self, num_tokens: int, took_s: float) -> None:
        """Records a step that computed prompts; see LoadCost."""
        for cost in (self.cost, *(lower.cost for lower in self.lower)):
            cost.computed(num_tokens, took_s)

    def begin(self, emit: Emit | None) -> None:
        """Call this after earlier moves have been made. `emit` receives further moves; None: no moves are possible."""
        self._pinned.clear()
        self._emit = emit

    def store(self, block: int, content: bytes, retention: Retention | None = None) -> None:
        """Copies an evicted block to a slot, by a move. Call this before another content is written to the block."""
        if content in self._slot_of:
            self._queue.used(content, retention)
            return
        assert self._emit is not None, "a block was evicted when no move is possible"
        if (slot := self._free_slot()) is None:
            return
        self._slot_of[content] = slot
        self._queue.used(content, retention)
        self._pinned.add(slot)
        self._changed.add(content)
        self._emit("out", block, slot)
        self.num_stored += 1
        for lower in self.lower:
            lower.entered(content, retention)

    def expire(self, now_s: float) -> None:
        """Ends retentions that have expired, in host memory and below."""
        self._queue.expire(now_s)
        for lower in self.lower:
            lower.expire(now_s)

    def find(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Returns the leading hashes whose blocks are in host memory."""
        found = []
        for each in hashes:
            if each not in self._slot_of:
                break
            found.append(each)
        return found

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Makes a prefix's blocks in host memory the most recently used ones."""
        for each in reversed(hashes):  # the end of a prefix is evicted before its beginning
            if each in self._slot_of:
                self._queue.used(each)

    def pin(self, contents: Sequence[bytes]) -> list[int]:
        """Keeps these contents for this step's moves. Returns their slots."""
        self.touch(contents)
        slots = [self._slot_of[each] for each in contents]
        self._pinned.update(slots)
        self.kept.difference_update(slots)
        return slots

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        assert self._emit is not None
        for slot, block in zip(slots, blocks, strict=True):
            self._emit("in", slot, block)
        self.num_loaded += len(slots)

    def forget(self) -> None:
        """Forgets all contents. Call this only when all moves have been made."""
        self._changed.update(self._slot_of)
        for slot in self._slot_of.values():
            self._drop(slot)
        self._slot_of.clear()
        self._queue.clear()
        for lower in self.lower:
            lower.host_forgot()

    def _drop(self, slot: int) -> None:
        """Frees a slot whose content is forgotten, at once or when its last reader ends."""
        self.kept.discard(slot)
        if self._read[slot]:
            self._retired.add(slot)
        else:
            self._free.append(slot)

    # ---- exchange with lower tiers

    def begin_read(self, content: bytes) -> int:
        """Returns the slot of a content. The slot keeps the content until `end_read`."""
        slot = self._slot_of[content]
        self._queue.used(content)  # so that `_free_slot` finds it last
        self._read[slot] += 1
        return slot

    def end_read(self, slot: int) -> None:
        self._read[slot] -= 1
        if not self._read[slot]:
            del self._read[slot]
            if slot in self._retired:
                self._retired.discard(slot)
                self._free.append(slot)

    def reserve(self, num_slots: int) -> list[int]:
        """Reserves slots for a lower tier to write.

        Returns fewer than requested if too few are free, or if half of all slots are reserved or wait for their
        requests.
        """
        room = self.num_slots // 2 - len(self.filling) - len(self.kept)
        taken: list[int] = []
        while len(taken) < min(num_slots, room) and (slot := self._free_slot()) is not None:
            self.filling.add(slot)
            taken.append(slot)
        return taken

    def is_missing_below(self, content: bytes) -> bool:
        """Whether some lower tier neither has this content nor will get it."""
        return any(not lower.has_or_will_have(content) for lower in self.lower)

    def filled(self, content: bytes, slot: int) -> None:
        """Assigns a content to a reserved slot, which keeps it until a request loads it or `unpin` is called."""
        self.filling.discard(slot)
        is_here = content in self._slot_of
        self._queue.used(content)
        if is_here:
            self._free.append(slot)
            return
        self._slot_of[content] = slot
        self.kept.add(slot)
        self._changed.add(content)

    def not_filled(self, slot: int) -> None:
        self.filling.discard(slot)
        self._free.append(slot)

    def unpin(self, content: bytes) -> None:
        """Allows a filled slot to be reused, although no request has loaded its content."""
        if (slot := self._slot_of.get(content)) is not None:
            self.kept.discard(slot)

    def changes(self) -> set[bytes]:
        """Returns the contents that appeared or disappeared since the last call."""
        changed, self._changed = self._changed, set()
        for lower in self.lower:
            changed |= lower.changes()
        return changed

    def check(self) -> None:
        """Raises AssertionError unless every slot is free or has one content."""
        used = [*self._free, *self._slot_of.values(), *self.filling, *self._retired]
        if len(used) != self.num_slots or len(set(used)) != self.num_slots:
            raise AssertionError("a slot of the host's cache is lost, or has two contents")
        if sorted(self._slot_of) != sorted(self._queue):
            raise AssertionError("the host's cache and its queue for eviction have different contents")

    def _free_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        for content in self._queue:
            slot = self._slot_of[content]
            if slot not in self._pinned and slot not in self.kept and slot not in self._read:
                del self._slot_of[content]
                self._queue.discard(content)
                self._changed.add(content)
                return slot
        return None
