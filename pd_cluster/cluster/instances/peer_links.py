"""The links of one prefill instance as it last reported them, and the peers that they reach. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from pd_cluster.types import LinkState

OPENING = LinkState("opening")  # the state of a link before its first report


@dataclass(frozen=True, slots=True)
class PeerLinks:
    """Derived from `states` (peer's key -> state); rebuilt when the states change.

    `up`: the keys of peers whose link can carry KV cache. `open`: the keys of those whose link is open now.
    """

    states: Mapping[str, LinkState]
    up: Set[str]
    open: Set[str]

    @classmethod
    def of(cls, states: Mapping[str, LinkState]) -> PeerLinks:
        up = frozenset(key for key, state in states.items() if state.phase in ("up", "resting"))
        opened = frozenset(key for key, state in states.items() if state.phase == "up")
        all_keys = states.keys()  # shares the memory of `states`
        whole = len(all_keys)
        return cls(states, all_keys if len(up) == whole else up, all_keys if len(opened) == whole else opened)

    def to(self, key: str) -> LinkState:
        return self.states.get(key, OPENING)


NO_LINKS = PeerLinks.of({})
