"""The types of a rank table, and how they are written. schema.py reads them.

A global table has three groups: group 0 has the scheduler (no device), group 1 prefill, group 2 decode. Each entry of a
group is one instance. A local table is a copy of one entry. All values are strings; `rank_id` counts from 0 in each
instance (logical card), `device_id` is the physical card. Version 1.2 may add `super_device_id`. `extra`: fields of
other programs, which have no meaning here. They are written back unchanged, and ignored in `==`.

Knows nothing of ports, of the network, or of whether devices exist.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

Role = Literal["scheduler", "prefill", "decode"]
ROLES: Final[tuple[Role, Role, Role]] = ("scheduler", "prefill", "decode")
"""The role of group 0, 1 and 2."""


@dataclass(frozen=True)
class Device:
    device_id: str
    device_ip: str
    rank_id: str
    super_device_id: str | None = None
    extra: Mapping[str, object] = field(default_factory=dict, compare=False)

    def to_dict(self) -> dict[str, object]:
        known = {"device_id": self.device_id, "device_ip": self.device_ip, "rank_id": self.rank_id}
        in_super_pod = {"super_device_id": self.super_device_id} if self.super_device_id else {}
        return {**known, **in_super_pod, **self.extra}


@dataclass(frozen=True)
class Server:
    """One instance. `device` is in order of rank_id; the scheduler has none."""

    server_id: str
    server_ip: str
    device: tuple[Device, ...] = ()
    extra: Mapping[str, object] = field(default_factory=dict, compare=False)

    def to_dict(self) -> dict[str, object]:
        devices = [device.to_dict() for device in self.device]
        known: dict[str, object] = {"server_id": self.server_id, "server_ip": self.server_ip}
        return {**known, **({"device": devices} if devices else {}), **self.extra}


@dataclass(frozen=True)
class ServerGroup:
    group_id: str
    server_count: str
    server_list: tuple[Server, ...]
    extra: Mapping[str, object] = field(default_factory=dict, compare=False)

    def to_dict(self) -> dict[str, object]:
        servers = [server.to_dict() for server in self.server_list]
        known = {"group_id": self.group_id, "server_count": self.server_count, "server_list": servers}
        return {**known, **self.extra}


@dataclass(frozen=True)
class RankTable:
    """The whole cluster. `file`: the file that it was read from, or ""; ignored in `==`."""

    version: str
    status: str
    server_group_list: tuple[ServerGroup, ...]
    file: str = field(default="", compare=False)
    extra: Mapping[str, object] = field(default_factory=dict, compare=False)

    @property
    def scheduler(self) -> Server | None:
        """The scheduler; None before `merge`, if it is in another machine's table."""
        servers = self.server_group_list[0].server_list
        return servers[0] if servers else None

    @property
    def prefill(self) -> tuple[Server, ...]:
        return self.server_group_list[1].server_list

    @property
    def decode(self) -> tuple[Server, ...]:
        return self.server_group_list[2].server_list

    @property
    def instances(self) -> tuple[Server, ...]:
        """The instances in the order of NODE_PORTS, prefill first."""
        return self.prefill + self.decode

    def to_dict(self) -> dict[str, object]:
        groups = [group.to_dict() for group in self.server_group_list]
        return {"version": self.version, "status": self.status, "server_group_list": groups, **self.extra}

    def to_json(self) -> str:
        return _json(self.to_dict())


@dataclass(frozen=True)
class LocalRankTable:
    """One instance, a copy of its entry in the global table. `group_id` is "0" for every role."""

    version: str
    status: str
    group_id: str
    server_count: str
    server_list: tuple[Server, ...]
    file: str = field(default="", compare=False)
    extra: Mapping[str, object] = field(default_factory=dict, compare=False)

    @property
    def server(self) -> Server:
        return self.server_list[0]

    def to_dict(self) -> dict[str, object]:
        group = ServerGroup(self.group_id, self.server_count, self.server_list, self.extra)
        return {"version": self.version, "status": self.status, **group.to_dict()}

    def to_json(self) -> str:
        return _json(self.to_dict())


def server_group(
    role: Role, servers: tuple[Server, ...], extra: Mapping[str, object] = MappingProxyType({})
) -> ServerGroup:
    return ServerGroup(str(ROLES.index(role)), str(len(servers)), servers, extra)


def _json(value: object) -> str:
    """Returns JSON text that UTF-8 can encode; a lone surrogate is written as an escape."""
    text = json.dumps(value, indent=4, ensure_ascii=False) + "\n"
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, indent=4) + "\n"
    return text


def local_table(version: str, server: Server) -> LocalRankTable:
    return LocalRankTable(version, "completed", "0", "1", (server,))
