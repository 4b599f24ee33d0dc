"""Reads rank table files in the grouped format strictly, and finds a local table in the global one.

Errors for other programs' formats name the program (dialects.py); additional fields of other programs are kept
(foreign_fields.py). Knows nothing of ports or of the network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final

from ranktable_tools import dialects
from ranktable_tools.errors import MISSING
from ranktable_tools.errors import Fault as Fault
from ranktable_tools.errors import RankTableError as RankTableError
from ranktable_tools.host_addresses import HOST_EXPECTED, host_key, is_shared_host
from ranktable_tools.json_object import JsonObject
from ranktable_tools.table_files import actual_path, read_json
from ranktable_tools.table_files import read_bytes as read_bytes
from ranktable_tools.table_rules import Entry, device_conflicts, entries
from ranktable_tools.table_types import ROLES as ROLES
from ranktable_tools.table_types import Device as Device
from ranktable_tools.table_types import LocalRankTable as LocalRankTable
from ranktable_tools.table_types import RankTable as RankTable
from ranktable_tools.table_types import Role as Role
from ranktable_tools.table_types import Server as Server
from ranktable_tools.table_types import ServerGroup as ServerGroup

_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)
_NAME: Final = re.compile(r"[^\s\x00-\x1f\x7f]{1,253}")
_OF_A_GROUP: Final = ("group_id", "server_count", "server_list")
_OF_A_SERVER: Final = ("server_id", "server_ip", "device")
_OF_A_DEVICE: Final = ("device_id", "device_ip", "rank_id", "super_device_id")
_NUMBER_EXPECTED: Final = "a number written as a string, such as '4'"


def load_global(path: str | os.PathLike[str]) -> RankTable:
    """Reads a global table.

    Raises RankTableError for an unreadable file, another dialect, a wrong field, and a device that is used twice.
    """
    table = parse_global(read_json(path), str(actual_path(path)))
    for fault in device_conflicts(entries(table)):
        raise fault.error()
    return table


def load_local(path: str | os.PathLike[str]) -> LocalRankTable:
    """Reads a local table. Raises RankTableError."""
    return parse_local(read_json(path), str(actual_path(path)))


def parse_global(value: object, file: str) -> RankTable:
    """Returns a table after checking each field; table_rules.py checks whether its entries fit together."""
    top = JsonObject.of(file, "", value, dialects.GLOBAL, ("version", "status", "server_group_list"))
    dialects.refuse_foreign_global(top)
    version, status = _header(top)
    groups = list(top.objects("server_group_list", "three groups: scheduler, prefill, decode", _OF_A_GROUP))
    if len(groups) != len(ROLES):
        raise top.refuse(
            "server_group_list",
            f"{len(groups)} groups",
            "3 groups: scheduler, prefill, decode",
            "MindIE and omni-infer number their groups differently; write the table with `pd-ranktable gen`, and start "
            "encoders with `pd-cluster serve --role encode --join SCHEDULER:PORT`",
        )
    parsed = tuple(_group(group, role) for group, role in zip(groups, ROLES))
    return RankTable(version, status, parsed, file, top.foreign)


def parse_local(value: object, file: str) -> LocalRankTable:
    top = JsonObject.of(file, "", value, dialects.LOCAL, ("version", "status", *_OF_A_GROUP))
    dialects.refuse_foreign_local(top)
    version, status = _header(top)
    group_id = top.one_of("group_id", ("0",), "a local table's group is '0', whatever its role")
    count = top.one_of("server_count", ("1",), "a local table describes one instance")
    found = list(top.objects("server_list", "one instance", _OF_A_SERVER))
    if len(found) != 1:
        raise top.refuse("server_list", f"{len(found)} entries", "1 entry")
    is_worker = found[0].members.get("device", []) != []
    server = _server(found[0], "prefill" if is_worker else "scheduler")
    return LocalRankTable(version, status, group_id, count, (server,), file, top.foreign)


def _header(top: JsonObject) -> tuple[str, str]:
    version = top.one_of("version", ("1.0", "1.2"))
    return version, top.one_of("status", ("completed",), "the table isn't finished: wait for its writer")


def _group(group: JsonObject, role: Role) -> ServerGroup:
    group_id = group.one_of("group_id", (str(ROLES.index(role)),), "groups come in the order 0, 1, 2")
    found = list(group.objects("server_list", f"{role} instances", _OF_A_SERVER))
    count = group.one_of("server_count", (str(len(found)),), f"server_list has {len(found)} entries")
    if role == "scheduler" and len(found) > 1:
        second = found[1]
        raise RankTableError(second.file, second.field, second.members.get("server_ip"), "at most one scheduler")
    return ServerGroup(group_id, count, tuple(_server(entry, role) for entry in found), group.foreign)


def _server(entry: JsonObject, role: Role) -> Server:
    server_id = entry.text("server_id", _is_name, "a host's name or address")
    server_ip = entry.text("server_ip", is_shared_host, HOST_EXPECTED)
    listed = entry.members.get("device", MISSING)
    if role == "scheduler":
        if listed not in (MISSING, []):
            raise entry.refuse("device", listed, "no device: the scheduler uses none")
        return Server(server_id, server_ip, extra=entry.foreign)
    if listed in (MISSING, []):
        way_out = dialects.NO_PREFILL_DEVICE if role == "prefill" else ""
        raise entry.refuse("device", listed, f"at least one device: this is a {role} instance", way_out)
    devices = [_device(device) for device in entry.objects("device", "a device of the instance", _OF_A_DEVICE)]
    _refuse_wrong_ranks(entry, devices)
    in_order = tuple(sorted(devices, key=lambda device: int(device.rank_id)))
    return Server(server_id, server_ip, in_order, entry.foreign)


def _device(device: JsonObject) -> Device:
    super_device_id = None
    if "super_device_id" in device.members:
        super_device_id = device.text("super_device_id", _is_number, _NUMBER_EXPECTED)
    return Device(
        device.text("device_id", _is_number, _NUMBER_EXPECTED),
        device.text("device_ip", is_shared_host, HOST_EXPECTED),
        device.text("rank_id", _is_number, _NUMBER_EXPECTED),
        super_device_id,
        device.foreign,
    )


def _refuse_wrong_ranks(entry: JsonObject, devices: list[Device]) -> None:
    """Checks that an instance's rank_ids are 0, 1, …; entries may be in any order."""
    open_ranks = [str(rank) for rank in range(len(devices))]
    for index, device in enumerate(devices):
        if device.rank_id not in open_ranks:
            expected = f"each of 0 to {len(devices) - 1} once: rank_id starts at 0 in each instance"
            raise entry.refuse(f"device[{index}].rank_id", device.rank_id, expected)
        open_ranks.remove(device.rank_id)


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def locate(global_table: RankTable, local_table: LocalRankTable) -> tuple[Role, int]:
    """Returns the role of the local table's instance and its index in that group's `server_list`.

    A local table must equal one entry of the global table in every field ("must correspond one to one"). Raises
    RankTableError that names both files and the first field in which they differ.
    """
    wanted = local_table.server
    candidates = [entry for entry in entries(global_table) if _may_be(entry, wanted)]
    for entry in candidates:
        if entry.server == wanted:
            return entry.role, entry.position
    found_in = global_table.file or "the global table"
    way_out = "use files of the same `pd-ranktable gen`, or merge again"
    for entry in candidates:
        field, ours, theirs = next(_differences(wanted, entry.server))
        expected = f"{theirs!r}, as in {entry.field} of {found_in}"
        raise RankTableError(local_table.file, f"server_list[0].{field}", ours, expected, way_out)
    if not wanted.device:
        expected = f"the scheduler of {found_in}, which has {_described(global_table.scheduler)}"
    else:
        expected = f"an instance of {found_in}, which has {', '.join(map(_described, global_table.instances))}"
    raise RankTableError(local_table.file, "server_list[0]", _described(wanted), expected, way_out)


def _may_be(entry: Entry, wanted: Server) -> bool:
    """Returns whether both have the same host and, except for the scheduler, a device in common."""
    if host_key(entry.server.server_ip) != host_key(wanted.server_ip):
        return False
    if not wanted.device:
        return entry.role == "scheduler"
    ids = {device.device_id for device in wanted.device}
    return any(device.device_id in ids for device in entry.server.device)


def _differences(ours: Server, theirs: Server) -> Iterator[tuple[str, object, object]]:
    """Yields (field, our value, their value) for each difference."""
    for name in ("server_id", "server_ip"):
        if getattr(ours, name) != getattr(theirs, name):
            yield name, getattr(ours, name), getattr(theirs, name)
    if len(ours.device) != len(theirs.device):
        yield "device", f"{len(ours.device)} devices", f"{len(theirs.device)} devices"
    for index, (mine, other) in enumerate(zip(ours.device, theirs.device)):
        for name in ("device_id", "device_ip", "rank_id", "super_device_id"):
            if getattr(mine, name) != getattr(other, name):
                yield f"device[{index}].{name}", getattr(mine, name), getattr(other, name)


def _described(server: Server | None) -> str:
    if server is None:
        return "none (merge with the table of the machine that ran gen --api-server)"
    ids = ",".join(device.device_id for device in server.device)
    return f"{server.server_ip} [{ids}]" if ids else server.server_ip
