"""Rules that say which blocks a request holds in a group of layers.

There are three: the blocks of all its tokens, those of its last tokens, or one block with a state.

Uses only integers.
"""

from __future__ import annotations

from typing import NamedTuple

from pd_cluster.wire import RuleName


class Rule(NamedTuple):
    """A group's rule. `window`: how many tokens a token attends to, including itself; 0 unless `name` is "window"."""

    name: RuleName = "all"
    window: int = 0

    @property
    def is_state(self) -> bool:
        return self.name == "state"

    def first_seen(self, num_tokens: int) -> int:
        """Returns the first of `num_tokens` computed tokens that a later token attends to."""
        return max(0, num_tokens - self.window + 1) if self.window else 0

    def num_passed(self, num_tokens: int, block_size: int) -> int:
        """Counts the first blocks, of `num_tokens` computed tokens, that no later token attends to."""
        return self.first_seen(num_tokens) // block_size


def within(window: int | None) -> Rule:
    """Returns the rule of layers that attend to the last `window` tokens; None: to all."""
    return ALL if window is None else Rule("window", window)


ALL, STATE = Rule(), Rule("state")
MAX_PEER_BLOCK_SIZE = 256  # tokens; a decode instance with larger blocks cannot be a peer if a group has a window
