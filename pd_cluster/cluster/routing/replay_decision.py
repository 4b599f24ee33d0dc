"""Decides whether a request continues after a setback, and where. Pure: uses current instance states and no clock."""

from __future__ import annotations

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.placement.routing_policy import Pair, Policy, single_instance
from pd_cluster.cluster.placement.routing_rules import ReplayLimits
from pd_cluster.cluster.streams.request_stream import RequestStream, Setback
from pd_cluster.errors import InstanceLost

MAX_DEATHS = 2  # if so many instances have died while they served a request, the request may be the cause
MAX_DEATHS_TOGETHER = 3  # the limit if they died together: a host or an operator is then the likelier cause


def check_replay(stream: RequestStream, setback: Setback, instances: list[Instance], limits: ReplayLimits) -> None:
    """Raises the setback's error, or InstanceLost, if no further attempt is allowed."""
    _take_back(stream, instances)
    if len(stream.deaths) >= (MAX_DEATHS_TOGETHER if _died_together(stream, limits) else MAX_DEATHS):
        which = f"{len(stream.deaths)} instances have died while they served this request"
        raise InstanceLost(f"{setback.error}; {which}, so it is not retried")
    if stream.attempt - stream.num_moves > limits.max_attempts:
        raise setback.error


def next_pair(stream: RequestStream, instances: list[Instance], choose: Policy) -> Pair:
    """Chooses the instances where a request continues; if it has begun, one instance computes the rest. Raises
    Unavailable.
    """
    instances = _alive_after(stream, instances)
    pair = choose(instances, stream.ask)
    return single_instance(instances) if stream.resumed() else pair


def _died_together(stream: RequestStream, limits: ReplayLimits) -> bool:
    return stream.deaths[-1].at_s - stream.deaths[0].at_s <= limits.together_s if stream.deaths else True


def _alive_after(stream: RequestStream, instances: list[Instance]) -> list[Instance]:
    """Returns the instances that may continue a request; a request that has begun needs the same numerics.

    After a second death, only instances that have sent a heartbeat since then may continue it. Instances that die
    together are not all detected at once, and a request must not be blamed for deaths that it did not cause.
    """
    if stream.numerics is not None and stream.resumed():
        instances = [i for i in instances if i.info is None or not i.info.numerics.difference(stream.numerics)]
    instances = _without_unit_members(stream, instances)
    if len(stream.deaths) < MAX_DEATHS:
        return instances
    return [instance for instance in instances if instance.heard_s > stream.deaths[-1].at_s]


def _without_unit_members(stream: RequestStream, instances: list[Instance]) -> list[Instance]:
    """Excludes the members of a dead instance's unit, which end with it, until they are ready again. If no other
    instance is ready, returns all.
    """
    dead_s = {death.unit: death.at_s for death in stream.deaths if death.unit}
    left = [each for each in instances if each.unit not in dead_s or each.ready_s > dead_s[each.unit]]
    return left if any(each.is_ready for each in left) else instances


def _take_back(stream: RequestStream, instances: list[Instance]) -> None:
    """Removes the deaths of instances whose process has been ready again since then: they were only stalled."""
    back_s = {instance.key: instance.ready_s for instance in instances}
    deaths = [death for death in stream.deaths if back_s.get(death.life, float("-inf")) < death.at_s]
    stream.num_moves += len(stream.deaths) - len(deaths)
    stream.deaths = deaths
