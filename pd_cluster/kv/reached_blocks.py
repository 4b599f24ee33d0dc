"""Finds the token blocks that precede a kept state, because a prompt can continue only from such blocks.

Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.kv_event_log import KVEventLog
from pd_cluster.kv.reached_event_log import ReachedEventLog
from pd_cluster.types import Tier


class ReachedBlocks:
    """Reports the cached contents of the token pool that precede a kept state.

    Has the reporting methods of `BlockPool`. Contents form a tree. A content is reached if a state after it is kept or
    one of its children is reached. So to replace a state by a later one, only the blocks between them must be updated.
    """

    def __init__(self, tokens: BlockPool, states: BlockPool) -> None:
        """`tokens` must not have lower tiers."""
        self._tokens, self._states = tokens, states
        self._parents: dict[bytes, bytes | None] = {}  # reached content -> the content before it
        self._num_holders: dict[bytes, int] = {}  # the number of reached children, plus one if a state after it is kept
        self._kept: set[bytes] = set()
        self._moved: set[bytes] = set()  # contents that became reached or unreached since the last `changes`
        self._reported: dict[bytes, Tier] | None = None  # the reported contents; None: there is no follower
        self._differing: set[bytes] = set()  # contents whose last reports to new and to earlier followers differ
        states.follow()

    def kept(self, chain: Sequence[bytes]) -> None:
        """Records a state that the pool of states now has. `chain`: the contents of all blocks before it, in order."""
        self._drop_gone()
        content = chain[-1]
        if content in self._kept or content not in self._states:
            return
        self._kept.add(content)
        at = len(chain) - 1
        while not self._hold(chain, at) and at:
            at -= 1

    def _hold(self, chain: Sequence[bytes], at: int) -> bool:
        """Adds a holder to the content `chain[at]`. Returns whether this and its parents were already reached."""
        content = chain[at]
        if (num_holders := self._num_holders.get(content)) is not None:
            self._num_holders[content] = num_holders + 1
            return True
        self._num_holders[content] = 1
        self._parents[content] = chain[at - 1] if at else None
        self._note(content)
        return False

    def _drop_gone(self) -> None:
        for content, tier in self._states.changes().items():
            if tier is None and content in self._kept:
                self._kept.remove(content)
                self._let_go(content)

    def _let_go(self, content: bytes | None) -> None:
        while content is not None:
            self._num_holders[content] -= 1
            if self._num_holders[content]:
                return
            del self._num_holders[content]
            self._note(content)
            content = self._parents.pop(content)

    def _note(self, content: bytes) -> None:
        if self._reported is not None:
            self._moved.add(content)

    def _is_reached(self, content: bytes) -> bool:
        return content in self._num_holders

    def start_log(self, block_size: int) -> KVEventLog:
        """Starts a log of contents that are reached. See `BlockPool.start_log`."""
        self._tokens.log = log = ReachedEventLog(block_size)
        self.follow()
        return log

    def follow(self) -> dict[bytes, Tier]:
        """Returns the cached contents that are reached. From now on, `changes` reports changes."""
        self._drop_gone()
        known = {content: tier for content, tier in self._tokens.follow().items() if self._is_reached(content)}
        if self._reported is None:
            self._reported = dict(known)
        self._differing |= known.keys() ^ self._reported.keys()
        return known

    def changes(self) -> dict[bytes, Tier | None]:
        """Returns the contents that became reached or unreached since the last call. None: unreached."""
        self._drop_gone()
        moved, differing, self._moved, self._differing = self._moved, self._differing, set(), set()
        if self._reported is None:
            return {}
        news: dict[bytes, Tier | None] = {}
        for content in moved | differing | self._tokens.changes().keys():
            place: Tier | None = "device" if self._is_reached(content) and content in self._tokens else None
            if place == self._reported.get(content) and content not in differing:
                continue
            news[content] = place
            if place is None:
                self._reported.pop(content, None)
            else:
                self._reported[content] = place
        return news
