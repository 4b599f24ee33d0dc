"""A request's origin, and the result of its admission. Knows nothing of streams, or of how pairs are chosen."""

from __future__ import annotations

import math
from typing import NamedTuple

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.placement.routing_policy import RoutingRequest
from pd_cluster.cluster.queueing.fair_queue import QueueEntry
from pd_cluster.cluster.streams.stream_records import KeptStream


class PromptGroup:
    """The prompts of one client request. They are useful only together: once the first has begun, none is refused."""

    def __init__(self) -> None:
        self.is_let_in = self.has_begun = False


class RequestOwner(NamedTuple):
    """The client for which a request is counted, and how long the request may wait in the queue. `group`: the request's
    prompts.
    """

    client: str = ""
    client_timeout_s: float = math.inf
    group: PromptGroup | None = None


ANYBODY = RequestOwner()


class RequestOrigin(NamedTuple):
    """Everything that routing knows of a request in addition to its RequestSpec.

    For its timeline, `client_id` is the id that clients see and `received_s` its arrival time; None: now. `owner`: its
    client, and how long it may wait in the queue. `kept`: see stream_records.py.
    """

    client_id: str = ""
    received_s: float | None = None
    owner: RequestOwner = ANYBODY
    kept: KeptStream | None = None


FROM_ANYBODY = RequestOrigin()


class AdmittedRequest(NamedTuple):
    """A request's first pair, chosen for `ask`. `entry`: its entry in the fair queue, if any."""

    ask: RoutingRequest
    prefill: Instance
    decode: Instance
    entry: QueueEntry | None = None
