"""Finds the unit of a starting worker: the instances of its role that compute expert layers together.

A unit is N consecutive entries of the rank table (N: --data-parallel-size), or with --join the N workers of a role.
"""

from __future__ import annotations

import logging

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.expert_counts import num_experts_of
from pd_cluster.commands.serve_start import Start
from pd_cluster.engine.handover.links.network_policy import why_no_unit
from pd_cluster.engine.start.preloader import has_no_driver
from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.process_configs import UnitPlace
from ranktable_tools.host_addresses import is_one_host
from ranktable_tools.unit_entries import Unit, unit_at

log = logging.getLogger(__name__)


def unit_of(start: Start, checkpoint: Checkpoint) -> UnitPlace | None:
    """Returns the worker's place in its unit; None if its instance is independent. Raises ConfigError."""
    size = start.engine.data_parallel_size
    own = unit_at(start.place.role, start.place.index, size)
    _check_rank(start, own)
    if size == 1:
        return None
    if not num_experts_of(checkpoint.config):
        log.info("--data-parallel-size %d: a model without experts; this instance is independent of others", size)
        return None
    if (rank := start.join.data_parallel_rank) is not None and start.join.role is not None:
        return UnitPlace(name=f"{start.place.role}-joined", rank=rank, size=size)
    _check_members(start, own)
    return UnitPlace(name=own.name, rank=own.members.index(start.place.index), size=size)


def _check_rank(start: Start, own: Unit) -> None:
    """Raises ConfigError for a --data-parallel-rank that differs from the rank in the table."""
    given, rank = start.join.data_parallel_rank, own.members.index(start.place.index)
    if start.join.role is None and given not in (None, rank):
        raise ConfigError(
            f"{called('data_parallel_rank')} {given}: the rank table and {called('data_parallel_size')} "
            f"{len(own.members)} give {start.place.name} rank {rank}; give that or leave it out"
        )


def _check_members(start: Start, own: Unit) -> None:
    """Raises ConfigError unless the rank table has all members, with equal numbers of devices, on hosts that may
    exchange rows.
    """
    role, table = start.place.role, start.place.table
    servers = table.prefill if role == "prefill" else table.decode
    named = f"{called('data_parallel_size')} {len(own.members)}"
    if len(servers) % len(own.members):
        raise ConfigError(
            f"{named}: {table.file} has {len(servers)} {role} instances, which is not a multiple of it; see "
            f"`pd-ranktable show`"
        )
    members = [servers[at] for at in own.members]
    sizes = [len(member.device) for member in members]
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"{named}: the instances of {own.name} have {', '.join(map(str, sizes))} devices in {table.file}; they "
            f"need equal numbers"
        )
    hosts = [member.server_ip for member in members]
    is_spread = any(not is_one_host(hosts[0], host) for host in hosts)
    if is_spread and not start.handover.trusts_network and has_no_driver(start.engine.device):
        raise ConfigError(why_no_unit(own.name, hosts))
