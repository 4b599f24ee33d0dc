"""Tracks the blocks that requests hold in one group of layers of an engine. Integers only.

A request's table of a group lists blocks in the order of its tokens. In a group with a window, the padding block, which
no kernel reads, replaces blocks that no later token attends to. A state is one block for any number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.group_rule import ALL, MAX_PEER_BLOCK_SIZE, Rule
from pd_cluster.types import Request


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """`swap`: host memory for the blocks of preempted requests."""

    blocks: BlockPool
    rule: Rule = ALL
    swap: BlockPool = field(default_factory=lambda: BlockPool(0))


class Lack(NamedTuple):
    """The blocks that a request lacks in one group before a step.

    `copied`: the index in its table of a block that the step would write, and that a copy must replace first.
    """

    group: GroupHoldings
    num_blocks: int  # after its table
    copied: int | None

    @property
    def num_to_take(self) -> int:
        return self.num_blocks + (self.copied is not None)


class GroupHoldings:
    """The tables of all requests in one group: `request.tables[at]`."""

    def __init__(self, at: int, group: LayerGroup, block_size: int, step_tokens: int) -> None:
        """`step_tokens`: the maximum number of tokens of a step."""
        self.at, self.blocks, self.swap, self.rule = at, group.blocks, group.swap, group.rule
        self.is_state = group.rule.is_state
        self.padding_block = group.blocks.num_blocks  # the pool's padding block
        self._block_size, self._step_tokens = block_size, step_tokens

    @property
    def slides(self) -> bool:
        """Whether a request takes its blocks as it needs them; blocks before its window are then never taken.

        With a lower tier, blocks are loaded as a whole beginning instead.
        """
        return self.rule.window > 0 and self.blocks.tier is None

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns the length of a table of this many tokens."""
        return 1 if self.is_state else -(-num_tokens // self._block_size)

    def num_on_entry(self, request: Request, num_computed: int) -> int:
        """Returns the length of its table when it begins to run: for all its tokens, or only for the next step's.

        A prefill leg is never preempted, so two of them must not wait for each other's blocks.
        """
        num_tokens = request.num_tokens
        if self.slides and request.leg != "prefill":
            num_tokens = min(num_tokens, num_computed + self._step_tokens)
        return self.num_blocks_for(num_tokens)

    def held(self, request: Request) -> list[int]:
        """Returns its blocks, without the table's entries for freed ones."""
        table = request.tables[self.at]
        return [block for block in table if block != self.padding_block] if self.rule.window else table

    def num_held(self, request: Request) -> int:
        """Counts its blocks, without a list of them."""
        table = request.tables[self.at]
        return len(table) - (table.count(self.padding_block) if self.rule.window else 0)

    def num_passed(self, request: Request, num_computed: int) -> int:
        """Counts the first blocks that no token after `num_computed` attends to.

        A prefill leg keeps all that a block of the decode instance may begin with. If all layers have this window, it
        keeps all blocks, since a decode instance with a lower tier asks for them.
        """
        if not self.rule.window or (request.leg == "prefill" and self.at == 0):
            return 0
        kept = MAX_PEER_BLOCK_SIZE - 1 if request.leg == "prefill" else 0
        return self.rule.num_passed(num_computed - kept, self._block_size)

    def num_before(self, request: Request, num_computed: int) -> int:
        """Counts the first blocks that a request that begins there never takes."""
        return self.num_passed(request, num_computed) if self.slides else 0

    def free_passed_blocks(self, request: Request) -> None:
        """Frees blocks that the window has passed; the prefix cache keeps known contents."""
        table = request.tables[self.at]
        first = stop = self.num_passed(request, request.num_computed_tokens)
        while first and table[first - 1] != self.padding_block:
            first -= 1
        self.blocks.release(table[first:stop])
        table[first:stop] = [self.padding_block] * (stop - first)

    def lack(self, request: Request, num_tokens: int) -> Lack | None:
        """Returns what it lacks to compute its tokens up to `num_tokens`; None if it lacks nothing.

        A state with several holders, or one that is kept under a prefix, is never written, but copied first.
        """
        table = request.tables[self.at]
        first = 0 if self.is_state else request.num_computed_tokens // self._block_size
        copies = first < len(table) and self.must_copy(table[first])
        num_blocks = self.num_blocks_for(num_tokens) - len(table)
        if num_blocks <= 0 and not copies:
            return None
        return Lack(self, max(0, num_blocks), first if copies else None)

    def must_copy(self, block: int) -> bool:
        """Whether a holder must copy this block before writing it, because others use it."""
        return self.blocks.is_shared(block) or (self.is_state and self.blocks.has_content(block))

    def to_swap(self, request: Request) -> list[int]:
        """Returns the blocks whose contents a preempted request needs again."""
        if not (num_computed := request.num_computed_tokens):
            return []
        first, stop = self.num_passed(request, num_computed), self.num_blocks_for(num_computed)
        return [block for block in request.tables[self.at][first:stop] if block != self.padding_block]

    def share(self, request: Request, num_tokens: int) -> list[int]:
        """Returns a table of the same first tokens for another sequence, which becomes a holder of its blocks."""
        table = request.tables[self.at][: self.num_blocks_for(num_tokens)]
        self.blocks.share([block for block in table if block != self.padding_block])
        return table

    def give_back(self, request: Request) -> None:
        self.blocks.release(self.held(request), request.retention)
        self.swap.release(request.swap_tables[self.at])
        request.tables[self.at], request.swap_tables[self.at] = [], []
