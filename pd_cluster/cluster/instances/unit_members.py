"""Finds the members of a unit, the instances that share experts, in a scheduler's list of instances. Pure.

A worker's own description gives its unit, its rank in the unit and the unit's size. Knows nothing of how members
connect.
"""

from __future__ import annotations

from collections.abc import Sequence

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.process_messages import InstanceInfo


def unit_of(instances: Sequence[Instance], instance: Instance) -> list[Instance]:
    """Returns the known members of the instance's unit in the order of their ranks; the instance alone if it has no
    unit.
    """
    if not instance.unit:
        return [instance]
    found = (_member(instances, instance, rank) for rank in range(instance.unit_size))
    return [each for each in found if each is not None]


def unit_clash(instances: Sequence[Instance], instance: Instance, info: InstanceInfo) -> str:
    """Returns why this life of the instance conflicts with the reachable members of its unit; "" if it does not."""
    if info.unit_rank >= info.unit_size:
        return f"it has rank {info.unit_rank} in {info.unit}, which has {info.unit_size} instances"
    for other in instances:
        if other is instance or not other.is_reached:
            continue
        if other.unit != info.unit:
            covers = _covers(instance, info.unit_rank, info.unit_size, other)
            if covers or _covers(other, other.unit_rank, other.unit_size, instance):
                return (
                    f"it is in {info.unit or 'no unit'}, but {other.name}, in the same unit by the rank table, "
                    f"is in {other.unit or 'no unit'}; start both with the same --data-parallel-size"
                )
        elif info.unit and other.unit_size != info.unit_size:
            return (
                f"its unit {info.unit} has {info.unit_size} instances, but {other.name} reports {other.unit_size}; "
                "start both with the same --data-parallel-size"
            )
        elif info.unit and other.unit_rank == info.unit_rank:
            return (
                f"it and {other.name} both have rank {info.unit_rank} in {info.unit}; give each its own "
                "--data-parallel-rank, or its own entry of the rank table"
            )
    return ""


def _covers(member: Instance, rank: int, size: int, other: Instance) -> bool:
    """Whether `other` must belong to the unit of a member with this rank, because of the distance of their entries in
    the rank table.
    """
    if member.is_registered or other.is_registered:
        return False
    (role, _, own), (theirs, _, at) = member.name.rpartition("-"), other.name.rpartition("-")
    return role == theirs and 0 <= int(at) - int(own) + rank < size


def describe_awaited(instances: Sequence[Instance], instance: Instance) -> str:
    """Describes the instances that a forming instance waits for."""
    missing = []
    for rank in range(instance.unit_size):
        member = _member(instances, instance, rank)
        if member is None:
            missing.append(f"rank {rank}, which is not in the list")
        elif not (member.is_ready or member.state == "forming"):
            missing.append(f"{member.name}, which is {member.state}")
    if missing:
        return f"it waits for {' and '.join(missing)}"
    others = ", ".join(each.name for each in unit_of(instances, instance) if each is not instance)
    return f"it has no connection to {others} yet, although the scheduler reaches them; see their logs"


def _member(instances: Sequence[Instance], instance: Instance, rank: int) -> Instance | None:
    """Returns the member with that rank. A member that was never reached is found by its distance in the rank table."""
    if rank == instance.unit_rank:
        return instance
    named = [each for each in instances if (each.unit, each.unit_rank) == (instance.unit, rank)]
    if named:
        return max(named, key=lambda each: each.is_reached)  # an earlier, dead instance may have had the same rank
    if instance.is_registered:
        return None
    group, _, index = instance.name.rpartition("-")
    name = f"{group}-{int(index) + rank - instance.unit_rank}"
    return next((each for each in instances if each.name == name and each.info is None), None)
