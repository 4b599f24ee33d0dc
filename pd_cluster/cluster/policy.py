"""Which pair of instances serves a request. Pure functions of instance state: no sockets, no clock, no randomness.

A policy is one of `POLICIES`. All of them know the same rules of who can serve at all (`linked_pairs`, `alone`), and
ties go to the table's order. What they predict with is in predict.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pd_cluster.cluster.instance import Instance
from pd_cluster.cluster.predict import predict_transfer_s, predict_ttft_s
from pd_cluster.cluster.prefixes import Prompt
from pd_cluster.errors import Unavailable
from pd_cluster.types import Leg

MAX_LOCAL_TOKENS = 256  # that a decode instance computes of a prompt: longer steps would hold up those who decode
SESSION_SLACK = 2.0  # an instance with so many times the load of the least loaded one loses its sessions for a while
SESSION_SLACK_TOKENS = 4096  # and so many tokens more

Pair = tuple[Instance, Instance]


@dataclass(frozen=True, slots=True)
class Ask:
    """What a policy knows of a request. `avoid`: pairs, by their keys, that have failed it; grows."""

    prompt: Prompt
    num_output_tokens: int = 0  # of all its sequences, as they count as load
    session: str = ""  # requests of one session like to meet again
    avoid: set[tuple[str, str]] = field(default_factory=set)

    def num_uncached(self, instance: Instance) -> int:
        """Prompt tokens that this instance would have to compute, or to receive."""
        return self.prompt.num_tokens - instance.num_cached(self.prompt)

    def weight(self, instance: Instance, leg: Leg) -> int:
        """Tokens of work that a leg is for an instance: to compute, or to receive and to hold."""
        return self.num_uncached(instance) + (0 if leg == "prefill" else self.num_output_tokens)


Policy = Callable[[Sequence[Instance], Ask], Pair]


def least_loaded(instances: Sequence[Instance], ask: Ask) -> Pair:
    """The linked pair with the fewest tokens ahead, decode's before prefill's. Knows of no caches.

    Where there is no pair (any more) but those to avoid, one instance does both. Raises Unavailable that says what is
    missing.
    """
    return _best(instances, ask, lambda pair: (pair[1].tokens_ahead, pair[0].tokens_ahead))


def prefix_aware(instances: Sequence[Instance], ask: Ask) -> Pair:
    """The pair with the least to do until this request has its tokens: work ahead, and what its caches lack.

    So a cached prefix draws a request to it up to the point where others wait for as many tokens as it saves. Of
    equals the pair whose caches know the least: so prompts that are new spread.
    """
    uncached = _uncached(instances, ask)

    def tokens_to_go(pair: Pair) -> tuple[int, int]:
        return sum(i.tokens_ahead + uncached[i.key] for i in pair), sum(len(i.known_blocks) for i in pair)

    return _best(instances, ask, tokens_to_go)


def predicted_ttft(instances: Sequence[Instance], ask: Ask) -> Pair:
    """The prefill instance with the earliest first token, and with it the decode instance with the least to do.

    A decode instance that would be earlier still by itself, transfer included, computes a short remainder of a prompt
    (MAX_LOCAL_TOKENS) alone.
    """
    uncached = _uncached(instances, ask)
    rates = [i.load.prefill_tokens_per_s for i in instances]
    ttft_s = {i.key: predict_ttft_s(i, uncached[i.key], rates) for i in instances if i.takes_requests}

    def cost(pair: Pair) -> tuple[float, int]:
        prefill, decode = pair
        return round(ttft_s[prefill.key], 3), decode.tokens_ahead + uncached[decode.key]

    prefill, decode = _best(instances, ask, cost)
    if prefill is decode:
        return prefill, decode
    split_s = ttft_s[prefill.key] + predict_transfer_s(prefill, decode, uncached[decode.key])
    able = [i for i in instances if i.role == "decode" and i.takes_requests and i.was_linked]
    local = min((i for i in able if uncached[i.key] <= MAX_LOCAL_TOKENS), key=lambda i: ttft_s[i.key], default=None)
    return (local, local) if local is not None and ttft_s[local.key] < split_s else (prefill, decode)


def session(instances: Sequence[Instance], ask: Ask) -> Pair:
    """The pair that a session's name falls on, as long as it is not far more loaded than others.

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


def alone(instances: Sequence[Instance]) -> Pair:
    """One instance that does both: of those that decode if any is there, with the fewest tokens ahead.

    Only one that has been part of a pair: what never could be is a fault that shall be seen. Raises Unavailable.
    """
    found = [i for i in instances if i.takes_requests and i.was_linked]
    if not found:
        raise Unavailable(why_unavailable(instances))
    chosen = min(found, key=lambda i: (i.role != "decode", i.tokens_ahead))
    return chosen, chosen


def linked_pairs(instances: Sequence[Instance]) -> list[Pair]:
    return [
        (prefill, decode)
        for prefill in instances
        if prefill.role == "prefill" and prefill.takes_requests
        for decode in instances
        if decode.role == "decode" and decode.takes_requests and prefill.linked_to(decode)
    ]


def check_served(instances: Sequence[Instance]) -> None:
    """Raises Unavailable when no request could be served."""
    if not linked_pairs(instances):
        alone(instances)


def why_unavailable(instances: Sequence[Instance]) -> str:
    """One line: the instances that are not ready, or the links that are not up."""
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
    """Links between ready instances that are not up, with the reason."""
    ready = [i for i in instances if i.is_ready]
    return [
        f"{prefill.name} to {decode.name}: {prefill.load.links.get(decode.key, 'opening')}"
        for prefill in ready
        if prefill.role == "prefill"
        for decode in ready
        if decode.role == "decode" and not prefill.linked_to(decode)
    ]


def _uncached(instances: Sequence[Instance], ask: Ask) -> dict[str, int]:
    """Of every instance that takes requests, by its key."""
    return {instance.key: ask.num_uncached(instance) for instance in instances if instance.takes_requests}


def _allowed(instances: Sequence[Instance], ask: Ask) -> list[Pair]:
    return [pair for pair in linked_pairs(instances) if (pair[0].key, pair[1].key) not in ask.avoid]


def _best(instances: Sequence[Instance], ask: Ask, cost: Callable[[Pair], tuple[float, float]]) -> Pair:
    pairs = _allowed(instances, ask)
    return min(pairs, key=cost) if pairs else alone(instances)


def _rank(name: str, pair: Pair) -> bytes:
    return hashlib.blake2b(f"{name} {pair[0].name} {pair[1].name}".encode(), digest_size=8).digest()
