"""Finds the routing policy that a setting names: one of `POLICIES`, or an operator's own function.

The function runs in the processes that route, with all their rights. If it fails, the request that it routes fails.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from importlib import import_module

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.placement.pair_search import Pair
from pd_cluster.cluster.placement.routing_policy import POLICIES, Policy, RoutingRequest
from pd_cluster.errors import ConfigError, Unavailable, called

log = logging.getLogger(__name__)


def policy_of(name: str) -> Policy:
    """Returns the policy of a name or of `module:function`. Raises ConfigError."""
    if name in POLICIES:
        return POLICIES[name]
    where = f"{called('routing_policy')} {name}"
    module, _, function = name.partition(":")
    if not module or not function:
        raise ConfigError(f"{where}: expected one of {', '.join(POLICIES)}, or module:function")
    try:
        found = getattr(import_module(module), function)
        inspect.signature(found).bind((), None)
    except Exception as error:  # the operator's code may fail in any way
        way_out = "give a function of (instances, request) in a module that PYTHONPATH finds"
        raise ConfigError(f"{where}: {type(error).__name__}: {error}; {way_out}") from error
    return _checked(found, name)


def _checked(choose: Policy, name: str) -> Policy:
    """Returns the policy, changed so that its faults end only the request; only the log has the details."""

    def chosen(instances: Sequence[Instance], ask: RoutingRequest) -> Pair:
        try:
            prefill, decode = choose(instances, ask)
            fault = _fault_of(prefill, decode, instances)
        except Unavailable:
            raise
        except Exception as error:
            log.exception("the routing policy %s has failed", name)
            raise Unavailable("the routing policy has failed") from error
        if fault:
            log.error("the routing policy %s chose %s and %s: %s", name, prefill.name, decode.name, fault)
            raise Unavailable("the routing policy has chosen no usable pair")
        return prefill, decode

    return chosen


def _fault_of(prefill: Instance, decode: Instance, instances: Sequence[Instance]) -> str:
    """Returns the reason why the pair cannot serve; "" if it can."""
    for chosen in (prefill, decode):
        if not any(chosen is each for each in instances) or not chosen.takes_requests:
            return f"{chosen.name} takes no requests"
    return "" if prefill is decode or prefill.linked_to(decode) else "they have no link"
