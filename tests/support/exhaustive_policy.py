"""A slow reference for the routing policies: chooses by comparing every pair of instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.placement.pair_search import Pair
from pd_cluster.cluster.placement.routing_policy import MAX_LOCAL_TOKENS, WAKE_SLACK_TOKENS, RoutingRequest
from pd_cluster.cluster.placement.wait_prediction import best_rate, predict_transfer_s, predict_ttft_s


def linked(instances: Sequence[Instance]) -> list[Pair]:
    """Returns all pairs whose link can carry KV cache, in the table's order."""
    return [
        (prefill, decode)
        for prefill in instances
        for decode in instances
        if (prefill.role, decode.role) == ("prefill", "decode")
        and prefill.takes_requests
        and decode.takes_requests
        and phase(prefill, decode) in ("up", "resting")
    ]


def phase(prefill: Instance, decode: Instance) -> str:
    state = prefill.load.links.get(decode.key)
    return state.phase if state is not None else "opening"


def alone(instances: Sequence[Instance]) -> Pair | None:
    paired = {instance.name for pair in linked(instances) for instance in pair}
    able = [each for each in instances if each.takes_requests and each.role != "encode"]
    best = min(able, key=lambda i: (i.name not in paired, i.role != "decode", i.tokens_ahead), default=None)
    return (best, best) if best is not None else None


def best(instances: Sequence[Instance], ask: RoutingRequest, cost: Callable[[Pair], Any]) -> Pair | None:
    pairs = [pair for pair in linked(instances) if (pair[0].key, pair[1].key) not in ask.avoid]
    if not pairs:
        return alone(instances)
    least = min(pairs, key=cost)
    opened = [pair for pair in pairs if phase(*pair) == "up"]
    if least in opened or not opened:
        return least
    nearest = min(opened, key=cost)
    gain = sum(each.tokens_ahead for each in nearest) - sum(each.tokens_ahead for each in least)
    return least if gain >= WAKE_SLACK_TOKENS else nearest


def to_go(instance: Instance, ask: RoutingRequest) -> int:
    return ask.num_uncached(instance) + ask.num_adapter(instance)


def least_loaded(instances: Sequence[Instance], ask: RoutingRequest) -> Pair | None:
    return best(
        instances, ask, lambda pair: tuple(each.tokens_ahead + ask.num_adapter(each) for each in reversed(pair))
    )


def prefix_aware(instances: Sequence[Instance], ask: RoutingRequest) -> Pair | None:
    def cost(pair: Pair) -> tuple[int, int]:
        return sum(i.tokens_ahead + to_go(i, ask) for i in pair), sum(len(i.known_blocks) for i in pair)

    return best(instances, ask, cost)


def predicted_ttft(instances: Sequence[Instance], ask: RoutingRequest) -> Pair | None:
    rate = best_rate(instances)

    def ttft_s(instance: Instance) -> float:
        return predict_ttft_s(instance, to_go(instance, ask), lambda: rate, ask.prompt.num_tokens)

    found = best(instances, ask, lambda pair: (round(ttft_s(pair[0]), 3), pair[1].tokens_ahead + to_go(pair[1], ask)))
    if found is None or found[0] is found[1]:
        return found
    split_s = ttft_s(found[0]) + predict_transfer_s(*found, to_go(found[1], ask))
    able = [decode for _, decode in linked(instances) if to_go(decode, ask) <= MAX_LOCAL_TOKENS]
    local = min(able, key=ttft_s, default=None)
    return (local, local) if local is not None and ttft_s(local) < split_s else found


CHOICES = {"least-loaded": least_loaded, "prefix-aware": prefix_aware, "predicted-ttft": predicted_ttft}
