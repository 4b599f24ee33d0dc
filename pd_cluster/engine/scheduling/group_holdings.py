"""Tracks the blocks that requests hold in one group of layers of an engine. Uses only integers.

A request's table for a group lists blocks in the order of its tokens. In a group with a window, the padding block takes
the place of blocks that no later token attends to; kernels never read it. A state is one block for any number of
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.group_rule import ALL, MAX_PEER_BLOCK_SIZE, Rule
from pd_cluster.types import Request


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The pools of a group, and the rule of its layers. `swap`: host memory for the blocks of preempted requests."""

    blocks: BlockPool
    rule: Rule = ALL
    swap: BlockPool = field(default_factory=lambda: BlockPool(0))


class Lack(NamedTuple):
    """The blocks that a request lacks in one group before a step.

    `copied`: the index in the request's table of a block that the step would write and that must first be replaced by a
    copy.
    """

    group: GroupHoldings
    num_blocks: int  # blocks to append to its table
    copied: int | None

    @property
    def num_to_take(self) -> int:
        return self.num_blocks + (self.copied is not None)


class GroupHoldings:
    """Manages one group's table of every request: `request.tables[at]`."""

    def __init__(self, at: int, group: LayerGroup, block_size: int, step_tokens: int) -> None:
        """`step_tokens`: the maximum number of tokens of a step."""
        self.at, self.blocks, self.swap, self.rule = at, group.blocks, group.swap, group.rule
        self.is_state = group.rule.is_state
        self.padding_block = group.blocks.num_blocks  # the pool's padding block
        self._block_size, self._step_tokens = block_size, step_tokens

    @property
    def slides(self) -> bool:
        """Whether a request takes blocks only as it needs them, and so never takes blocks before its window.

        False with a lower tier, from which the whole beginning of a prompt is loaded.
        """
        return self.rule.window > 0 and self.blocks.tier is None

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns the length of the table for this many tokens."""
        return 1 if self.is_state else -(-num_tokens // self._block_size)

    def num_on_entry(self, request: Request, num_computed: int) -> int:
        """Returns the length of a request's table when it begins to run: for all its tokens, or only for its next step.

        A prefill leg gets blocks for all its tokens: as prefill legs are never preempted, two of them could otherwise
        wait for each other's blocks forever.
        """
        num_tokens = request.num_tokens
        if self.slides and request.leg != "prefill":
            num_tokens = min(num_tokens, num_computed + self._step_tokens)
        return self.num_blocks_for(num_tokens)

    def held(self, request: Request) -> list[int]:
        """Returns the request's blocks, without padding blocks."""
        table = request.tables[self.at]
        return [block for block in table if block != self.padding_block] if self.rule.window else table

    def num_held(self, request: Request) -> int:
        """Counts the blocks that `held` returns, without building the list."""
        table = request.tables[self.at]
        return len(table) - (table.count(self.padding_block) if self.rule.window else 0)

    def num_passed(self, request: Request, num_computed: int) -> int:
        """Counts the first blocks that no token after `num_computed` attends to.

        A prefill leg keeps some more blocks, because the decode instance's blocks may be larger and begin earlier. In
        the first group it keeps all blocks, because a decode instance with a lower tier requests them.
        """
        if not self.rule.window or (request.leg == "prefill" and self.at == 0):
            return 0
        kept = MAX_PEER_BLOCK_SIZE - 1 if request.leg == "prefill" else 0
        return self.rule.num_passed(num_computed - kept, self._block_size)

    def num_before(self, request: Request, num_computed: int) -> int:
        """Counts the first blocks that a request never takes if it begins after `num_computed` tokens."""
        return self.num_passed(request, num_computed) if self.slides else 0

    def free_passed_blocks(self, request: Request) -> None:
        """Frees blocks that the window has passed. Those with a known content remain in the prefix cache."""
        table = request.tables[self.at]
        first = stop = self.num_passed(request, request.num_computed_tokens)
        while first and table[first - 1] != self.padding_block:
            first -= 1
        self.blocks.release(table[first:stop])
        table[first:stop] = [self.padding_block] * (stop - first)

    def lack(self, request: Request, num_tokens: int) -> Lack | None:
        """Returns what a request lacks to compute its tokens up to `num_tokens`; None if it lacks nothing.

        A block with several holders, or a state that is kept for a prefix, is never written; a copy replaces it first.
        """
        table = request.tables[self.at]
        first = 0 if self.is_state else request.num_computed_tokens // self._block_size
        copies = first < len(table) and self.must_copy(table[first])
        num_blocks = self.num_blocks_for(num_tokens) - len(table)
        if num_blocks <= 0 and not copies:
            return None
        return Lack(self, max(0, num_blocks), first if copies else None)

    def must_copy(self, block: int) -> bool:
        """Whether a holder must copy this block before it writes, because the block has other users."""
        return self.blocks.is_shared(block) or (self.is_state and self.blocks.has_content(block))

    def to_swap(self, request: Request) -> list[int]:
        """Returns the blocks whose contents a preempted request will need again."""
        if not (num_computed := request.num_computed_tokens):
            return []
        first, stop = self.num_passed(request, num_computed), self.num_blocks_for(num_computed)
        return [block for block in request.tables[self.at][first:stop] if block != self.padding_block]

    def share(self, request: Request, num_tokens: int) -> list[int]:
        """Returns a table of a request's first tokens for another sequence, which becomes a holder of the blocks."""
        table = request.tables[self.at][: self.num_blocks_for(num_tokens)]
        self.blocks.share([block for block in table if block != self.padding_block])
        return table

    def give_back(self, request: Request) -> None:
        self.blocks.release(self.held(request), request.retention)
        self.swap.release(request.swap_tables[self.at])
        request.tables[self.at], request.swap_tables[self.at] = [], []
