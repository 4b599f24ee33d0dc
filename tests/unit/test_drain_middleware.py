"""A draining server finishes running requests, refuses new ones, and reports when none runs any more."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pd_cluster.api.middleware import drain_middleware as module
from pd_cluster.api.middleware.drain_middleware import Drain, DrainMiddleware


class Served:
    """An app behind the drain middleware; its requests run until `release`."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.release = asyncio.Event()
        self.num_ended_early = 0
        self.drain = Drain(timeout_s, self._end_running)
        self._gate = DrainMiddleware(self._app, self.drain)

    def _end_running(self) -> None:
        self.num_ended_early += 1
        self.release.set()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/v1/completions":
            await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def ask(
        self, path: str = "/v1/completions", body: tuple[bytes, ...] = (b"{}",), comes: bool = True
    ) -> tuple[int, Any, Any]:
        """Returns status, headers and body."""
        parts = [{"type": "http.request", "body": part, "more_body": True} for part in body]
        parts[-1]["more_body"] = False
        sent: list[Any] = []

        async def receive() -> Any:
            return parts.pop(0) if comes else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        await self._gate({"type": "http", "method": "POST", "path": path}, receive, send)
        assert not parts or not comes or sent[0]["status"] == 200, "a refused request's body must not be read"
        return sent[0]["status"], dict(sent[0]["headers"]), json.loads(sent[1]["body"])


async def test_what_runs_ends_and_what_comes_is_refused() -> None:
    served = Served()
    running = asyncio.ensure_future(served.ask())
    await asyncio.sleep(0)
    served.drain.begin()
    finishing = asyncio.ensure_future(served.drain.finish(asyncio.Event()))
    status, headers, body = await served.ask(body=(b"a", b"b", b"c"))
    assert (status, headers[b"retry-after"], headers[b"connection"]) == (503, b"1", b"close")
    assert body["error"]["type"] == "service_unavailable"
    assert (await served.ask("/health"))[0] == (await served.ask("/metrics"))[0] == 200
    assert not finishing.done()
    served.release.set()
    await finishing
    assert (await running)[0] == 200
    assert served.num_ended_early == 0
    served = Served()
    served.release.set()
    await served.ask()
    served.drain.begin()
    await served.drain.finish(asyncio.Event())
    assert served.num_ended_early == 0


@pytest.mark.parametrize("why", ["the time is over", "a second signal"])
async def test_what_runs_too_long_is_ended(why: str) -> None:
    served, hurry = Served(timeout_s=0.01 if why == "the time is over" else 60.0), asyncio.Event()
    running = asyncio.ensure_future(served.ask())
    await asyncio.sleep(0)
    served.drain.begin()
    finishing = asyncio.ensure_future(served.drain.finish(hurry))
    await asyncio.sleep(0)
    if why == "a second signal":
        hurry.set()
    await finishing
    assert served.num_ended_early == 1
    assert (await running)[0] == 200


async def test_what_does_not_come_or_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_WORDS_S", 0.01)
    stuck = Drain(0.01, lambda: None)
    stuck.started()
    stuck.begin()
    await stuck.finish(asyncio.Event())
    monkeypatch.setattr(module, "REFUSED_BODY_S", 0.01)
    served = Served()
    served.drain.begin()
    assert (await served.ask(comes=False))[0] == 503
