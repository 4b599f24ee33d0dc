"""Rereads the rank table and the secrets while instances run, and refuses changes that running instances cannot follow.

Knows nothing of how instances join and leave (elastic_membership.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.unit_members import unit_of
from pd_cluster.cluster.members.rank_table_place import Place
from pd_cluster.cluster.members.worker_membership import instances_of
from pd_cluster.errors import ConfigError, Refused
from pd_cluster.settings.process_configs import Credentials


@dataclass(frozen=True, slots=True)
class RankTableFiles:
    """Reads the files' current content; each call may block, and may raise ConfigError.

    `ports`: NODE_PORTS_FILE's ports, in this table's order; None without such a file. `credentials`: from the secrets'
    files, or from the table with --derive-secret.
    """

    place: Callable[[], Place]
    ports: Callable[[Place], list[int] | None]
    credentials: Callable[[Place], Credentials]


class RankTableReader:
    """`credentials`: this process's."""

    def __init__(self, tables: RankTableFiles, credentials: Credentials) -> None:
        self._tables, self._credentials = tables, credentials

    async def read(self, running: Sequence[Instance], with_ports: bool) -> tuple[Place, dict[str, Instance]]:
        """Returns the table and its instances by name.

        Raises Refused for changes that these instances cannot follow, by their state after the read.
        """
        try:
            place, entries, credentials = await asyncio.to_thread(self._load, with_ports)
            if msgspec.structs.replace(credentials, table=self._credentials.table) != self._credentials:
                raise ConfigError(
                    f"{place.table.file} or cluster.secret has changed, and with it the secret: processes that start "
                    "from now on could not connect to running ones; restore the old file, and do not use "
                    "--derive-secret if the table may change"
                )
            _compare(place, entries, [each for each in running if not each.is_registered])
        except ConfigError as error:
            raise Refused(f"{error}; nothing has changed") from None
        return place, entries

    def _load(self, with_ports: bool) -> tuple[Place, dict[str, Instance], Credentials]:
        """Reads all files; port 0 means unknown. Raises ConfigError."""
        place = self._tables.place()
        ports = self._tables.ports(place) if with_ports else None
        entries = {each.name: each for each in instances_of(place, ports or [0] * len(place.names))}
        return place, entries, self._tables.credentials(place)


def _compare(new: Place, entries: Mapping[str, Instance], running: Sequence[Instance]) -> None:
    """Compares the new table with the running instances of the old one. Raises ConfigError."""
    file = new.table.file
    if new.role != "scheduler":
        raise ConfigError(f"{file}: this process is the scheduler, but its entry in this table is another instance")
    places = {(each.host, *each.device_ids): each.name for each in entries.values()}
    for instance in running:
        name = places.get((instance.host, *instance.device_ids))
        if name is not None and name != instance.name:
            raise ConfigError(
                f"{file} renames {instance.name} to {name}, but that instance is running: names follow the order of "
                "the table, so only the last entries of a group can be removed"
            )
    for instance in running:
        if instance.name in entries and (instance.host, *instance.device_ids) not in places:
            raise ConfigError(
                f"{file} has other devices for {instance.name}; first `pd-cluster instances remove {instance.name}`"
            )
        members = [each.name for each in unit_of(running, instance)]
        is_going = instance.name not in entries and instance.service != "leaving"
        if is_going and any(name in entries for name in members):
            raise ConfigError(
                f"{file} no longer has {instance.name}, but has others of its unit ({', '.join(members)}): remove "
                "all of them, or none"
            )
