"""`pd-cluster trace`: queries the admin address, prints, writes files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from pd_cluster.client.admin_client import Admin, not_an_admin, raise_unauthorized
from pd_cluster.commands.trace.timeline_png import check_installed, write_png
from pd_cluster.commands.trace.timeline_text import print_requests, print_timeline
from pd_cluster.errors import ConfigError, PdClusterError
from pd_cluster.output_files import write_output
from pd_cluster.result_tables import check_writable


def run(request_id: str, admin: Admin, png: str, json_file: str) -> None:
    """Shows a request's timeline or, without an id, a list of the last requests. Raises PdClusterError."""
    check_writable(json_file)
    check_writable(png, "--png")
    if png and not request_id:
        raise ConfigError(f"--png {png}: needs the id of a request; `pd-cluster trace` without an id lists requests")
    if png:
        check_installed()
    path = f"/requests/{quote(request_id, safe='')}/timeline" if request_id else "/requests"
    answer = asyncio.run(_fetch(admin, path, "events" if request_id else "requests"))
    if request_id:
        print_timeline(answer)
    else:
        print_requests(admin.url, answer)
    if json_file:
        write_output(json_file, "--json", (json.dumps(answer, indent=2) + "\n").encode())
    if png:
        write_png(answer, png)


def export_trace(admin: Admin, file: str, block_tokens: int, others: Mapping[str, str]) -> None:
    """Writes the trace of the served requests. `others`: flags that conflict with it. Raises PdClusterError."""
    check_writable(file, "--export")
    if unfit := [name for name, value in others.items() if value]:
        raise ConfigError(f"--export {file}: exports all requests; leave out {', '.join(unfit)}")
    response = asyncio.run(admin.ask(f"/requests/trace?block_tokens={block_tokens}"))
    raise_unauthorized(response)
    if response.status_code != 200 or "jsonl" not in response.headers.get("content-type", ""):
        try:
            raise PdClusterError(response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            raise not_an_admin(response) from None
    write_output(file, "--export", response.content)
    num_lines = response.content.count(b"\n")
    print(f"{num_lines} requests in {file}")


async def _fetch(admin: Admin, path: str, field: str) -> dict[str, Any]:
    """Fetches JSON. Raises PdClusterError, with the admin port's message if it sends one."""
    response = await admin.ask(path)
    raise_unauthorized(response)
    try:
        answer: dict[str, Any] = response.json()
        if response.status_code == 404 and answer["error"]["code"] == "request_not_found":
            raise PdClusterError(answer["error"]["message"])
        if not isinstance(answer[field], list):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise not_an_admin(response) from None
    return answer
