"""Which blocks requests hold, and which contents others may share. Integers only, like scheduler.py."""

from __future__ import annotations

from collections.abc import Sequence

from pd_cluster.kv.blocks import BlockPool
from pd_cluster.kv.prefix import PrefixScope, chain_hashes
from pd_cluster.types import Request


class Holdings:
    """`prefix` None: nothing is looked up or kept.

    `window`: no layer sees more tokens than that; blocks that no later token sees are freed early, and the block table
    names the padding block in their place, which no kernel reads.
    """

    def __init__(
        self,
        blocks: BlockPool,
        swap: BlockPool,
        block_size: int,
        prefix: PrefixScope | None,
        window: int | None,
        pooling_chunk: int,
    ) -> None:
        """`pooling_chunk`: see `plan.pooling_chunk_of`."""
        self.blocks = blocks
        self.swap = swap
        self.block_size = block_size
        self.prefix = prefix
        self._window = window
        self._blocks_of_chunk = pooling_chunk // block_size if pooling_chunk % block_size == 0 else 0
        self.nobodys = blocks.num_blocks  # the pool's padding block

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def held(self, block_table: list[int]) -> list[int]:
        """Returns the table without the places of freed blocks."""
        return block_table if self._window is None else [block for block in block_table if block != self.nobodys]

    def num_passed(self, request: Request) -> int:
        """Counts its first blocks that no later token sees; 0 for a prefill leg, whose prompt is sent whole."""
        if self._window is None or request.leg == "prefill":
            return 0
        return max(0, request.num_computed_tokens - self._window + 1) // self.block_size

    def let_pass(self, request: Request) -> None:
        """Frees blocks that the window has passed; the prefix cache keeps known contents."""
        table = request.tables[0]
        first = stop = self.num_passed(request)
        while first and table[first - 1] != self.nobodys:
            first -= 1
        self.blocks.release(table[first:stop])
        table[first:stop] = [self.nobodys] * (stop - first)

    def cached(self, request: Request, num_tokens: int) -> list[int]:
        """Returns cached blocks that hold the beginning of its first `num_tokens` tokens.

        Those of a pooled prompt are whole chunks, so that the rest is computed as it would be without them.
        """
        if self.prefix is None or request.swap_tables[0] or request.computes_all:
            return []
        num_blocks = num_tokens // self.block_size
        if request.pooling is None:
            return self.blocks.find(self._hashes(request, num_blocks))
        if not (step := self._blocks_of_chunk):
            return []
        found = self.blocks.find(self._hashes(request, num_blocks))
        return found[: len(found) // step * step]

    def in_tier(self, request: Request, num_tokens: int, num_cached: int) -> list[bytes]:
        """Returns the contents behind its cached blocks that host memory has; none if computing is quicker."""
        tier = self.blocks.tier
        if tier is None or self.prefix is None or request.swap_tables[0] or request.computes_all:
            return []
        step = 1 if request.pooling is None else self._blocks_of_chunk
        found = tier.find(self._hashes(request, num_tokens // self.block_size)[num_cached:]) if step else []
        found = found[: (num_cached + len(found)) // step * step - num_cached] if found else []
        return found if found and tier.cost.is_worth_it() else []

    def prompt_hashes(self, request: Request) -> list[bytes]:
        """Returns the hashes of its prompt's blocks that others could have computed; none where it may use none."""
        if self.prefix is None or request.computes_all:
            return []
        num_tokens = len(request.prompt_token_ids) - (request.leg != "decode")
        return self._hashes(request, num_tokens // self.block_size)

    def not_below(self, request: Request, num_cached: int) -> list[int]:
        """Returns which of its cached blocks lower tiers lack: one that serves again is worth keeping there.

        Blocks that everybody begins with are never evicted, and without them nothing behind them could be found again.
        """
        tier = self.blocks.tier
        if tier is None or not tier.lower or not num_cached:
            return []
        hashes = request.block_hashes
        return [at for at in range(num_cached) if hashes[at] not in tier and tier.is_lacking(hashes[at])]

    def keep_below(self, request: Request, cached: Sequence[int]) -> None:
        """Copies cached blocks that lower tiers lack to host memory, from where they go on."""
        if (tier := self.blocks.tier) is not None:
            for at in reversed(self.not_below(request, len(cached))):
                tier.store(cached[at], request.block_hashes[at])

    def take_with(self, cached: list[int], in_tier: Sequence[bytes], num_missing: int) -> list[int]:
        """Shares cached blocks and takes the missing ones, the first of which are loaded; returns all in order."""
        tier = self.blocks.tier
        slots = tier.pin(in_tier) if tier is not None and in_tier else []  # before a block that is evicted needs one
        self.blocks.share(cached)
        taken = self.blocks.take(num_missing)
        if tier is not None and slots:
            tier.load(slots, taken[: len(slots)])
        return cached + taken

    def remember(self, request: Request) -> None:
        """Adds its full blocks to the prefix cache, so that others can share them."""
        if self.prefix is None:
            return
        num_blocks = request.num_computed_tokens // self.block_size
        hashes = self._hashes(request, num_blocks)
        log = self.blocks.log
        for at in range(request.num_hashed_blocks, num_blocks):
            if self.blocks.remember(request.tables[0][at], hashes[at]) and log is not None:
                first = at * self.block_size
                token_ids = request.token_ids(first, first + self.block_size)
                log.stored(hashes[at], hashes[at - 1] if at else None, token_ids, request.order, first)
        request.num_hashed_blocks = num_blocks

    def _hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        assert self.prefix is not None
        known = request.block_hashes
        if len(known) < num_blocks:
            if known:
                parent = known[-1]
            else:
                parent = self.prefix.root(request.order, request.kv_precision)
            first = len(known) * self.block_size
            token_ids = request.token_ids(first, num_blocks * self.block_size)
            spans, rope_positions = request.order.spans, request.rope_positions
            known += chain_hashes(parent, token_ids, self.block_size, first, spans, rope_positions)
        return known[:num_blocks]

    def give_back(self, request: Request) -> None:
        self.blocks.release(self.held(request.tables[0]))
        self.swap.release(request.swap_tables[0])
        request.tables[0], request.swap_tables[0] = [], []
        request.num_hashed_blocks = 0
