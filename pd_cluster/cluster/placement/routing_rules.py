"""By which rules a process routes its requests, and the limits that it keeps. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from pd_cluster.cluster.placement.routing_policy import Policy
from pd_cluster.cluster.placement.wait_prediction import NO_GOALS, Goals


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """Bounds on a request's further attempts."""

    max_attempts: int = 6  # after the first
    wait_s: float = 30.0  # for an instance that can continue
    together_s: float = 3.5  # deaths within this time may have one cause; an instance lost within it may return at once


@dataclass(frozen=True, slots=True)
class ServedLimits:
    """How many served requests are remembered for traces, and the secret that hides their prompts."""

    max_requests: int = 0
    secret: bytes = b""


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """Requests that would miss `goals` are refused before any work on them.

    `max_queue_s`: how long a request waits for room, 0 for no limit; None: it goes to an instance at once, and waits
    there. `shares_workers`: other schedulers send requests to the same instances, which may be full then. `find_s`: how
    long instances may take to say whether they have the record of a stream that resumes. `holds_first`: first tokens
    wait for decode; see first_token_hold.py.
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
