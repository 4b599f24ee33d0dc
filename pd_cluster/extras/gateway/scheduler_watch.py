"""Polls the schedulers: whether they take requests, and how many are in flight. Knows nothing of gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import threading
from collections.abc import Sequence
from typing import NamedTuple

import httpx
import msgspec

from pd_cluster.extras.gateway.scheduler_choice import MOST_ENDPOINTS, SchedulerChoice
from ranktable_tools.host_addresses import bracketed, is_ip

log = logging.getLogger(__name__)

MOST_ANSWER_NBYTES = 1 << 20
KEPT_S = 10.0  # how long a name's last addresses are used while its name server does not answer
Address = tuple[str, int]


class SchedulerState(NamedTuple):
    """A scheduler that takes requests. `load`: its requests in flight, or None. `num_seen`: see `SchedulerChoice`."""

    load: int | None
    num_seen: int


class SchedulerWatch:
    """Polls schedulers by `addresses`, names or IP addresses; a name means all its current addresses. `key` opens
    `/load`.
    """

    def __init__(
        self, choice: SchedulerChoice, addresses: Sequence[Address], interval_s: float, timeout_s: float, key: str = ""
    ) -> None:
        self._choice, self.addresses = choice, addresses
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._resolved: dict[Address, tuple[float, list[str]]] = {}  # time and result of the last look-up
        self._look_ups: dict[Address, asyncio.Future[list[str]]] = {}  # look-ups in progress, at most one per name
        self._logged: dict[str, str] = {}  # the last log line about each endpoint

    async def run(self) -> None:
        """Polls all schedulers repeatedly until cancelled."""
        loop, limits = asyncio.get_running_loop(), httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=self._timeout_s, trust_env=False, limits=limits) as client:
            while True:
                began_s = loop.time()
                await self.look(client)
                await asyncio.sleep(max(0.0, began_s + self._interval_s - loop.time()))

    async def look(self, client: httpx.AsyncClient) -> None:
        found = await asyncio.gather(*(self._endpoints(each) for each in self.addresses))
        endpoints = list(dict.fromkeys(each for some in found for each in some))[:MOST_ENDPOINTS]
        self._choice.set_addresses(endpoints)
        await asyncio.gather(*(self._look_at(client, each) for each in endpoints))
        for gone in self._logged.keys() - {*endpoints, *map(_written, self.addresses)}:
            log.info("%s is gone", gone)
            del self._logged[gone]

    async def _endpoints(self, address: Address) -> list[str]:
        """Returns the IP addresses of a name; the last known ones while it cannot be resolved.

        Begins a look-up, but waits for it only if no addresses are known and the last look-up did not fail. So names
        that cannot be resolved do not delay others.
        """
        name = _written(address)
        if is_ip(address[0]):
            found = _numbers(address)
        else:
            look_up = self._look_ups.get(address)
            if look_up is None:
                look_up = self._look_ups[address] = _look_up(address)
                if not self._last(address) and name not in self._logged:
                    await asyncio.wait((look_up,), timeout=self._timeout_s)
            if look_up.done():
                del self._look_ups[address]
                if found := look_up.result():
                    self._resolved[address] = asyncio.get_running_loop().time(), found
            found = self._last(address)
            if found:
                self._logged.pop(name, None)
        if not found:
            self._log_change(name, "cannot be resolved")
        return found

    def _last(self, address: Address) -> list[str]:
        then_s, found = self._resolved.get(address, (-math.inf, []))
        return found if asyncio.get_running_loop().time() - then_s <= KEPT_S else []

    async def _look_at(self, client: httpx.AsyncClient, endpoint: str) -> None:
        """Reports a scheduler's answer as soon as it arrives."""
        answer = await self._ask(client, endpoint)
        if answer is None:
            self._choice.report(endpoint, is_ready=False)
        else:
            self._choice.report(endpoint, is_ready=True, load=answer.load, num_seen=answer.num_seen)

    async def _ask(self, client: httpx.AsyncClient, endpoint: str) -> SchedulerState | None:
        """Returns None for a scheduler that takes no requests."""
        try:
            async with asyncio.timeout(self._timeout_s):
                status, _ = await self._get(client, f"http://{endpoint}/health")
                if status != 200:
                    self._log_change(endpoint, f"takes no requests ({status})")
                    return None
                num_seen = self._choice.num_sent(endpoint)
                status, content = await self._get(client, f"http://{endpoint}/load")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError):
            self._log_change(endpoint, "does not answer over plain HTTP")
            return None
        if status != 200:
            self._log_change(
                endpoint, f"/load answers {status}, so its load counts as the others' mean; is the key right?"
            )
            return SchedulerState(None, num_seen)
        try:
            load = msgspec.json.decode(content, type=dict[str, int])["server_load"]
        except (KeyError, ValueError, RecursionError):
            self._log_change(endpoint, "does not answer as a scheduler")
            return None
        self._log_change(endpoint, "")
        return SchedulerState(max(0, load), num_seen)

    async def _get(self, client: httpx.AsyncClient, url: str) -> tuple[int, bytes]:
        """Returns the status and content. Raises httpx.HTTPError."""
        content = bytearray()
        async with client.stream("GET", url, headers=self._headers) as answer:
            async for part in answer.aiter_raw():
                content += part
                if len(content) > MOST_ANSWER_NBYTES:
                    raise httpx.ReadError(f"more than {MOST_ANSWER_NBYTES} bytes")
        return answer.status_code, bytes(content)

    def _log_change(self, endpoint: str, what: str) -> None:
        """Logs a change of state once."""
        if self._logged.get(endpoint) != what:
            self._logged[endpoint] = what
            log.log(logging.WARNING if what else logging.INFO, "%s: %s", endpoint, what or "takes requests")


def _written(address: Address) -> str:
    host, port = address
    return f"{bracketed(host)}:{port}"


def _numbers(address: Address) -> list[str]:
    """Returns a numeric address in canonical form; [] if this host does not support it."""
    with contextlib.suppress(OSError):
        return _addresses(address, socket.AI_NUMERICHOST)
    return []


def _addresses(address: Address, flags: int = 0) -> list[str]:
    """Returns all addresses of a name or number, with the port. Leaves out scoped addresses, which the gateway cannot
    use.

    Raises OSError, UnicodeError.
    """
    host, port = address
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [f"{bracketed(str(info[4][0]))}:{port}" for info in infos if "%" not in str(info[4][0])]


def _look_up(address: Address) -> asyncio.Future[list[str]]:
    """Begins to resolve a name, on a thread that may block for as long as the name server does. Failure gives []."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[str]] = loop.create_future()

    def answer(found: list[str]) -> None:
        if not future.done():
            future.set_result(found)

    def resolve() -> None:
        found: list[str] = []
        with contextlib.suppress(OSError, UnicodeError):
            found = _addresses(address)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(answer, found)

    try:
        threading.Thread(target=resolve, name="resolve", daemon=True).start()
    except RuntimeError:  # the process is at its limit of threads
        answer([])
    return future
