"""Tracks the blocks that requests hold in each group of layers, and the contents that they can share.

Uses only integers and hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pd_cluster.engine.scheduling.group_holdings import GroupHoldings
from pd_cluster.kv.prefix_index import PrefixScope, chain_hashes, prompt_hashes
from pd_cluster.numerics import Numerics
from pd_cluster.types import Request


class Hit(NamedTuple):
    """The beginning of a request that the prefix cache has: `num_blocks` blocks of tokens.

    `tables`: for each group, the cached blocks, without those that its window has passed; for a state, the block of the
    state after this beginning. `num_known`: how many blocks would be found if states were ignored.
    """

    num_blocks: int
    tables: list[list[int]]
    num_known: int = 0


class Holdings:
    """The blocks of all requests.

    `prefix` None: there is no prefix cache. Only the first group's pool can have a log of its contents, or lower
    tiers; it has lower tiers only if there is no other group.
    """

    def __init__(
        self, groups: Sequence[GroupHoldings], block_size: int, prefix: PrefixScope | None, pooling_chunk: int
    ) -> None:
        """`pooling_chunk`: see `step_plan.pooling_chunk_of`."""
        self.groups = groups
        self.block_size = block_size
        self.prefix = prefix
        self.states = next((each for each in groups if each.is_state), None)
        self._of_tokens = [each for each in groups if not each.is_state]
        self._with_window = [each for each in groups if each.rule.window]
        self._sliding = [each for each in self._of_tokens if each.slides]
        self._whole = [each for each in self._of_tokens if not each.slides]
        self._blocks_of_chunk = pooling_chunk // block_size if pooling_chunk % block_size == 0 else 0
        self.blocks = groups[0].blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def free_passed_blocks(self, request: Request) -> None:
        for each in self._with_window:
            each.free_passed_blocks(request)

    # ---- known contents

    def find(self, request: Request, num_tokens: int) -> Hit:
        """Returns how much of the request's first `num_tokens` tokens is cached.

        For a pooled prompt only whole chunks count, so that the other chunks are the same as without the prefix cache.
        """
        step = 1 if request.pooling is None else self._blocks_of_chunk
        if self.prefix is None or request.is_swapped or request.computes_all or not step:
            return Hit(0, [[] for _ in self.groups])
        hashes = self.hashes(request, num_tokens // self.block_size)
        found = {each.at: each.blocks.find(hashes) for each in self._whole}
        most = min(map(len, found.values()), default=len(hashes)) // step * step
        num_known = num_blocks = self._longest(request, most, step, self._sliding)
        if self.states is not None:
            num_blocks = self._longest(request, num_known, step, [*self._sliding, self.states])
        tables = [
            found[each.at][:num_blocks] if each.at in found else self._known(each, request, num_blocks)
            for each in self.groups
        ]
        return Hit(num_blocks, tables, num_known)

    def _longest(self, request: Request, most: int, step: int, groups: Sequence[GroupHoldings]) -> int:
        """Returns the largest number of blocks such that each group has all blocks that tokens after them attend to."""
        num_blocks = most
        while num_blocks:
            unknown = [self._last_unknown(each, request, num_blocks) for each in groups]
            if not (found := [at for at in unknown if at is not None]):
                break
            num_blocks = min(found) // step * step  # any longer beginning would also need the missing block
        return num_blocks

    def _last_unknown(self, group: GroupHoldings, request: Request, num_blocks: int) -> int | None:
        hashes, first = request.block_hashes, self._first_seen(group, request, num_blocks)
        return next((at for at in range(num_blocks - 1, first - 1, -1) if hashes[at] not in group.blocks), None)

    def _known(self, group: GroupHoldings, request: Request, num_blocks: int) -> list[int]:
        first = self._first_seen(group, request, num_blocks)
        return group.blocks.find(request.block_hashes[first:num_blocks]) if num_blocks else []

    def _first_seen(self, group: GroupHoldings, request: Request, num_blocks: int) -> int:
        """Returns the first of a request's blocks that tokens after `num_blocks` blocks attend to."""
        return num_blocks - 1 if group.is_state else group.num_before(request, num_blocks * self.block_size)

    def landing(self, request: Request) -> Hit:
        """Returns the cached blocks of a prompt that lands, for each group independently; never includes states.

        In a group with a window, they begin with the first block that the token after the prompt attends to.
        """
        num_tokens = len(request.prompt_token_ids)
        if self.prefix is None or request.computes_all:
            return Hit(0, [[] for _ in self.groups])
        hashes, tables = self.hashes(request, num_tokens // self.block_size), list[list[int]]()
        for each in self.groups:
            first = each.num_before(request, num_tokens)
            tables.append([] if each.is_state else each.blocks.find(hashes[first:]))
        return Hit(0, tables)

    def in_tier(self, request: Request, num_tokens: int, num_cached: int) -> list[bytes]:
        """Returns the contents in host memory that follow the cached blocks; none if computing them is faster."""
        tier = self.blocks.tier
        if tier is None or self.prefix is None or request.is_swapped or request.computes_all:
            return []
        step = 1 if request.pooling is None else self._blocks_of_chunk
        found = tier.find(self.hashes(request, num_tokens // self.block_size)[num_cached:]) if step else []
        found = found[: (num_cached + len(found)) // step * step - num_cached] if found else []
        return found if found and tier.cost.is_worth_it() else []

    def prompt_hashes(self, request: Request) -> list[bytes]:
        """Returns the hashes of the prompt's blocks that others may have computed; none if blocks are not shared."""
        if self.prefix is None or request.computes_all:
            return []
        num_tokens = len(request.prompt_token_ids) - (request.leg != "decode")
        return self.hashes(request, num_tokens // self.block_size)

    def root(self, request: Request) -> bytes:
        """Returns the hash from which the request's blocks' hashes are chained; empty if blocks are not shared."""
        return self.prefix.root(request.order, request.kv_precision) if self.prefix is not None else b""

    def missing_below(self, request: Request, num_cached: int) -> list[int]:
        """Returns the indices of the request's cached blocks that both host memory and some lower tier lack.

        A block that is reused is worth keeping there. Blocks of common beginnings are never evicted, so lower tiers
        would otherwise never get them, and the blocks after them could not be used.
        """
        tier = self.blocks.tier
        if tier is None or not tier.lower or not num_cached:
            return []
        hashes = request.block_hashes
        return [at for at in range(num_cached) if hashes[at] not in tier and tier.is_missing_below(hashes[at])]

    def keep_below(self, request: Request, cached: Sequence[int]) -> None:
        """Copies cached blocks that lower tiers lack to host memory, from which they are copied on to lower tiers."""
        if (tier := self.blocks.tier) is not None:
            for at in reversed(self.missing_below(request, len(cached))):
                tier.store(cached[at], request.block_hashes[at], request.retention)

    # ---- held blocks

    def take_with(self, cached: list[int], in_tier: Sequence[bytes], num_missing: int) -> list[int]:
        """Shares the first group's cached blocks and takes the missing ones.

        The first of these are loaded from host memory. Returns all of them, in order.
        """
        tier = self.blocks.tier
        slots = tier.pin(in_tier) if tier is not None and in_tier else []  # before evictions need slots
        self.blocks.share(cached)
        taken = self.blocks.take(num_missing)
        if tier is not None and slots:
            tier.load(slots, taken[: len(slots)])
        return cached + taken

    def remember(self, request: Request) -> None:
        """Adds the request's full blocks to the prefix cache, so that other requests can share them."""
        if self.prefix is None:
            return
        num_blocks = request.num_computed_tokens // self.block_size
        hashes = self._hashed(request, num_blocks)
        log = self.blocks.log
        for each in self._of_tokens:
            table = request.tables[each.at]
            for at in range(request.num_hashed_blocks, num_blocks):
                if table[at] == each.padding_block or not each.blocks.remember(table[at], hashes[at]):
                    continue
                if each.at == 0 and log is not None:
                    first = at * self.block_size
                    token_ids = request.token_ids(first, first + self.block_size)
                    log.stored(hashes[at], hashes[at - 1] if at else None, token_ids, request.order, first)
        request.num_hashed_blocks = num_blocks

    def hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """Returns the hashes of the request's first blocks of tokens.

        The last hash also identifies the state after them.
        """
        return self._hashed(request, num_blocks)[:num_blocks]

    def last_hash(self, request: Request, num_blocks: int) -> bytes:
        """Returns the last hash of `hashes`."""
        return self._hashed(request, num_blocks)[num_blocks - 1]

    def _hashed(self, request: Request, num_blocks: int) -> list[bytes]:
        """Returns the request's own list of hashes, extended to at least this many."""
        assert self.prefix is not None
        known, order = request.block_hashes, request.order
        if len(known) < num_blocks:
            if known:
                parent = known[-1]
            else:
                parent = self.root(request)
                if request.prompt_token_ids is order.prompt_token_ids:
                    known += prompt_hashes(order, parent, self.block_size, num_blocks)[:num_blocks]
                    parent = known[-1] if known else parent
            first = len(known) * self.block_size
            token_ids = request.token_ids(first, num_blocks * self.block_size)
            known += chain_hashes(parent, token_ids, self.block_size, first, order.spans, request.rope_positions)
        return known

    def change_numerics(self, numerics: Numerics) -> None:
        if self.prefix is not None:
            self.prefix = replace(self.prefix, numerics=numerics)

    def give_back(self, request: Request) -> None:
        for each in self.groups:
            each.give_back(request)
        request.num_hashed_blocks = 0
