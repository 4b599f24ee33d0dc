"""Shows a global rank table: one line per instance, in the order of NODE_PORTS, then other programs' fields."""

from __future__ import annotations

import json

from ranktable_tools.foreign import foreign_fields
from ranktable_tools.tables import RankTable, Server

_TITLES = ("#", "role", "host", "devices", "device ips", "super device ids")


def render(table: RankTable) -> str:
    rows = [_TITLES, *_rows(table)]
    in_super_pod = any(device.super_device_id for server in table.instances for device in server.device)
    num_columns = len(_TITLES) - (not in_super_pod)
    widths = [max(len(row[column]) for row in rows) for column in range(num_columns)]
    lines = ["  ".join(map(str.ljust, row[:num_columns], widths)).rstrip() for row in rows]
    order = ",".join(f"<port of #{index}>" for index in range(len(table.instances)))
    kept = [f"{field} = {json.dumps(value)}" for field, value in foreign_fields(table)]
    head = f"{table.file}: version {table.version}, {table.status}"
    return "\n".join([head, *lines, f"NODE_PORTS={order}", *kept])


def _rows(table: RankTable) -> list[tuple[str, ...]]:
    rows = [_row("-", "scheduler", table.scheduler)] if table.scheduler else []
    roles = ["prefill"] * len(table.prefill) + ["decode"] * len(table.decode)
    for index, (role, server) in enumerate(zip(roles, table.instances)):
        rows.append(_row(str(index), role, server))
    return rows


def _row(index: str, role: str, server: Server) -> tuple[str, ...]:
    ids = ",".join(device.device_id for device in server.device) or "-"
    addresses = ",".join(device.device_ip for device in server.device) or "-"
    super_ids = ",".join(device.super_device_id or "-" for device in server.device) or "-"
    return index, role, server.server_ip, ids, addresses, super_ids
