"""Chooses the prefill instance from which another one pulls a prompt's cached prefix, and computes what that saves.
Pure.

Prefill instances have links to each other only with --prefix-pull. A wrong choice costs time but changes no token.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.known_prefixes import Prompt
from pd_cluster.cluster.placement.wait_prediction import best_rate, predict_pull_s
from pd_cluster.types import LinkState
from pd_cluster.wire import PullHint

LEAST_TOKENS = 64  # fewer tokens are not worth the messages
WAKE_S = 1.0  # the assumed time to open a link at rest
MOST_SOURCES = 3  # the most holders that are examined: with more, a choice among many instances would be slow


class PrefixPull(NamedTuple):
    """A pull that saves time. `num_saved`: the tokens that the target could compute in the time that it saves."""

    hint: PullHint
    num_saved: int
    source: Instance


class PullSources:
    """The instances from which one prompt's prefix can be pulled, and what a pull saves each other instance."""

    def __init__(self, instances: Sequence[Instance], prompt: Prompt) -> None:
        self._prompt, self._instances = prompt, instances
        self._rate = functools.cache(lambda: best_rate(instances))
        self._times: dict[tuple[str, int, LinkState], float] = {}  # times of pulls; many targets share one

    @functools.cached_property
    def _holders(self) -> list[tuple[int, Instance]]:
        """Returns the prefill instances that hold the longest prefixes of the prompt, with these lengths; the longest
        first.
        """
        prefills = [each for each in self._instances if each.role == "prefill" and each.is_ready]
        held = [(each.num_held(self._prompt), each) for each in prefills if each.known_blocks.tiers]
        return sorted((each for each in held if each[0] >= LEAST_TOKENS), key=lambda each: -each[0])[:MOST_SOURCES]

    def to(self, target: Instance) -> PrefixPull | None:
        """Returns the pull that saves the target the most time; None if no pull saves any."""
        if not self._holders:
            return None
        key, own, best, least_s = target.key, target.num_cached(self._prompt), None, 0.0
        rate = target.load.prefill_tokens_per_s or self._rate()
        for num_held, source in self._holders:
            num_tokens = num_held - own
            if num_tokens < LEAST_TOKENS or num_tokens <= rate * least_s:
                break
            if source is target or key not in source.links.up or source.pool_kind is not target.pool_kind:
                continue
            wakes, computing_s = key not in source.links.open, num_tokens / rate
            saved_s = computing_s - self._pull_s(source, target, num_tokens) - WAKE_S * wakes
            if saved_s > least_s:
                hint, least_s = PullHint(source.key, num_held, computing_s, wakes), saved_s
                best = PrefixPull(hint, int(saved_s * rate), source)
        return best

    def _pull_s(self, source: Instance, target: Instance, num_tokens: int) -> float:
        key = source.name, num_tokens, source.link_to(target)
        found = self._times.get(key)
        if found is None:
            found = self._times[key] = predict_pull_s(source, target, num_tokens)
        return found

    def num_saved(self, target: Instance) -> int:
        """Returns the tokens that a pull would save the target."""
        found = self.to(target)
        return found.num_saved if found is not None else 0

    def num_gained(self, target: Instance) -> int:
        """Returns the tokens that a pull would save, less those that it causes to be computed again.

        A pull copies blocks into a second cache, and the blocks that they displace there must be computed again later.
        So it pays to choose an instance other than the holder only if that instance has free blocks.
        """
        found, pool = self.to(target), target.pool_kind
        if found is None or pool is None:
            return 0
        num_pulled = found.hint.num_tokens - target.num_cached(self._prompt)
        num_displaced = max(0, num_pulled - target.load.num_free_blocks * pool.block_size)
        return max(0, found.num_saved - num_displaced)


def are_linked(instances: Sequence[Instance], target: Instance) -> bool:
    """Whether any prefill instance has a link to this one. Called for every request, so it must be cheap."""
    key = target.key
    return any(each.role == "prefill" and key in each.links.up for each in instances)


def pulls_among(prefills: Sequence[Instance], prompt: Prompt) -> PullSources | None:
    """Returns the sources among these prefill instances; None if they have no links to each other.

    Called for every choice of a pair, so it examines only two instances: either all of them pull, or none does.
    """
    if len(prefills) < 2:
        return None
    first, last = prefills[0], prefills[-1]
    are_peers = last.key in first.links.up or first.key in last.links.up
    return PullSources(prefills, prompt) if are_peers else None
