"""Blocks that the prefix cache has evicted, kept in host memory under the same keys. Integers only: it moves no bytes.

A key is a block's chain hash, so its root (model, numerics, variant, salt) keeps tenants apart here as it does on the
device. Copies are moves of a step, in its order, on every rank of the instance: all ranks have the same blocks here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal

from pd_cluster.types import Tier

WEIGHT = 0.2  # of the newest measurement
FADING = 0.99  # of a load's cost with each step that computes: one that was too much is tried again some time

Emit = Callable[[Literal["out", "in"], int, int], None]


class LoadCost:
    """Compares the time to load a block with the time to compute its tokens, as measured here."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._block_s = self._token_s = 0.0  # 0: not measured

    def loaded(self, num_blocks: int, took_s: float) -> None:
        self._block_s = _mixed(self._block_s, took_s / num_blocks)

    def computed(self, num_tokens: int, took_s: float) -> None:
        """Notes a step that computed prompts, and nothing else worth mentioning."""
        self._token_s = _mixed(self._token_s, took_s / num_tokens)
        self._block_s *= FADING

    @property
    def loading_token_s(self) -> float:
        """Returns the time that a token's share of a block takes to load; 0: not measured."""
        return self._block_s / self._block_size

    def is_worth_it(self) -> bool:
        """Whether to load; where one of the two is not known yet, loading finds out."""
        return not self._token_s or self._block_s < self._block_size * self._token_s


def _mixed(before: float, new: float) -> float:
    return new if not before else (1 - WEIGHT) * before + WEIGHT * new


class HostTier:
    """`num_slots` places for blocks in host memory, from `first_slot` on; the least recently used goes first.

    `begin` starts the moves of a step. A slot that one of them names keeps its content until the next `begin`.
    """

    def __init__(self, num_slots: int, first_slot: int, cost: LoadCost) -> None:
        self.cost = cost
        self.num_slots = num_slots
        self._free = list(reversed(range(first_slot, first_slot + num_slots)))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._pinned: set[int] = set()
        self._emit: Emit | None = None
        self._changed: set[bytes] = set()
        self.num_stored = self.num_loaded = 0

    def __contains__(self, content: bytes) -> bool:
        return content in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def contents(self) -> dict[bytes, Tier]:
        """Returns all contents and where each is."""
        return dict.fromkeys(self._slot_of, "host")

    def place(self, content: bytes) -> Tier | None:
        return "host" if content in self._slot_of else None

    @property
    def token_s(self) -> dict[Tier, float]:
        """Returns the measured time to load a token's KV from each place."""
        return {"host": self.cost.loading_token_s} if self.cost.loading_token_s else {}

    def begin(self, emit: Emit | None) -> None:
        """All moves so far are made; `emit` takes further ones, None: there can be none."""
        self._pinned.clear()
        self._emit = emit

    def store(self, block: int, content: bytes) -> None:
        """Takes an evicted block in, before another content is written to it."""
        if content in self._slot_of:
            self._slot_of.move_to_end(content)
            return
        assert self._emit is not None, "a block was evicted where it cannot be moved"
        if (slot := self._room()) is None:
            return
        self._slot_of[content] = slot
        self._pinned.add(slot)
        self._changed.add(content)
        self._emit("out", block, slot)
        self.num_stored += 1

    def find(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Returns those at the beginning that are here."""
        found = []
        for each in hashes:
            if each not in self._slot_of:
                break
            found.append(each)
        return found

    def pin(self, contents: Sequence[bytes]) -> list[int]:
        """Keeps these for this step's moves; returns their slots."""
        for each in reversed(contents):  # the end of a prefix goes before its beginning
            self._slot_of.move_to_end(each)
        slots = [self._slot_of[each] for each in contents]
        self._pinned.update(slots)
        return slots

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        assert self._emit is not None
        for slot, block in zip(slots, blocks, strict=True):
            self._emit("in", slot, block)
        self.num_loaded += len(slots)

    def forget(self) -> None:
        """Forgets every content, while no move is under way."""
        self._changed.update(self._slot_of)
        self._free += self._slot_of.values()
        self._slot_of.clear()

    def changes(self) -> set[bytes]:
        """Returns the contents that have come or gone since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def check(self) -> None:
        """Raises AssertionError unless every slot is free or has one content."""
        used = [*self._free, *self._slot_of.values()]
        if len(used) != self.num_slots or len(set(used)) != self.num_slots:
            raise AssertionError("a slot of the host's cache is lost, or has two contents")

    def _room(self) -> int | None:
        if self._free:
            return self._free.pop()
        for content, slot in self._slot_of.items():
            if slot not in self._pinned:
                del self._slot_of[content]
                self._changed.add(content)
                return slot
        return None
