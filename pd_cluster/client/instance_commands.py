"""Sends a command for one instance to the scheduler's admin address, then polls the list until it is done.

The scheduler's answer names all instances that the command affects: the members of a unit change together.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from pd_cluster.client.admin_client import Admin, not_an_admin, raise_unauthorized
from pd_cluster.client.instance_list import fetch_instances
from pd_cluster.errors import PdClusterError

POLL_S = 0.2
MARGIN_S = 15.0  # time for the steps after the scheduler's own deadline, and for polling
JOIN_TIMEOUT_S = 300.0  # a model may have to be loaded first

Entry = dict[str, Any]
IsDone = Callable[[Entry | None], bool]  # takes an instance's entry in the list, or None if it is absent


def is_here(entry: Entry | None) -> bool:
    """Returns whether the instance serves, or waits only for other members of its unit, which are added one by one.

    Raises PdClusterError if the instance can never join this cluster.
    """
    if entry is not None and entry["state"] == "failed":
        raise PdClusterError(f"{entry['instance_id']} is in the list but cannot serve: {entry['reason']}")
    return entry is not None and entry["state"] in ("forming", "ready")


def is_gone(entry: Entry | None) -> bool:
    return entry is None


def is_drained(entry: Entry | None) -> bool:
    """Returns whether the instance has no work; an instance that is not ready has none."""
    return entry is None or (entry["service"] != "in" and entry["state"] != "draining")


def has_role(role: str) -> IsDone:
    return lambda entry: entry is not None and (entry["role"], entry["next_role"]) == (role, None)


class Command:
    """One command in progress: prints its result to stdout once at the end, its progress to stderr."""

    def __init__(self, admin: Admin, name: str) -> None:
        self._admin = admin
        self._name = name
        self._names = [name]  # the names of all instances that the command affects
        self._last_progress: dict[str, str] = {}
        self._timeout_s = 0.0  # the drain's timeout, as reported by the scheduler

    def send(self, command: str, body: dict[str, Any]) -> Entry:
        """Sends the command, and returns the entry that the instance then has; the command "" adds an instance.

        Raises PdClusterError with the scheduler's message.
        """
        path = f"/instances/{quote(self._name, safe='')}/{command}" if command else "/instances"
        response = asyncio.run(self._admin.ask(path, body))
        raise_unauthorized(response)
        if response.status_code != 200:
            try:
                message = str(response.json()["error"]["message"])
            except (ValueError, KeyError, TypeError):
                raise not_an_admin(response) from None
            raise PdClusterError(message)
        entry: Entry = response.json()
        self._timeout_s = entry["drain_timeout_s"]
        self._names = entry["instance_ids"]
        if len(self._names) > 1:
            print(f"{self._name} is in {entry['unit']}; its whole unit changes with it", file=sys.stderr, flush=True)
        return entry

    def say(self, result: str) -> None:
        """Prints a result, once for each affected instance."""
        for name in self._names:
            print(f"{name} {result}")

    def finish(self, no_wait: bool, is_done: IsDone, result: str, timeout_s: float | None = None) -> None:
        """Waits for the command. Raises PdClusterError if it does not complete in time."""
        if no_wait:
            print(f"{', '.join(self._names)}: requested; `pd-cluster instances` shows the progress")
            return
        asyncio.run(self._wait(is_done, (self._timeout_s if timeout_s is None else timeout_s) + MARGIN_S))
        self.say(result)

    async def _wait(self, is_done: IsDone, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            entries = await fetch_instances(self._admin)
            found = {each["instance_id"]: each for each in entries}
            waiting = [name for name in self._names if not is_done(found.get(name))]
            if not waiting:
                return
            if time.monotonic() > deadline_s:
                raise PdClusterError(
                    f"{waiting[0]} is not done after {timeout_s:g} s: {_described(found.get(waiting[0]))}"
                )
            for name in waiting:
                self._progress(name, _described(found.get(name)))
            await asyncio.sleep(POLL_S)

    def _progress(self, name: str, told: str) -> None:
        if told != self._last_progress.get(name):
            self._last_progress[name] = told
            print(f"{name}: {told}", file=sys.stderr, flush=True)


def _described(entry: Entry | None) -> str:
    if entry is None:
        return "it is not in the list"
    reason = f" ({entry['reason']})" if entry["reason"] else ""
    num = entry["num_outstanding"]
    return f"{entry['state']}{reason}, {num} {'request' if num == 1 else 'requests'} there"
