"""The blocks that a request holds in a group of layers: for all its tokens, for its last ones, or one with a state.

Integers only.
"""

from __future__ import annotations

from typing import NamedTuple

from pd_cluster.wire import RuleName


class Rule(NamedTuple):
    """`window`: the tokens that a layer attends to, including the token itself; 0 unless the rule is "window"."""

    name: RuleName = "all"
    window: int = 0

    @property
    def is_state(self) -> bool:
        return self.name == "state"

    def first_seen(self, num_tokens: int) -> int:
        """Returns the first of `num_tokens` computed tokens that a later token attends to."""
        return max(0, num_tokens - self.window + 1) if self.window else 0

    def num_passed(self, num_tokens: int, block_size: int) -> int:
        """Counts the first blocks of `num_tokens` computed tokens that no later token attends to."""
        return self.first_seen(num_tokens) // block_size


def within(window: int | None) -> Rule:
    """Returns the rule of layers that attend to this many tokens; None: all."""
    return ALL if window is None else Rule("window", window)


ALL, STATE = Rule(), Rule("state")
MAX_PEER_BLOCK_SIZE = 256  # tokens; a decode instance with larger blocks cannot be a peer if a group has a window
