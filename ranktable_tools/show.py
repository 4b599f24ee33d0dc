"""Shows a global rank table: one line per instance, in the order of NODE_PORTS, then other programs' fields."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ranktable_tools.foreign_fields import foreign_fields
from ranktable_tools.table_types import RankTable, Server
from ranktable_tools.unit_entries import unit_faults, unit_names

_TITLES = ("#", "role", "host", "devices", "unit", "device ips", "super device ids")


def render(table: RankTable, unit_sizes: Mapping[str, int] = MappingProxyType({})) -> str:
    """Renders the table as text. `unit_sizes`: role -> instances per unit. Raises RankTableError if the table does not
    form whole units.
    """
    for fault in unit_faults(table, unit_sizes):
        raise fault.error()
    names = unit_names(table, unit_sizes)
    rows = [_TITLES, *_rows(table, names)]
    in_super_pod = any(device.super_device_id for server in table.instances for device in server.device)
    shown = [True, True, True, True, any(names), True, in_super_pod]
    rows = [tuple(itertools.compress(row, shown)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    order = ",".join(f"<port of #{index}>" for index in range(len(table.instances)))
    kept = [f"{field} = {json.dumps(value)}" for field, value in foreign_fields(table)]
    head = f"{table.file}: version {table.version}, {table.status}"
    return "\n".join([head, *lines, f"NODE_PORTS={order}", *kept])


def _rows(table: RankTable, names: Sequence[str]) -> list[tuple[str, ...]]:
    rows = [_row("-", "scheduler", table.scheduler, "")] if table.scheduler else []
    roles = ["prefill"] * len(table.prefill) + ["decode"] * len(table.decode)
    for index, (role, server, name) in enumerate(zip(roles, table.instances, names)):
        rows.append(_row(str(index), role, server, name))
    return rows


def _row(index: str, role: str, server: Server, unit: str) -> tuple[str, ...]:
    ids = ",".join(device.device_id for device in server.device) or "-"
    addresses = ",".join(device.device_ip for device in server.device) or "-"
    super_ids = ",".join(device.super_device_id or "-" for device in server.device) or "-"
    return index, role, server.server_ip, ids, unit or "-", addresses, super_ids
