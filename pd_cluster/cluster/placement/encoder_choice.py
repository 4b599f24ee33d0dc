"""Chooses the encoders for a prompt's images, on behalf of a prefill instance. Pure; knows nothing of features."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.types import RequestSpec

SLACK, SLACK_TOKENS = (
    2,
    2048,
)  # an encoder gets no further image if it has more tokens ahead than SLACK x the fewest + SLACK_TOKENS


def choose_encoders(order: RequestSpec, prefill: Instance, instances: Sequence[Instance]) -> list[Instance]:
    """Returns an encoder for each image that `prefill` computes, or [] if there are none.

    Rendezvous hashing by the image's digest: a repeated image goes to the encoder that caches its features, unless that
    encoder has far more tokens ahead than the least loaded one.
    """
    if not order.images:
        return []
    able = [i for i in instances if i.role == "encode" and i.takes_requests and prefill.linked_to(i)]
    if not able:
        return []
    ahead = {i.key: i.tokens_ahead for i in able}
    found: list[Instance] = []
    for span in order.spans:
        limit = SLACK * min(ahead.values()) + SLACK_TOKENS
        chosen = max((i for i in able if ahead[i.key] <= limit), key=lambda i: _rank(span.digest, i))
        ahead[chosen.key] += span.stop - span.start
        found.append(chosen)
    return found


def _rank(digest: bytes, instance: Instance) -> bytes:
    return hashlib.blake2b(digest + instance.name.encode(), digest_size=8).digest()
