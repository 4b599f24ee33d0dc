"""Asks the schedulers whether they take requests, and how many they have. Knows nothing of gRPC."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence

import httpx
import msgspec

from pd_cluster.gateway.choice import MOST_ENDPOINTS, Choice
from ranktable_tools.hosts import bracketed

log = logging.getLogger(__name__)

MOST_ANSWER_NBYTES = 1 << 20
KEPT_S = 10.0  # that a name's last addresses count while its name server does not answer
Address = tuple[str, int]


class SchedulerWatch:
    """`addresses`: names or numbers; a name stands for all its addresses at the time. `key`: opens `/load`."""

    def __init__(
        self, choice: Choice, addresses: Sequence[Address], interval_s: float, timeout_s: float, key: str = ""
    ) -> None:
        self._choice, self._addresses = choice, addresses
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._resolved: dict[Address, tuple[float, list[str]]] = {}  # when, and what it was
        self._told: dict[str, str] = {}  # what was last logged about an endpoint

    async def run(self) -> None:
        """Looks at all of them again and again until cancelled."""
        loop, limits = asyncio.get_running_loop(), httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=self._timeout_s, trust_env=False, limits=limits) as client:
            while True:
                began_s = loop.time()
                await self.look(client)
                await asyncio.sleep(max(0.0, began_s + self._interval_s - loop.time()))

    async def look(self, client: httpx.AsyncClient) -> None:
        found = await asyncio.gather(*(self._endpoints(each) for each in self._addresses))
        endpoints = list(dict.fromkeys(each for some in found for each in some))[:MOST_ENDPOINTS]
        loads = await asyncio.gather(*(self._load(client, each) for each in endpoints))
        self._choice.report(dict(zip(endpoints, loads, strict=True)))
        for gone in self._told.keys() - {*endpoints}:
            log.info("%s is gone", gone)
            del self._told[gone]

    async def _endpoints(self, address: Address) -> list[str]:
        """Returns the numbers of a name, the last ones while it cannot be resolved."""
        host, port = address
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found = [f"{bracketed(str(info[4][0]))}:{port}" for info in infos]
            self._resolved[address] = loop.time(), found
        except (OSError, TimeoutError):
            then_s, found = self._resolved.get(address, (0.0, []))
            if loop.time() - then_s > KEPT_S:
                return []
        return found

    async def _load(self, client: httpx.AsyncClient, endpoint: str) -> int | None:
        """Returns the requests in flight there; None if it takes none."""
        try:
            async with asyncio.timeout(self._timeout_s):
                status, _ = await self._get(client, f"http://{endpoint}/health")
                if status != 200:
                    self._tell(endpoint, f"it takes no requests ({status})")
                    return None
                status, content = await self._get(client, f"http://{endpoint}/load")
        except (httpx.HTTPError, TimeoutError):
            self._tell(endpoint, "it does not answer")
            return None
        load = 0
        if status == 200:
            try:
                load = msgspec.json.decode(content, type=dict[str, int])["server_load"]
            except (KeyError, ValueError, RecursionError):
                self._tell(endpoint, "it does not answer as a scheduler")
                return None
        self._tell(
            endpoint, "" if status == 200 else f"/load answers {status}, so requests take turns; is the key right?"
        )
        return max(0, load)

    async def _get(self, client: httpx.AsyncClient, url: str) -> tuple[int, bytes]:
        """Returns status and content. Raises httpx.HTTPError."""
        content = bytearray()
        async with client.stream("GET", url, headers=self._headers) as answer:
            async for part in answer.aiter_raw():
                content += part
                if len(content) > MOST_ANSWER_NBYTES:
                    raise httpx.ReadError(f"more than {MOST_ANSWER_NBYTES} bytes")
        return answer.status_code, bytes(content)

    def _tell(self, endpoint: str, what: str) -> None:
        """Logs a change of state once."""
        if self._told.get(endpoint) != what:
            self._told[endpoint] = what
            log.log(logging.WARNING if what else logging.INFO, "%s: %s", endpoint, what or "it takes requests")
