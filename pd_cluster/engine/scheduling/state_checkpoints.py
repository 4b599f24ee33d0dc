"""Chooses the states that are kept as checkpoints after prefixes, so that later requests can begin there.

A kept state is a block in the states' pool, cached under the hash of the tokens before it. The least recently used
state is evicted first. Uses only integers and hashes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

from pd_cluster.engine.scheduling.block_holdings import Hit, Holdings
from pd_cluster.kv.reached_blocks import ReachedBlocks
from pd_cluster.settings.engine_config import StateCacheMode
from pd_cluster.types import Request, StateCopy


class KeepRule(NamedTuple):
    """Says after which tokens states are kept.

    `mode` "none": after none. "all": after each block. "align": after a prompt's last whole block, after every
    `interval` tokens of a prompt, where a prompt diverges from cached blocks of other requests, and after the last
    whole block of a sequence.
    """

    mode: StateCacheMode = "align"
    interval: int = 1024  # tokens


class Checkpoints:
    def __init__(self, holdings: Holdings, rule: KeepRule) -> None:
        self._holdings, self._rule = holdings, rule
        self._size = holdings.block_size
        self._parting: WeakKeyDictionary[Request, int] = WeakKeyDictionary()  # tokens before a request diverges
        self._last: WeakKeyDictionary[Request, bytes] = WeakKeyDictionary()  # content of the last kept state
        self.taken: list[int] = []  # blocks to which a planned step copies states
        self.is_on = rule.mode != "none" and holdings.states is not None and holdings.prefix is not None
        states = holdings.states
        self.reached = None if states is None else ReachedBlocks(holdings.blocks, states.blocks)

    def entered(self, request: Request, hit: Hit) -> None:
        """Records where a request diverges from the cached blocks of others, if no state is kept there yet."""
        if self.is_on and hit.num_known > hit.num_blocks:
            self._parting[request] = hit.num_known * self._size

    def plan(self, chunks: list[tuple[Request, int]]) -> list[StateCopy]:
        """Takes a free block for each state that this step can keep."""
        states = self._holdings.states
        if not self.is_on or states is None:
            return []
        keeps: list[StateCopy] = []
        for request, num_tokens in chunks:
            for at in self._points(request, request.num_computed_tokens, request.num_computed_tokens + num_tokens):
                if not states.blocks.num_available:
                    return keeps
                if self._holdings.last_hash(request, at // self._size) not in states.blocks:
                    keeps.append(StateCopy(request, at, *states.blocks.take(1)))
                    self.taken.append(keeps[-1].block)
        return keeps

    def computed(self, keeps: list[StateCopy], chunks: list[tuple[Request, int]]) -> None:
        """Records the states that the step has copied.

        Frees the blocks that were taken for requests removed from the step.
        """
        states = self._holdings.states
        if not keeps or states is None:
            return
        computed = {request for request, _ in chunks}
        for keep in keeps:
            if keep.request in computed:
                self._remember(keep, *keep)
            states.blocks.release([keep.block], keep.request.retention)
        self.taken.clear()

    def _remember(self, keep: StateCopy, request: Request, num_tokens: int, block: int) -> None:
        states = self._holdings.states
        assert states is not None
        chain = self._holdings.hashes(request, num_tokens // self._size)
        content = chain[-1]
        states.blocks.remember(block, content)
        if self.reached is not None:
            self.reached.kept(chain)
        if num_tokens <= len(request.prompt_token_ids) or self._rule.mode == "all":
            return
        if (before := self._last.get(request)) is not None:
            states.blocks.drop(before)
        self._last[request] = content

    def landed(self, request: Request) -> None:
        """Keeps the state of a pulled beginning under its last block's hash."""
        states = self._holdings.states
        if not self.is_on or states is None or request.num_computed_tokens % self._size:
            return
        chain = self._holdings.hashes(request, request.num_computed_tokens // self._size)
        states.blocks.remember(request.tables[states.at][0], chain[-1])
        if self.reached is not None:
            self.reached.kept(chain)

    def _points(self, request: Request, start: int, stop: int) -> Iterator[int]:
        """Yields the numbers of tokens in (start, stop] after which the request's state is kept, ascending."""
        size, num_prompt = self._size, len(request.prompt_token_ids)
        first, last = start // size * size + size, stop // size * size
        if first > last:
            return
        parting, end = self._parting.get(request), (num_prompt - 1) // size * size
        for at in range(first, last + 1, size):
            is_prompt = at <= num_prompt and (at in (parting, end) or at % self._rule.interval == 0)
            if self._rule.mode == "all" or is_prompt or (at > num_prompt and at == last):
                yield at
