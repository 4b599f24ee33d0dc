"""Chooses the prefill instance from whose caches another prefill instance pulls a prompt's beginning. Pure.

Instances have links to each other only with --prefix-pull. A wrong guess costs time, never a token.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.placement.routing_policy import RoutingRequest
from pd_cluster.cluster.placement.wait_prediction import best_rate, predict_pull_s
from pd_cluster.wire import PullHint

LEAST_TOKENS = 64  # fewer tokens are not worth the messages


class PullSources:
    """The instances from which a request's prompt can be pulled, and what a pull saves each other instance."""

    def __init__(self, instances: Sequence[Instance], ask: RoutingRequest) -> None:
        self._ask, self._instances = ask, instances
        self._rate = functools.cache(lambda: best_rate(instances))

    @functools.cached_property
    def _holders(self) -> list[tuple[int, Instance]]:
        """Returns the prefill instances that have the longest parts of the prompt, with these lengths, the longest
        first.
        """
        prefills = [each for each in self._instances if each.role == "prefill" and each.is_ready]
        held = [(each.num_held(self._ask.prompt), each) for each in prefills if each.known_blocks.tiers]
        return sorted((each for each in held if each[0] >= LEAST_TOKENS), key=lambda each: -each[0])

    def of(self, target: Instance) -> PullHint | None:
        """Returns the pull that saves the target most time, if there is one."""
        own = target.num_cached(self._ask.prompt)
        rate, best, least_s = target.load.prefill_tokens_per_s or self._rate(), None, 0.0
        for num_held, source in self._holders:
            num_tokens = num_held - own
            if num_tokens < LEAST_TOKENS:
                break
            if source is target or target.key not in source.links.open:
                continue
            computing_s = num_tokens / rate
            saved_s = computing_s - predict_pull_s(source, target, num_tokens)
            if saved_s > least_s:
                best, least_s = PullHint(source.key, num_held, computing_s), saved_s
        return best


def are_linked(instances: Sequence[Instance], target: Instance) -> bool:
    """Whether any prefill instance has a link to this one. Cheap: every request asks."""
    key = target.key
    return any(each.role == "prefill" and key in each.links.open for each in instances)
