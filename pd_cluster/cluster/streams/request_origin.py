"""Where a request comes from, and what it has when it begins. Knows nothing of streams, or of how pairs are chosen."""

from __future__ import annotations

import math
from typing import NamedTuple

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.placement.routing_policy import RoutingRequest
from pd_cluster.cluster.queueing.fair_queue import QueueEntry
from pd_cluster.cluster.streams.stream_records import KeptStream


class PromptGroup:
    """Requests that are useful only together: the prompts of one request. Once the first has begun, none is refused."""

    def __init__(self) -> None:
        self.is_let_in = self.has_begun = False


class RequestOwner(NamedTuple):
    """The client that a request counts for, and how long it may wait for its turn. `group`: the request's prompts."""

    client: str = ""
    client_timeout_s: float = math.inf
    group: PromptGroup | None = None


ANYBODY = RequestOwner()


class RequestOrigin(NamedTuple):
    """All that routing is told of a request beside its order.

    `client_id` and `received_s` are its outside name and arrival time, for its timeline; None: it arrives now. `owner`
    controls how it waits for its turn. `kept`: see stream_records.py.
    """

    client_id: str = ""
    received_s: float | None = None
    owner: RequestOwner = ANYBODY
    kept: KeptStream | None = None


FROM_ANYBODY = RequestOrigin()


class Admitted(NamedTuple):
    """A request's first pair, which `ask` was given. `entry`: its place among the requests of all clients, if any."""

    ask: RoutingRequest
    prefill: Instance
    decode: Instance
    entry: QueueEntry | None = None
