"""Chooses the pair of instances for a request. Pure functions of instance state: no sockets, no clock, no randomness.

A policy is one of `POLICIES`. All of them share the rules for which instances can serve at all (pair_search.py,
`single_instance`), and break ties by the table's order. Their predictions come from wait_prediction.py.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.known_prefixes import Prompt
from pd_cluster.cluster.placement.pair_search import Pair as Pair
from pd_cluster.cluster.placement.pair_search import PairCosts, Sides
from pd_cluster.cluster.placement.pull_sources import pulls_among
from pd_cluster.cluster.placement.wait_prediction import best_rate, predict_transfer_s, predict_ttft_s
from pd_cluster.errors import Unavailable
from pd_cluster.types import Leg

# the most prompt tokens that a decode instance computes itself: more would delay its decoding sequences
MAX_LOCAL_TOKENS = 256
ADAPTER_TOKENS = 512  # the cost of loading an adapter, which may evict one that must be loaded again later
# An instance gets no requests of its sessions while it has more tokens ahead than SESSION_SLACK times the least on
# its side, plus SESSION_SLACK_TOKENS.
SESSION_SLACK = 2.0
SESSION_SLACK_TOKENS = 4096
WAKE_SLACK_TOKENS = 4096  # a link at rest is opened only for a pair that has this many fewer tokens ahead
_MASK = (1 << 64) - 1
MOST_NAMED = 16  # how many missing instances or links a message names


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A policy's view of a request. `avoid`: pairs of keys that have failed to serve the request; grows."""

    prompt: Prompt
    num_output_tokens: int = 0  # of all its sequences, as counted for load
    session: str = ""  # requests of one session preferably go to the same pair
    is_pooling: bool = False  # one instance computes its prompt, and no tokens are decoded
    adapter: str = ""  # the digest of its LoRA adapter
    avoid: set[tuple[str, str]] = field(default_factory=set)

    def num_uncached(self, instance: Instance) -> int:
        """Counts prompt tokens that this instance would have to compute or receive."""
        return self.prompt.num_tokens - instance.num_cached(self.prompt)

    def num_adapter(self, instance: Instance) -> int:
        """Returns the cost, in tokens, of loading the request's adapter; 0 if it is in memory."""
        return ADAPTER_TOKENS if instance.lacks_adapter(self.adapter) else 0

    def num_to_go(self, instance: Instance) -> int:
        """Counts the work of an instance before this request's first token: uncached tokens and the adapter."""
        num_uncached = self.prompt.num_tokens - instance.num_cached(self.prompt)
        return num_uncached + self.num_adapter(instance) if self.adapter else num_uncached

    def all_to_go(self, instances: Iterable[Instance]) -> dict[str, int]:
        """Returns `num_to_go` by instance name."""
        if self.adapter:
            return {each.name: self.num_to_go(each) for each in instances}
        prompt, num_tokens = self.prompt, self.prompt.num_tokens
        return {each.name: num_tokens - each.num_cached(prompt) for each in instances}

    def weight(self, instance: Instance, leg: Leg) -> int:
        """Returns a leg's work at an instance: the tokens that it computes, or receives and holds."""
        return self.num_uncached(instance) + (0 if leg == "prefill" else self.num_output_tokens)


Policy = Callable[[Sequence[Instance], RoutingRequest], Pair]


def least_loaded(instances: Sequence[Instance], ask: RoutingRequest) -> Pair:
    """Chooses the linked pair with the fewest tokens ahead, comparing decode before prefill. Ignores prefix caches.

    If there is no pair, or only pairs to avoid, one instance serves both legs. Raises Unavailable, which names the
    missing instances or links.
    """

    def tokens_ahead(instance: Instance) -> int:
        return instance.tokens_ahead + ask.num_adapter(instance)

    costs = PairCosts(tokens_ahead, tokens_ahead, joined=lambda prefill, decode: (decode, prefill))
    return _best(instances, ask, costs)


def prefix_aware(instances: Sequence[Instance], ask: RoutingRequest) -> Pair:
    """Chooses the pair with the least work before this request's first token: work ahead plus uncached tokens.

    So a cached prefix attracts requests until the instance's work ahead exceeds what the prefix saves. A prefix that
    can be pulled into free blocks counts as cached, less the time of the pull. Among equal pairs the one with the
    fewest known blocks wins, so that new prompts spread over the instances.
    """
    sides = Sides.of(instances, ask.avoid)
    pulls = pulls_among(sides.prefills, ask.prompt)

    def tokens_to_go(instance: Instance) -> tuple[int, int]:
        ahead = instance.outstanding_tokens + instance.others_tokens
        return ahead + ask.num_to_go(instance), len(instance.known_blocks.tiers)

    def tokens_to_pull(instance: Instance) -> tuple[int, int]:
        assert pulls is not None
        num_tokens, num_known = tokens_to_go(instance)
        return num_tokens - pulls.num_gained(instance), num_known

    def joined(prefill: tuple[int, int], decode: tuple[int, int]) -> tuple[int, int]:
        return prefill[0] + decode[0], prefill[1] + decode[1]

    of_prefill = tokens_to_go if pulls is None else tokens_to_pull
    return _best_of(sides, instances, PairCosts(of_prefill, tokens_to_go, joined))


def predicted_ttft(instances: Sequence[Instance], ask: RoutingRequest) -> Pair:
    """Chooses the prefill instance with the earliest first token, and the decode instance with the least work.

    If a decode instance alone would be even earlier, because it needs no transfer, it computes the prompt itself,
    provided that at most MAX_LOCAL_TOKENS are left to compute.
    """
    sides = Sides.of(instances, ask.avoid)
    to_go = ask.all_to_go(itertools.chain(sides.prefills, sides.decodes))
    if (pulls := pulls_among(sides.prefills, ask.prompt)) is not None:
        for each in sides.prefills:
            to_go[each.name] -= pulls.num_gained(each)
    rate = functools.cache(lambda: best_rate(instances))  # lazy: few requests need it, and it reads all instances
    num_tokens = ask.prompt.num_tokens

    def ttft_s(instance: Instance) -> float:
        return predict_ttft_s(instance, to_go[instance.name], rate, num_tokens)

    def rounded_ttft_s(instance: Instance) -> float:
        return round(predict_ttft_s(instance, to_go[instance.name], rate, num_tokens), 3)

    def tokens_to_go(instance: Instance) -> int:
        return instance.outstanding_tokens + instance.others_tokens + to_go[instance.name]

    costs = PairCosts(rounded_ttft_s, tokens_to_go)
    prefill, decode = _best_of(sides, instances, costs)
    if prefill is decode:
        return prefill, decode
    split_s = ttft_s(prefill) + predict_transfer_s(prefill, decode, to_go[decode.name])
    able = ((ttft_s(each), each) for each in sides.decodes if to_go[each.name] <= MAX_LOCAL_TOKENS)
    local = _soonest(Sides(sides.prefills, sides.decodes), [found for found in able if found[0] < split_s])
    return (local, local) if local is not None else (prefill, decode)


def _soonest(sides: Sides, decodes: list[tuple[float, Instance]]) -> Instance | None:
    """Returns the instance with the earliest time that is part of a pair; among equals, the one with the first pair."""
    found, least = None, (math.inf, 0)
    for each_s, each in sorted(decodes, key=lambda timed: timed[0]):
        if each_s > least[0] or least == (each_s, 0):
            break
        at = sides.partner_of(each)
        if at is not None and (each_s, at) < least:
            found, least = each, (each_s, at)
    return found


def session(instances: Sequence[Instance], ask: RoutingRequest) -> Pair:
    """Chooses the instance of each side that a session's name hashes to, unless it is far more loaded than others.

    Rendezvous hashing: an instance that comes or goes moves only its own sessions, and only on its side. Requests
    without a session go to the least loaded pair.
    """
    if not ask.session:
        return least_loaded(instances, ask)
    paired = Sides.of(instances, ask.avoid).paired()
    fit = Sides(_within_slack(paired.prefills), _within_slack(paired.decodes), ask.avoid)
    own = _hash_of(ask.session)

    def rank(instance: Instance) -> int:
        """Mixes two uniform hashes with SplitMix64's finalizer, which is cheaper than hashing per instance."""
        mixed = (own ^ _hash_of_name(instance.name)) * 0xBF58476D1CE4E5B9 & _MASK
        return (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK

    pair = fit.ranked(PairCosts(rank, rank)).best()
    return pair if pair is not None else least_loaded(instances, ask)


def _within_slack(side: list[Instance]) -> list[Instance]:
    limit = SESSION_SLACK * min((each.tokens_ahead for each in side), default=0) + SESSION_SLACK_TOKENS
    return [each for each in side if each.tokens_ahead <= limit]


POLICIES: dict[str, Policy] = {
    "least-loaded": least_loaded,
    "prefix-aware": prefix_aware,
    "predicted-ttft": predicted_ttft,
    "session": session,
}


def for_all_kinds(choose: Policy) -> Policy:
    """Returns a policy that handles pooling requests itself, and leaves all others to `choose`.

    A pooling prompt goes to the prefill instance with the least work, linked or not. If no prefill instance takes
    requests, the instance that would decode computes it.
    """

    def chosen(instances: Sequence[Instance], ask: RoutingRequest) -> Pair:
        if not ask.is_pooling:
            return choose(instances, ask)
        able = [i for i in instances if i.role == "prefill" and i.takes_requests and (i.key, i.key) not in ask.avoid]
        if able:
            best = min(able, key=lambda i: i.tokens_ahead + ask.num_to_go(i))
        else:
            _, best = choose(instances, ask)
        return best, best

    return chosen


def single_instance(instances: Sequence[Instance]) -> Pair:
    """Chooses the instance with the fewest tokens ahead for both legs: a decode instance, if there is one.

    A decode instance that is now part of a pair takes precedence. The choice uses no history, so a restart of this
    process does not change it. Raises Unavailable.
    """
    found = [i for i in instances if i.takes_requests and i.role != "encode"]
    if not found:
        raise Unavailable(why_unavailable(instances))
    sides = Sides.of(found)
    paired = [each for each in sides.decodes if sides.partner_of(each) is not None]
    chosen = min(paired or sides.decodes or found, key=lambda each: each.tokens_ahead)
    return chosen, chosen


def awaits_pair(instances: Sequence[Instance], now_s: float, together_s: float) -> bool:
    """Whether the first pair is expected soon, so that requests should not go to a single instance.

    That is the case while another instance is starting or was not yet contacted, or a link is opening, but for at most
    `together_s` after the first of these instances became ready.
    """
    takers = [i for i in instances if i.takes_requests and i.role != "encode"]
    if not takers or now_s - min(i.ready_s for i in takers) >= together_s:
        return False
    sides = Sides.of(takers)
    if next(sides.pairs(), None) is not None:
        return False
    if any(i.role != "encode" and _is_arriving(i) for i in instances):
        return True
    return any(prefill.link_to(decode).phase == "opening" for prefill in sides.prefills for decode in sides.decodes)


def _is_arriving(instance: Instance) -> bool:
    return instance.state in ("loading", "forming", "connecting") or (
        instance.state == "unreachable" and not instance.reason
    )


def linked_pairs(instances: Sequence[Instance]) -> list[Pair]:
    """Returns all linked pairs; with hundreds of instances, too slow to call for each request."""
    return list(Sides.of(instances).pairs())


def is_served(instances: Sequence[Instance]) -> bool:
    """Whether a request could be served, even if by a single instance."""
    return any(instance.takes_requests and instance.role != "encode" for instance in instances)


def why_unavailable(instances: Sequence[Instance]) -> str:
    """Returns a line that names the instances that are not ready, or the links that are not up; at most MOST_NAMED."""
    missing = [
        role for role in ("prefill", "decode") if not any(i.role == role and i.takes_requests for i in instances)
    ]
    down = _some(
        f"{i.name} is {i.shown_state}{f' ({i.reason})' if i.reason else ''}" for i in instances if i.role in missing
    )
    if missing and not down:
        return f"there is no {' and no '.join(missing)} instance"
    if missing:
        return f"no {' and no '.join(missing)} instance is ready: {down}"
    return f"no prefill instance has a link to a decode instance: {_some(_refused_links(instances))}"


def _some(found: Iterator[str]) -> str:
    """Joins at most MOST_NAMED of the texts: a longer line would take long to make and to read."""
    named = list(itertools.islice(found, MOST_NAMED + 1))
    return "; ".join(named if len(named) <= MOST_NAMED else [*named[:MOST_NAMED], "and others"])


def refused_links(instances: Sequence[Instance]) -> list[str]:
    """Returns the links between ready instances that are not up, with the reason."""
    return list(_refused_links(instances))


def _refused_links(instances: Sequence[Instance]) -> Iterator[str]:
    ready = [i for i in instances if i.is_ready]
    decodes = {each.key: each for each in ready if each.role == "decode"}
    for prefill in ready:
        if prefill.role == "prefill" and not decodes.keys() <= prefill.links.up:
            for key, decode in decodes.items():
                if key not in prefill.links.up:
                    yield f"{prefill.name} to {decode.name}: {prefill.links.to(key)}"


def _best(instances: Sequence[Instance], ask: RoutingRequest, costs: PairCosts) -> Pair:
    return _best_of(Sides.of(instances, ask.avoid), instances, costs)


def _best_of(sides: Sides, instances: Sequence[Instance], costs: PairCosts) -> Pair:
    """Returns the best pair, preferably one whose link is open, or one instance if there is no pair."""
    ranked = sides.ranked(costs)
    best = ranked.best()
    if best is None:
        return single_instance(instances)
    nearest = ranked.best(is_open=True) if not best[0].link_to(best[1]).is_open else None
    if nearest is None:
        return best
    # Opening a link at rest takes time, and may close another link.
    return best if _ahead(nearest) - _ahead(best) >= WAKE_SLACK_TOKENS else nearest


def _ahead(pair: Pair) -> int:
    return pair[0].tokens_ahead + pair[1].tokens_ahead


def _hash_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


_hash_of_name = functools.lru_cache(maxsize=1 << 14)(_hash_of)  # instances' names are hashed for every request
