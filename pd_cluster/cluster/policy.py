"""Which pair of instances serves a request. Pure functions of instance state: no sockets, no clock, no randomness."""

from __future__ import annotations

from collections.abc import Sequence

from pd_cluster.cluster.instance import Instance
from pd_cluster.errors import Unavailable


def least_loaded(instances: Sequence[Instance]) -> tuple[Instance, Instance]:
    """The linked pair with the fewest outstanding tokens, decode's before prefill's; ties go to the table's order.

    Raises Unavailable that says what is missing.
    """
    pairs = [
        (prefill, decode)
        for prefill in instances
        if prefill.role == "prefill" and prefill.is_ready
        for decode in instances
        if decode.role == "decode" and decode.is_ready and prefill.linked_to(decode)
    ]
    if not pairs:
        raise Unavailable(why_unavailable(instances))
    return min(pairs, key=lambda pair: (pair[1].outstanding_tokens, pair[0].outstanding_tokens))


def why_unavailable(instances: Sequence[Instance]) -> str:
    """One line: the instances that are not ready, or the links that are not up."""
    missing = [role for role in ("prefill", "decode") if not any(i.role == role and i.is_ready for i in instances)]
    down = [f"{i.name} is {i.state}{f' ({i.reason})' if i.reason else ''}" for i in instances if i.role in missing]
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
