"""Chooses the pair of instances for a request. Pure functions of instance state: no sockets, no clock, no randomness.

A policy is one of `POLICIES`. All of them share the same rules for which instances can serve at all (`linked_pairs`,
`alone`), and ties go to the table's order. Their predictions come from predict.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pd_cluster.cluster.members.instance import Instance
from pd_cluster.cluster.members.prefixes import Prompt
from pd_cluster.cluster.routing.predict import best_rate, predict_transfer_s, predict_ttft_s
from pd_cluster.errors import Unavailable
from pd_cluster.types import Leg

MAX_LOCAL_TOKENS = 256  # that a decode instance computes of a prompt: longer steps would delay its decoding sequences
ADAPTER_TOKENS = 512  # reading an adapter counts as much work; and another then gives way, and is read again later
SESSION_SLACK = 2.0  # an instance with this many times the load of the least loaded one loses its sessions for a while
SESSION_SLACK_TOKENS = 4096  # and this many tokens more
WAKE_SLACK_TOKENS = 4096  # fewer tokens ahead that justify opening a link at rest

Pair = tuple[Instance, Instance]


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A policy's view of a request. `avoid`: pairs, by their keys, that have failed it; grows."""

    prompt: Prompt
    num_output_tokens: int = 0  # of all its sequences, as counted for load
    session: str = ""  # requests of one session preferably go to the same pair
    is_pooling: bool = False  # one instance computes its prompt, and nothing is decoded
    adapter: str = ""  # the digest of its LoRA adapter
    avoid: set[tuple[str, str]] = field(default_factory=set)

    def num_uncached(self, instance: Instance) -> int:
        """Counts prompt tokens that this instance would have to compute or receive."""
        return self.prompt.num_tokens - instance.num_cached(self.prompt)

    def num_adapter(self, instance: Instance) -> int:
        """Returns the tokens that reading its adapter again counts as; 0 where it is in memory."""
        return ADAPTER_TOKENS if instance.lacks_adapter(self.adapter) else 0

    def weight(self, instance: Instance, leg: Leg) -> int:
        """Returns a leg's work for an instance in tokens: to compute, or to receive and hold."""
        return self.num_uncached(instance) + (0 if leg == "prefill" else self.num_output_tokens)


Policy = Callable[[Sequence[Instance], RoutingRequest], Pair]


def least_loaded(instances: Sequence[Instance], ask: RoutingRequest) -> Pair:
    """Chooses the linked pair with the fewest tokens ahead, decode's before prefill's. Ignores prefix caches.

    Where there are no pairs, or none left but those to avoid, one instance does both. Raises Unavailable, naming what
    is missing.
    """

    def tokens_ahead(instance: Instance) -> int:
        return instance.tokens_ahead + ask.num_adapter(instance)

    return _best(instances, ask, lambda pair: (tokens_ahead(pair[1]), tokens_ahead(pair[0])))


def prefix_aware(instances: Sequence[Instance], ask: RoutingRequest) -> Pair:
    """Chooses the pair with the least to do until this request has its tokens: work ahead plus uncached tokens.

    So a cached prefix attracts a request until as many tokens are ahead there as the prefix saves. Among equals the
    pair with the fewest known blocks wins, so new prompts spread.
    """
    uncached = _uncached(instances, ask)

    def tokens_to_go(pair: Pair) -> tuple[int, int]:
        return sum(i.tokens_ahead + uncached[i.key] for i in pair), sum(len(i.known_blocks) for i in pair)

    return _best(instances, ask, tokens_to_go)


def predicted_ttft(instances: Sequence[Instance], ask: RoutingRequest) -> Pair:
    """Chooses the prefill instance with the earliest first token, and the decode instance with the least to do.

    A decode instance that would be even earlier by itself, given the transfer's time, computes a short remainder of a
    prompt (MAX_LOCAL_TOKENS) alone.
    """
    uncached = _uncached(instances, ask)
    rate, num_tokens = best_rate(instances), ask.prompt.num_tokens
    ttft_s = {i.key: predict_ttft_s(i, uncached[i.key], rate, num_tokens) for i in instances if i.takes_requests}

    def cost(pair: Pair) -> tuple[float, int]:
        prefill, decode = pair
        return round(ttft_s[prefill.key], 3), decode.tokens_ahead + uncached[decode.key]

    prefill, decode = _best(instances, ask, cost)
    if prefill is decode:
        return prefill, decode
    split_s = ttft_s[prefill.key] + predict_transfer_s(prefill, decode, uncached[decode.key])
    able = [decode for _, decode in linked_pairs(instances) if uncached[decode.key] <= MAX_LOCAL_TOKENS]
    local = min(able, key=lambda i: ttft_s[i.key], default=None)
    return (local, local) if local is not None and ttft_s[local.key] < split_s else (prefill, decode)


def session(instances: Sequence[Instance], ask: RoutingRequest) -> Pair:
    """Chooses the pair that a session's name hashes to, unless it is far more loaded than others.

    Rendezvous hashing: instances that come and go move only their own sessions. Requests without a session go to the
    least loaded.
    """
    pairs = _allowed(instances, ask)
    if not ask.session or not pairs:
        return least_loaded(instances, ask)
    least = min(prefill.tokens_ahead + decode.tokens_ahead for prefill, decode in pairs)
    limit = SESSION_SLACK * least + SESSION_SLACK_TOKENS
    fit = [pair for pair in pairs if pair[0].tokens_ahead + pair[1].tokens_ahead <= limit]
    return max(fit, key=lambda pair: _rank(ask.session, pair))


POLICIES: dict[str, Policy] = {
    "least-loaded": least_loaded,
    "prefix-aware": prefix_aware,
    "predicted-ttft": predicted_ttft,
    "session": session,
}


def for_all_kinds(choose: Policy) -> Policy:
    """Returns a policy that makes its own choice for pooling requests, and `choose`'s for all others.

    A prompt that becomes a vector goes to the prefill instance with the least to do until it is computed, linked or
    not. Without one that may be asked, the instance that would decode computes it.
    """

    def chosen(instances: Sequence[Instance], ask: RoutingRequest) -> Pair:
        if not ask.is_pooling:
            return choose(instances, ask)
        able = [i for i in instances if i.role == "prefill" and i.takes_requests and (i.key, i.key) not in ask.avoid]
        if able:
            best = min(able, key=lambda i: i.tokens_ahead + ask.num_uncached(i) + ask.num_adapter(i))
        else:
            _, best = choose(instances, ask)
        return best, best

    return chosen


def alone(instances: Sequence[Instance]) -> Pair:
    """Chooses one instance for both legs: a decode instance if there is any, with the fewest tokens ahead.

    One that is part of a pair now comes before the others. The past of instances does not count, so a restart of
    this process changes nothing. Raises Unavailable.
    """
    found = [i for i in instances if i.takes_requests and i.role != "encode"]
    if not found:
        raise Unavailable(why_unavailable(instances))
    paired = {instance.key for pair in linked_pairs(instances) for instance in pair}
    chosen = min(found, key=lambda i: (i.key not in paired, i.role != "decode", i.tokens_ahead))
    return chosen, chosen


def awaits_pair(instances: Sequence[Instance], now_s: float, together_s: float) -> bool:
    """Whether the first pair is expected soon: nothing is to be computed by one instance alone meanwhile.

    That is, for at most `together_s` after the first of these instances was reached, another one has not been asked or
    loads, or a link opens.
    """
    takers = [i for i in instances if i.takes_requests and i.role != "encode"]
    if not takers or now_s - min(i.ready_s for i in takers) >= together_s or linked_pairs(instances):
        return False
    if any(i.role != "encode" and _is_arriving(i) for i in instances):
        return True
    prefills, decodes = ([i for i in takers if i.role == role] for role in ("prefill", "decode"))
    return any(prefill.link_to(decode).phase == "opening" for prefill in prefills for decode in decodes)


def _is_arriving(instance: Instance) -> bool:
    return instance.state in ("loading", "forming", "connecting") or (
        instance.state == "unreachable" and not instance.reason
    )


def linked_pairs(instances: Sequence[Instance]) -> list[Pair]:
    return [
        (prefill, decode)
        for prefill in instances
        if prefill.role == "prefill" and prefill.takes_requests
        for decode in instances
        if decode.role == "decode" and decode.takes_requests and prefill.linked_to(decode)
    ]


def is_served(instances: Sequence[Instance]) -> bool:
    """Whether a request could be served, if only by one instance."""
    return any(instance.takes_requests and instance.role != "encode" for instance in instances)


def why_unavailable(instances: Sequence[Instance]) -> str:
    """Returns one line that names the instances that are not ready, or the links that are not up."""
    missing = [
        role for role in ("prefill", "decode") if not any(i.role == role and i.takes_requests for i in instances)
    ]
    down = [
        f"{i.name} is {i.shown_state}{f' ({i.reason})' if i.reason else ''}" for i in instances if i.role in missing
    ]
    if missing and not down:
        return f"there is no {' and no '.join(missing)} instance"
    if missing:
        return f"no {' and no '.join(missing)} instance is ready: {'; '.join(down)}"
    return f"no prefill instance has a link to a decode instance: {'; '.join(refused_links(instances))}"


def refused_links(instances: Sequence[Instance]) -> list[str]:
    """Returns the links between ready instances that are not up, with the reason."""
    ready = [i for i in instances if i.is_ready]
    return [
        f"{prefill.name} to {decode.name}: {prefill.link_to(decode)}"
        for prefill in ready
        if prefill.role == "prefill"
        for decode in ready
        if decode.role == "decode" and not prefill.linked_to(decode)
    ]


def _uncached(instances: Sequence[Instance], ask: RoutingRequest) -> dict[str, int]:
    """Returns the tokens that every instance would compute, by its key, with those that its adapter counts as."""
    able = (instance for instance in instances if instance.takes_requests)
    return {instance.key: ask.num_uncached(instance) + ask.num_adapter(instance) for instance in able}


def _allowed(instances: Sequence[Instance], ask: RoutingRequest) -> list[Pair]:
    return [pair for pair in linked_pairs(instances) if (pair[0].key, pair[1].key) not in ask.avoid]


def _best(instances: Sequence[Instance], ask: RoutingRequest, cost: Callable[[Pair], tuple[float, float]]) -> Pair:
    pairs = _allowed(instances, ask)
    if not pairs:
        return alone(instances)
    best = min(pairs, key=cost)
    open_ = [(p, d) for p, d in pairs if p.link_to(d).is_open] if not best[0].link_to(best[1]).is_open else []
    if not open_:
        return best
    # A link at rest costs the time to open it, and another one its place.
    nearest = min(open_, key=cost)
    return best if _ahead(nearest) - _ahead(best) >= WAKE_SLACK_TOKENS else nearest


def _ahead(pair: Pair) -> int:
    return pair[0].tokens_ahead + pair[1].tokens_ahead


def _rank(name: str, pair: Pair) -> bytes:
    return hashlib.blake2b(f"{name} {pair[0].name} {pair[1].name}".encode(), digest_size=8).digest()
