"""`pd-cluster logs`: shows the log of a process that `pd-cluster up` started, even if it has died."""

from __future__ import annotations

import asyncio
import json

from pd_cluster.client.admin_client import Admin
from pd_cluster.client.instance_list import fetch_instances
from pd_cluster.client.overview_reader import fetch_logs
from pd_cluster.errors import PdClusterError

POLL_S = 0.3
MAX_LINES = 5000


def run(admin: Admin, name: str, num_lines: int, follow: bool, as_json: bool) -> None:
    """Prints log lines. `name` "": the lines of every process, each with the process's name. Raises PdClusterError."""
    asyncio.run(_run(admin, name, num_lines, follow, as_json))


async def _run(admin: Admin, name: str, num_lines: int, follow: bool, as_json: bool) -> None:
    names = [name] if name else ["scheduler", *(each["instance_id"] for each in await fetch_instances(admin))]
    width = max(map(len, names)) if len(names) > 1 else 0
    at: dict[str, int] = {}
    for each in names:
        lines, at[each] = await fetch_logs(admin, each, num_lines)
        _print(each, lines, width, as_json)
    while follow:
        await asyncio.sleep(POLL_S)
        for each in names:
            try:
                lines, at[each] = await fetch_logs(admin, each, MAX_LINES, at[each])
            except PdClusterError:
                if len(names) == 1:
                    raise
                continue  # the process has left the cluster
            _print(each, lines, width, as_json)


def _print(name: str, lines: list[str], width: int, as_json: bool) -> None:
    for line in lines:
        if as_json:
            print(json.dumps({"instance_id": name, "line": line}))
        else:
            print(f"{name:<{width}}| {line}" if width else line)
    if lines:
        print(end="", flush=True)
