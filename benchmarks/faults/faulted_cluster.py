"""Applies faults to the cluster that `benchmarks faults` started, and observes the effects.

Only processes of that cluster receive signals: an instance's parent, which the launcher has started, and its ranks,
which the instance reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx

from pd_cluster.client.instance_list import links_of
from pd_cluster.client.streaming_client import (
    CONNECT_TIMEOUT_S,
    REQUEST_DEADLINE_S,
    Sample,
    StreamWatch,
    error_message,
    measure,
)
from pd_cluster.cluster.processes.launcher import Cluster
from pd_cluster.errors import PdClusterError

POLL_S = 0.02
WHOLE_TIMEOUT_S = 90.0
SETTLE_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 5.0
BUSY = 4  # minimum number of requests in an instance when a fault occurs
BUSY_TIMEOUT_S = 10.0

Entries = list[dict[str, Any]]
Tokens = tuple[int, ...]


class FaultedCluster:
    """One cluster under load, observed at its admin address."""

    def __init__(self, cluster: Cluster, client: httpx.AsyncClient) -> None:
        self._cluster = cluster
        self._client = client
        self._num_replays: dict[str, int] = {}  # replays per request, since the last call of `take_replays`
        self._taken: set[str] = set()
        self._rank_pids: dict[str, list[int]] = {}  # the pids that workers reported last

    # ---- actions

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> float:
        """Signals an instance's parent. Returns the time. Raises PdClusterError if the parent does not exist."""
        return _send(number, name, [self._cluster.pid_of(name)])

    def kill_ranks(self, name: str, number: signal.Signals = signal.SIGKILL) -> float:
        """Signals the rank processes. Returns the time. Raises PdClusterError if there is none."""
        return _send(number, name, self.rank_pids(name))

    def kill_rank(self, name: str, rank: int) -> float:
        """Kills one rank process. Returns the time. Raises PdClusterError if the process does not exist."""
        return _send(signal.SIGKILL, f"{name} rank {rank}", self.rank_pids(name)[rank : rank + 1])

    def kill_preloader(self) -> None:
        """Kills the preloader; does nothing if ranks are spawned without one."""
        if pid := self._cluster.preloader_pid:
            _send(signal.SIGKILL, "the preloader", [pid])

    def stop(self, name: str) -> float:
        """Stops all processes of an instance. Returns the time."""
        self.kill_ranks(name, signal.SIGSTOP)
        return self.kill(name, signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        self.kill(name, signal.SIGCONT)
        self.kill_ranks(name, signal.SIGCONT)

    async def new_pid(self, name: str, old_pid: int) -> float:
        """Waits until the process has been restarted. Returns the time."""

        async def is_new() -> bool:
            return self._cluster.pid_of(name) != old_pid

        return await _until(f"{name} was not started again", is_new)

    def pid_of(self, name: str) -> int:
        return self._cluster.pid_of(name)

    @property
    def public(self) -> tuple[str, int]:
        """The address for clients."""
        return "127.0.0.1", self._cluster.launch.port

    @property
    def url(self) -> str:
        return self._cluster.launch.url

    def rank_pids(self, name: str) -> list[int]:
        """Returns the rank pids that the instance reported last."""
        return self._rank_pids.get(name, [])

    def pids(self) -> dict[int, str]:
        """Returns pid -> readable name of each known process of the cluster."""
        names = [*self._cluster.launch.worker_names, "scheduler"]
        found = {self.pid_of(name): name for name in names}
        for name, pids in self._rank_pids.items():
            found |= {pid: f"{name} rank {rank}" for rank, pid in enumerate(pids)}
        if pid := self._cluster.preloader_pid:
            found[pid] = "preloader"
        return found

    # ---- observations

    async def instances(self) -> Entries:
        """Returns the entries; empty if the scheduler does not answer."""
        try:
            answer = await self._client.get(f"{self._cluster.launch.admin_url}/instances", timeout=ANSWER_TIMEOUT_S)
            found: Entries = answer.json()["instances"]
        except httpx.HTTPError:
            return []
        self._rank_pids |= {entry["instance_id"]: entry.get("rank_pids", []) for entry in found}
        return found

    async def lives(self) -> dict[str, list[int]]:
        """Returns the pids of each instance and of the scheduler, which change at a restart."""
        found = {e["instance_id"]: [e["pid"], *e["rank_pids"]] for e in await self.instances()}
        return found | {"scheduler": [self.pid_of("scheduler")]}

    async def lost(self, *names: str) -> float:
        """Waits until none of these instances is shown as ready. Returns the time."""

        async def is_lost() -> bool:
            entries = await self.instances()
            return bool(entries) and all(e["state"] != "ready" for e in entries if e["instance_id"] in names)

        return await _until(f"the loss of {', '.join(names)} was not noticed", is_lost)

    async def busy(self, name: str) -> None:
        """Waits, for at most BUSY_TIMEOUT_S, until an instance has several requests, which a fault then affects."""
        deadline_s = time.monotonic() + BUSY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            found = [e["num_outstanding"] for e in await self.instances() if e["instance_id"] == name]
            if found and found[0] >= BUSY:
                return
            await asyncio.sleep(POLL_S)

    async def whole(self) -> None:
        """Waits until every instance is ready and every link is up."""

        async def is_ready() -> bool:
            return is_whole(await self.instances())

        await _until("the cluster was not whole again", is_ready)

    async def served(self, body: dict[str, Any]) -> float:
        """Waits until a request on a new connection is answered. Returns the time."""
        return await _until("no request was answered", lambda: self.answers(body, CONNECT_TIMEOUT_S))

    async def answers(self, body: dict[str, Any], timeout_s: float) -> bool:
        """Returns whether a request on a new connection is answered within this time."""
        url = f"{self._cluster.launch.url}/v1/completions"
        async with httpx.AsyncClient(trust_env=False, timeout=timeout_s) as client:
            try:
                return (await client.post(url, json=body)).status_code == 200
            except httpx.HTTPError:
                return False

    async def held(self) -> int:
        """Returns the number of blocks neither free nor cached, plus outstanding requests, when it no longer falls."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        before = {e["instance_id"]: e["num_heartbeats"] for e in await self.instances()}
        while True:
            entries = await self.instances()
            told = [e for e in entries if e["num_heartbeats"] >= before.get(e["instance_id"], 0) + 2]
            num_held = sum(
                e["num_blocks"] - e["num_free_blocks"] - e["num_cached_blocks"] + e["num_outstanding"] for e in told
            )
            if (len(told) == len(before) and not num_held) or time.monotonic() > deadline_s:
                return int(num_held) + len(before) - len(told)
            await asyncio.sleep(5 * POLL_S)

    async def count_replays(self) -> None:
        """Reads how many times the last requests were replayed. Must be called often enough to miss no request."""
        with contextlib.suppress(httpx.HTTPError):
            url = f"{self._cluster.launch.admin_url}/requests?limit=1000"
            for entry in (await self._client.get(url, timeout=ANSWER_TIMEOUT_S)).json()["requests"]:
                if entry["request_id"] not in self._taken:
                    self._num_replays[entry["request_id"]] = entry["num_replays"]

    def take_replays(self) -> tuple[int, int]:
        """Returns the number of requests replayed since the last call, and the number of their replays."""
        counts = [count for count in self._num_replays.values() if count]
        self._taken.update(self._num_replays)
        self._num_replays.clear()
        return len(counts), sum(counts)

    async def stream(
        self, body: Mapping[str, Any], on_first: Callable[[tuple[str, ...]], None] = lambda served_by: None
    ) -> Sample:
        """Sends one request; `on_first` as in `measure`."""
        return await measure(
            self._client, f"{self._cluster.launch.url}/v1/completions", body, StreamWatch(on_first=on_first)
        )

    async def whole_answer(self, body: dict[str, Any]) -> tuple[Sample, list[Tokens]]:
        """Sends one request without streaming. Returns its first sequence as a sample, and all sequences."""
        started_s = time.monotonic()
        try:
            answer = await self._client.post(
                f"{self._cluster.launch.url}/v1/completions",
                json={**body, "return_token_ids": True},
                timeout=REQUEST_DEADLINE_S,
            )
        except httpx.HTTPError as error:
            return Sample(error=str(error) or type(error).__name__), []
        e2e_s = time.monotonic() - started_s
        if answer.status_code != 200:
            said = f"HTTP {answer.status_code}: {error_message(answer.text)}"
            retry_after = answer.headers.get("retry-after")
            return Sample(status=answer.status_code, retry_after=retry_after, error=said, server_said_so=True), []
        choices = sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))
        sequences = [tuple(choice["token_ids"]) for choice in choices]
        return Sample(e2e_s=e2e_s, token_ids=sequences[0], status=200), sequences


async def _until(problem: str, check: Callable[[], Awaitable[bool]]) -> float:
    """Waits until the check is true. Returns the time. Raises PdClusterError."""
    deadline_s = time.monotonic() + WHOLE_TIMEOUT_S
    while not await check():
        if time.monotonic() > deadline_s:
            raise PdClusterError(f"{problem} within {WHOLE_TIMEOUT_S:g} s")
        await asyncio.sleep(POLL_S)
    return time.monotonic()


def is_whole(entries: Entries) -> bool:
    """Returns whether all instances are ready, and each prefill instance has a link to each decode instance."""
    num_decode = sum(e["role"] == "decode" for e in entries)
    linked = [sum(state.is_up for state in links_of(e).values()) for e in entries if e["role"] == "prefill"]
    return bool(entries) and all(e["state"] == "ready" for e in entries) and set(linked) == {num_decode}


def _send(number: signal.Signals, name: str, pids: list[int]) -> float:
    try:
        for pid in pids:
            os.kill(pid, number)
    except ProcessLookupError:
        pids = []
    if not pids:
        raise PdClusterError(f"{name} ended before it was sent {number.name}")
    return time.monotonic()
