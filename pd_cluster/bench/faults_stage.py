"""What `bench faults` does to the cluster that it started itself, and how it sees what follows.

Signals go to processes of that cluster only: an instance's parent, which the launcher knows, and its ranks, which it
tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx

from pd_cluster.bench.client import CONNECT_TIMEOUT_S
from pd_cluster.cluster.launcher import Cluster
from pd_cluster.errors import PdClusterError

POLL_S = 0.02
WHOLE_TIMEOUT_S = 90.0
SETTLE_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 5.0
BUSY = 4  # requests of an instance that a fault shall meet
BUSY_TIMEOUT_S = 10.0

Entries = list[dict[str, Any]]


class Stage:
    """One cluster under load, seen through its admin address."""

    def __init__(self, cluster: Cluster, client: httpx.AsyncClient) -> None:
        self._cluster = cluster
        self._client = client
        self._num_replays: dict[str, int] = {}  # of each request since the last `take_replays`
        self._taken: set[str] = set()
        self._rank_pids: dict[str, list[int]] = {}  # as the workers told them last

    # ---- what is done to it

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> float:
        """A signal for an instance's parent. When it was sent. Raises PdClusterError: it is not there."""
        return _send(number, name, [self._cluster.pid_of(name)])

    def kill_ranks(self, name: str, number: signal.Signals = signal.SIGKILL) -> float:
        """A signal for the processes that compute. When it was sent. Raises PdClusterError: there is none."""
        return _send(number, name, self._rank_pids.get(name, []))

    def kill_preloader(self) -> None:
        """Where ranks are spawned there is none, and nothing is done."""
        if pid := self._cluster.preloader_pid:
            _send(signal.SIGKILL, "the preloader", [pid])

    def stop(self, name: str) -> float:
        """All processes of an instance stand still. Since when."""
        self.kill_ranks(name, signal.SIGSTOP)
        return self.kill(name, signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        self.kill(name, signal.SIGCONT)
        self.kill_ranks(name, signal.SIGCONT)

    async def new_pid(self, name: str, old_pid: int) -> float:
        """Until the process was started again. When."""
        await self._until(f"{name} is started again", lambda: self._cluster.pid_of(name) != old_pid)
        return time.monotonic()

    def pid_of(self, name: str) -> int:
        return self._cluster.pid_of(name)

    # ---- what is seen of it

    async def instances(self) -> Entries:
        """Empty when the scheduler does not answer."""
        try:
            answer = await self._client.get(f"{self._cluster.launch.admin_url}/instances", timeout=ANSWER_TIMEOUT_S)
            found: Entries = answer.json()["instances"]
        except httpx.HTTPError:
            return []
        self._rank_pids |= {entry["instance_id"]: entry.get("rank_pids", []) for entry in found}
        return found

    async def lost(self, *names: str) -> float:
        """Until none of these is shown as ready. When."""
        deadline_s = time.monotonic() + WHOLE_TIMEOUT_S
        while time.monotonic() < deadline_s:
            entries = await self.instances()
            if entries and all(e["state"] != "ready" for e in entries if e["instance_id"] in names):
                return time.monotonic()
            await asyncio.sleep(POLL_S)
        raise PdClusterError(f"the loss of {', '.join(names)} was not noticed within {WHOLE_TIMEOUT_S:g} s")

    async def busy(self, name: str) -> None:
        """Until an instance has several requests, so that a fault cannot miss; not longer than BUSY_TIMEOUT_S."""
        deadline_s = time.monotonic() + BUSY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            found = [e["num_outstanding"] for e in await self.instances() if e["instance_id"] == name]
            if found and found[0] >= BUSY:
                return
            await asyncio.sleep(POLL_S)

    async def whole(self) -> None:
        """Until every instance is ready and every link is up."""
        deadline_s = time.monotonic() + WHOLE_TIMEOUT_S
        while not is_whole(await self.instances()):
            if time.monotonic() > deadline_s:
                raise PdClusterError(f"the cluster was not whole again within {WHOLE_TIMEOUT_S:g} s")
            await asyncio.sleep(5 * POLL_S)

    async def served(self, body: dict[str, Any]) -> float:
        """Until a request is answered, on connections of its own. When."""
        url = f"{self._cluster.launch.url}/v1/completions"
        deadline_s = time.monotonic() + WHOLE_TIMEOUT_S
        while time.monotonic() < deadline_s:
            async with httpx.AsyncClient(trust_env=False, timeout=CONNECT_TIMEOUT_S) as client:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.post(url, json=body)).status_code == 200:
                        return time.monotonic()
            await asyncio.sleep(POLL_S)
        raise PdClusterError(f"no request was answered within {WHOLE_TIMEOUT_S:g} s")

    async def held(self) -> int:
        """Blocks that are neither free nor cached, or requests still outstanding, once no more of them come home."""
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
        """Reads how often the last requests went on elsewhere; often enough, none is missed."""
        with contextlib.suppress(httpx.HTTPError):
            url = f"{self._cluster.launch.admin_url}/requests?limit=1000"
            for entry in (await self._client.get(url, timeout=ANSWER_TIMEOUT_S)).json()["requests"]:
                if entry["request_id"] not in self._taken:
                    self._num_replays[entry["request_id"]] = entry["num_replays"]

    def take_replays(self) -> tuple[int, int]:
        """Requests that went on elsewhere since the last call, and how often in all."""
        counts = [count for count in self._num_replays.values() if count]
        self._taken.update(self._num_replays)
        self._num_replays.clear()
        return len(counts), sum(counts)

    async def _until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WHOLE_TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise PdClusterError(f"not within {WHOLE_TIMEOUT_S:g} s: {what}")
            await asyncio.sleep(POLL_S)


def is_whole(entries: Entries) -> bool:
    """All ready, and as many links up from each prefill instance as there are decode instances."""
    num_decode = sum(e["role"] == "decode" for e in entries)
    linked = [sum(state.startswith("up") for state in e["links"].values()) for e in entries if e["role"] == "prefill"]
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
