"""Which pair of instances serves a request. Pure functions of instance state: no sockets, no clock, no randomness."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pd_cluster.cluster.instance import Instance
from pd_cluster.errors import Unavailable

Pair = tuple[Instance, Instance]


def least_loaded(instances: Sequence[Instance], avoid: Collection[tuple[str, str]] = ()) -> Pair:
    """Who prefills and who decodes: the linked pair with the fewest outstanding tokens, decode's before prefill's.

    Ties go to the table's order. Where there is no pair (any more) but those to `avoid`, by their keys, one instance
    does both. Raises Unavailable that says what is missing.
    """
    pairs = [pair for pair in linked_pairs(instances) if (pair[0].key, pair[1].key) not in avoid]
    if not pairs:
        return alone(instances)
    return min(pairs, key=lambda pair: (pair[1].outstanding_tokens, pair[0].outstanding_tokens))


def alone(instances: Sequence[Instance]) -> Pair:
    """One instance that does both: of those that decode if any is there, with the fewest outstanding tokens.

    Only one that has been part of a pair: what never could be is a fault that shall be seen. Raises Unavailable.
    """
    found = [i for i in instances if i.takes_requests and i.was_linked]
    if not found:
        raise Unavailable(why_unavailable(instances))
    chosen = min(found, key=lambda i: (i.role != "decode", i.outstanding_tokens))
    return chosen, chosen


def linked_pairs(instances: Sequence[Instance]) -> list[Pair]:
    return [
        (prefill, decode)
        for prefill in instances
        if prefill.role == "prefill" and prefill.takes_requests
        for decode in instances
        if decode.role == "decode" and decode.takes_requests and prefill.linked_to(decode)
    ]


def why_unavailable(instances: Sequence[Instance]) -> str:
    """One line: the instances that are not ready, or the links that are not up."""
    missing = [
        role for role in ("prefill", "decode") if not any(i.role == role and i.takes_requests for i in instances)
    ]
    down = [
        f"{i.name} is {i.shown_state}{f' ({i.reason})' if i.reason else ''}" for i in instances if i.role in missing
    ]
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
