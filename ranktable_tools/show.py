"""A global rank table for people: one line an instance, in the order of NODE_PORTS."""

from __future__ import annotations

from ranktable_tools.tables import RankTable, Server

_TITLES = ("#", "role", "host", "devices", "device ips")
_Row = tuple[str, str, str, str, str]


def render(table: RankTable) -> str:
    rows = [_TITLES, *_rows(table)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    order = ",".join(f"<port of #{index}>" for index in range(len(table.instances)))
    return "\n".join([f"{table.file}: version {table.version}, {table.status}", *lines, f"NODE_PORTS={order}"])


def _rows(table: RankTable) -> list[_Row]:
    rows = [_row("-", "scheduler", table.scheduler)] if table.scheduler else []
    roles = ["prefill"] * len(table.prefill) + ["decode"] * len(table.decode)
    for index, (role, server) in enumerate(zip(roles, table.instances, strict=True)):
        rows.append(_row(str(index), role, server))
    return rows


def _row(index: str, role: str, server: Server) -> _Row:
    ids = ",".join(device.device_id for device in server.device) or "-"
    addresses = ",".join(device.device_ip for device in server.device) or "-"
    return index, role, server.server_ip, ids, addresses
