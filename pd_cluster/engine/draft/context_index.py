"""Finds where the last tokens of a text occurred before, newest first. Knows nothing of requests or drafts.

The index uses hash chains as zlib does (RFC 1951, section 4): it stores the newest position of each bucket and, for
each position, the previous position in its bucket. The index needs 8 to 12 bytes per token and context length. Adding
one token takes a few small operations; adding thousands takes one sort.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

END = -1  # surrounds texts; not a token id
MAX_CHAIN_STEPS = 128  # limits the steps along one chain, because other contexts may share its bucket
FEW_TOKENS = 48  # up to this many tokens, adding them one by one is faster than sorting them
_MULTIPLIER = 0x9E3779B97F4A7C15  # for Fibonacci hashing: the upper bits of the product are the bucket
_WORD = (1 << 64) - 1

Hashes = NDArray[np.uint64]


def hash_contexts(newest_first: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Returns a hash of the newest `length` tokens for each of the ascending lengths."""
    found, value, start = [], 0, 0
    for length in lengths:
        for token in newest_first[start:length]:
            value = (value + token + 1) * _MULTIPLIER & _WORD
        found.append(value)
        start = length
    return found


def _hash_all(tokens: NDArray[np.int32], start: int, stop: int, lengths: Sequence[int]) -> list[Hashes]:
    """Returns the hash of the tokens before each position in [start, stop): an array [stop - start] for each length."""
    words = tokens[start - lengths[-1] : stop].astype(np.int64).view(np.uint64) + np.uint64(1)
    found, value, count = [], np.zeros(stop - start, np.uint64), len(words)
    for length in range(1, lengths[-1] + 1):
        value = (value + words[lengths[-1] - length : count - length]) * np.uint64(_MULTIPLIER)
        if length in lengths:
            found.append(value)
    return found


class ContextIndex:
    """Finds positions [first, stop) of a text by the tokens before them, with one table per context length.

    A position is the index of a token in the text. Its context of length n is the n tokens before it. `capacity`: the
    most positions that the index can hold. Positions are added in ascending order.
    """

    def __init__(self, lengths: Sequence[int], first: int, capacity: int) -> None:
        self.first = self.stop = first
        self.capacity = capacity
        bits = max(4, (capacity - 1).bit_length())
        self.shift = 64 - bits
        # `_heads`: the newest position of each bucket. `_links`: for each position, the previous one in its bucket. 0:
        # none. Memory views are kept beside the arrays because reading one integer from a view takes a third of the
        # time.
        self._heads = [np.zeros(1 << bits, np.int32) for _ in lengths]
        self._links = [np.zeros(capacity, np.int32) for _ in lengths]
        self.heads = [each.data for each in self._heads]
        self.links = [each.data for each in self._links]
        self.nbytes = 4 * len(lengths) * (capacity + (1 << bits))

    @property
    def num_free(self) -> int:
        """The number of positions that can still be added."""
        return self.first + self.capacity - self.stop

    def add(self, hashes: Sequence[int]) -> None:
        """Adds the next position, whose contexts have these hashes."""
        place, shift, at = self.stop, self.shift, self.stop - self.first
        for heads, links, value in zip(self.heads, self.links, hashes, strict=True):
            bucket = value >> shift
            links[at] = heads[bucket]
            heads[bucket] = place
        self.stop += 1

    def add_all(self, hashes: Sequence[Hashes]) -> None:
        """Adds the next positions: for each length the hashes of their contexts, [num_places]."""
        num_places, at = len(hashes[0]), self.stop - self.first
        numbers = np.arange(num_places, dtype=np.uint64)
        opens, closes = np.ones(num_places, bool), np.ones(num_places, bool)  # whether each begins or ends its bucket
        for heads, links, values in zip(self._heads, self._links, hashes, strict=True):
            # Sort by bucket, then by position, as plain integers; a stable sort of indices takes several times as long.
            ranked: Hashes = (values >> np.uint64(self.shift) << np.uint64(32)) + numbers
            ranked.sort()
            offsets, buckets = (ranked & np.uint64(0xFFFFFFFF)).view(np.int64), (ranked >> np.uint64(32)).view(np.int64)
            np.not_equal(buckets[1:], buckets[:-1], out=opens[1:])
            closes[:-1] = opens[1:]
            places = (offsets + self.stop).astype(np.int32)
            before = np.empty(num_places, np.int32)
            before[1:] = places[:-1]
            before[opens] = heads[buckets[opens]]
            links[offsets + at] = before
            heads[buckets[closes]] = places[closes]
        self.stop += num_places


class IndexedText:
    """A growing text, with indexes (the oldest first) that cover all or some of its positions.

    `tokens` holds END `reach` times, then the text up to `end`, then END at least `reach` times. `reach`: the most
    tokens that are compared before a position; at least the longest context.
    """

    def __init__(self, lengths: Sequence[int], reach: int, capacity: int) -> None:
        self.lengths, self.reach = lengths, reach
        self.tokens = array("i", (END,)) * (capacity + 2 * reach)
        self.end = reach
        self.first = reach  # positions before it are forgotten
        self.indexes: list[ContextIndex] = []
        self.nbytes = 4 * len(self.tokens)

    def reserve(self, num_tokens: int) -> None:
        """Reserves memory for this many more tokens."""
        lacking = self.end + num_tokens + self.reach - len(self.tokens)
        if lacking > 0:
            num_more = max(lacking, len(self.tokens) // 2)
            self.tokens.extend(array("i", (END,)) * num_more)
            self.nbytes += 4 * num_more

    def put_index(self, at: int, first: int, capacity: int) -> ContextIndex:
        """Inserts an empty index, for the positions from `first` on, at place `at` in the list of indexes."""
        index = ContextIndex(self.lengths, first, capacity)
        self.indexes.insert(at, index)
        self.nbytes += index.nbytes
        return index

    def hashes(self) -> list[int]:
        """Returns the hashes of the last tokens, one for each length."""
        newest_first = self.tokens[self.end - self.lengths[-1] : self.end]
        newest_first.reverse()
        return hash_contexts(newest_first, self.lengths)

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds tokens and indexes their positions, in a further index if the last one is full.

        Call `reserve` first.
        """
        if len(token_ids) > FEW_TOKENS:
            self.tokens[self.end : self.end + len(token_ids)] = array("i", token_ids)
            self.end += len(token_ids)
            self._index_new()
            return
        for token_id in token_ids:
            if not self.indexes[-1].num_free:
                self._grow(1)
            self.indexes[-1].add(self.hashes())
            self.tokens[self.end] = token_id
            self.end += 1

    def index(self, index: ContextIndex, most: int) -> None:
        """Adds the next positions of the text, at most `most` of them, to one of its indexes."""
        stop = min(index.stop + min(most, index.num_free), self.end)
        if stop > index.stop:
            tokens = np.frombuffer(self.tokens, np.int32)
            index.add_all(_hash_all(tokens, index.stop, stop, self.lengths))

    def _index_new(self) -> None:
        while (num_new := self.end - self.indexes[-1].stop) > 0:
            if not self.indexes[-1].num_free:
                self._grow(num_new)
            self.index(self.indexes[-1], num_new)

    def _grow(self, num_new: int) -> None:
        last = self.indexes[-1]
        self.put_index(len(self.indexes), last.stop, max(num_new, 2 * last.capacity))

    def places(self, which: int, value: int) -> Iterator[int]:
        """Yields positions, newest first, whose context of `lengths[which]` tokens may have the hash `value`."""
        for index in reversed(self.indexes):
            place = index.heads[which][value >> index.shift]
            if place < self.first:
                continue
            links, first = index.links[which], index.first
            for _ in range(MAX_CHAIN_STEPS):
                yield place
                place = links[place - first]
                if place < self.first:
                    break
