"""Admin route for the log lines of processes, if `pd-cluster up` keeps them (settings/log_files.py).

Without these files, the route's error says where to find the lines: with the program that started the process.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request

from pd_cluster.errors import RequestError, RequestNotFound
from pd_cluster.private_files import reading
from pd_cluster.settings.log_files import MAX_FILE_NBYTES, file_of
from pd_cluster.settings.redaction import redacted

SCHEDULER = "scheduler"
DEFAULT_NUM_LINES, MAX_NUM_LINES = 200, 5000


def log_routes(folder: Path, names: Callable[[], Collection[str]], own: str = SCHEDULER) -> APIRouter:
    """`folder`: contains a file for each process. `names`: the instances' names; other names are unknown.

    `own`: the name of this scheduler's file, if there are several schedulers.
    """
    routes = APIRouter()

    @routes.get("/instances/{name}/logs")
    def logs(name: str, request: Request) -> dict[str, Any]:
        """Runs on a thread, because it reads a file."""
        if name != SCHEDULER and name not in names():
            known = ", ".join([*names(), SCHEDULER])
            raise RequestNotFound(f"name: {reprlib.repr(name)}; this cluster has {known}", param="name")
        limit = _number(request, "limit", DEFAULT_NUM_LINES, MAX_NUM_LINES)
        after = _number(request, "after", -1, 1 << 62)
        return read_lines(file_of(folder, own if name == SCHEDULER else name), name, limit, after)

    return routes


def read_lines(file: Path, name: str, limit: int, after: int) -> dict[str, Any]:
    """Returns the last `limit` whole lines, or the lines from byte `after` on. `next`: the byte at which to continue.

    Raises RequestNotFound if there is no such file.
    """
    try:
        with reading(file) as opened:
            end = opened.seek(0, 2)
            start = after if 0 <= after <= end else max(0, end - MAX_FILE_NBYTES)
            opened.seek(start)
            data = opened.read(MAX_FILE_NBYTES)
    except OSError:
        raise RequestNotFound(
            f"{name}: this command shows only logs that `pd-cluster up` keeps; other processes' logs are with the "
            f"program that started them (docker logs, kubectl logs, journalctl)",
            param="name",
            code="no_logs",
        ) from None
    whole = data[: data.rfind(b"\n") + 1]
    lines = redacted(whole.decode(errors="replace")).splitlines()
    return {"instance_id": name, "lines": lines[-limit:], "next": start + len(whole)}


def _number(request: Request, name: str, default: int, most: int) -> int:
    """Raises RequestError."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most):
        raise RequestError(f"{name}: {reprlib.repr(text)}; give a number up to {most}", param=name)
    return int(text)
