"""The rules and limits by which a process routes its requests. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from pd_cluster.cluster.placement.routing_policy import Policy
from pd_cluster.cluster.placement.wait_prediction import NO_GOALS, Goals


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """Limits of a request's further attempts."""

    max_attempts: int = 6  # after the first
    wait_s: float = 30.0  # how long a request waits for an instance that can continue
    together_s: float = 3.5  # deaths within this time may share a cause; requests wait this long after a loss


@dataclass(frozen=True, slots=True)
class ServedLimits:
    """The number of served requests that are kept for traces, and the secret that hides their prompts."""

    max_requests: int = 0
    secret: bytes = b""


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """`goals`: requests that would miss them are refused before any work is done.

    `max_queue_s`: how long a request waits for capacity, 0 for no limit; None: it is sent to an instance at once, and
    waits there. `shares_workers`: other schedulers send requests to the same instances, which may then be full.
    `find_s`: the time within which instances must say whether they have the record of a stream that resumes.
    `holds_first`: first tokens wait for decode; see first_token_hold.py.
    """

    choose: Policy
    request_timeout_s: float = 0.0
    replay: ReplayLimits = ReplayLimits()
    goals: Goals = NO_GOALS
    max_queue_s: float | None = None
    has_priorities: bool = False
    shares_workers: bool = False
    find_s: float = 5.0
    holds_first: bool = False
    keeps: ServedLimits = ServedLimits()
