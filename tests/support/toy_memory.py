"""Models the memory of one group of layers: records each block's content and checks what requests read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pd_cluster.kv.group_rule import Rule
from pd_cluster.types import Request

Tokens = tuple[int, ...]


class ToyMemory:
    """A block's content is all tokens up to the last one written to it; None: never written."""

    def __init__(self, at: int, num_blocks: int, block_size: int, num_swap_blocks: int, rule: Rule) -> None:
        """`at`: the group's number."""
        self.at, self.block_size, self.rule, self.padding = at, block_size, rule, num_blocks
        self.blocks: list[Tokens | None] = [None] * (num_blocks + 1)  # and a padding block
        self.host: list[Tokens | None] = [None] * num_swap_blocks

    def move(self, kind: Literal["copy", "out", "in", "clear"], source: int, target: int) -> None:
        if kind == "clear":
            self.blocks[target] = ()
            return
        read = self.host if kind == "in" else self.blocks
        write = self.host if kind == "out" else self.blocks
        write[target] = read[source]

    def read(self, request: Request, tokens: Tokens) -> None:
        """Asserts that a request's blocks hold what the token after `tokens` sees."""
        table = request.tables[self.at]
        if self.rule.is_state:
            found, expected = [self.blocks[block] for block in table], [tokens]
        else:
            first = max(0, len(tokens) - self.rule.window + 1) if self.rule.window else 0  # first visible token
            stops = range(self.block_size, len(tokens) + self.block_size, self.block_size)
            expected = [tokens[: min(stop, len(tokens))] for stop in stops if stop > first]
            found = [self.blocks[block] for block in table[first // self.block_size : len(stops)]]
            if found and found[-1] is not None:
                found[-1] = found[-1][: len(expected[-1])]  # ignores rejected drafts' tokens, which will be overwritten
        assert found == expected, f"{request.key} finds in group {self.at} {found} instead of {expected}"

    def write(self, request: Request, tokens: Sequence[int], start: int, keeps: Sequence[tuple[int, int]] = ()) -> None:
        """Writes the tokens from `start` on.

        A state is computed from its block's content; `keeps`: (number of tokens, block that receives a copy then).
        """
        table = request.tables[self.at]
        if self.rule.is_state:
            (own,) = table
            for stop, target in [*keeps, (len(tokens), own)]:
                held = self.blocks[own]
                assert held is not None
                assert start <= stop <= len(tokens)
                self.blocks[own] = self.blocks[target] = (*held, *tokens[start:stop])
                start = stop
            return
        for position in range(start, len(tokens)):
            block = table[position // self.block_size]
            assert block != self.padding, f"{request.key} writes to a block that it does not hold"
            self.blocks[block] = tuple(tokens[: position + 1])
