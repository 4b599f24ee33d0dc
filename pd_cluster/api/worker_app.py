"""A worker's HTTP server: liveness and identity. It answers even while the engine loads, computes or hangs."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pd_cluster.api.connections.http_server import make_server, serve_until_signal
from pd_cluster.api.middleware.error_responses import install_error_handlers
from pd_cluster.cluster.processes.worker_ranks import Ranks
from pd_cluster.engine.start.preloader import Preloader
from pd_cluster.errors import RequestError
from pd_cluster.settings.process_configs import WorkerConfig
from pd_cluster.settings.routing_settings import ConnectionLimits

MOST_WAIT_S = 0.5


class Registering(Protocol):
    """Keeps the worker registered with a scheduler."""

    async def run(self) -> None: ...
    async def leave(self) -> None: ...


def make_app(ranks: Ranks) -> Starlette:
    async def health(request: Request) -> Response:
        info = ranks.info
        ready = info.state == "ready"
        body = {"status": info.state, "name": info.name, "error": info.error or None}
        return JSONResponse(body, 200 if ready else 503)

    async def instance(request: Request) -> Response:
        """Returns the identity. If the state equals `unless`, first waits up to `for_s` seconds for it to change."""
        asked = request.query_params
        try:
            await ranks.no_more(asked.get("unless", ""), min(float(asked.get("for_s", 0)), MOST_WAIT_S))
        except ValueError:
            raise RequestError(f"for_s: {asked['for_s']!r} is not a number of seconds", param="for_s") from None
        return Response(msgspec.json.encode(ranks.info), media_type="application/json")

    app = Starlette(routes=[Route("/health", health), Route("/instance", instance)])
    install_error_handlers(app)
    return app


async def run_worker(
    config: WorkerConfig,
    listener: socket.socket,
    connections: ConnectionLimits,
    preloader: Preloader | None = None,
    join: Callable[[], Registering] | None = None,
) -> None:
    """Starts the rank processes, serves HTTP, and ends everything on a signal. `join`: for a worker in no rank table.

    Raises ConfigError or InstanceLost when a rank ends, and ConfigError when no scheduler admits it.
    """
    ranks = Ranks(config, preloader)
    registering = join() if join is not None else None
    try:
        server = make_server(make_app(ranks), connections)
        until = ranks.run() if registering is None else _first_to_end(ranks.run(), registering.run())
        await serve_until_signal([(server, listener)], until=until, signalled=ranks.drain)
        await _until_drained(ranks, config.timeouts.drain_timeout_s)
    finally:
        await ranks.stop()
        if registering is not None:
            await registering.leave()


async def _first_to_end(*running: Coroutine[Any, Any, None]) -> None:
    """Runs all coroutines until one ends, and raises its error."""
    tasks = [asyncio.ensure_future(each) for each in running]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_drained(ranks: Ranks, timeout_s: float) -> None:
    """Waits until running requests have ended, for `timeout_s` at most, or until a second signal."""
    if not ranks.has_work:
        return
    impatient = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, impatient.set)
    waiting = [asyncio.ensure_future(ranks.ended()), asyncio.ensure_future(impatient.wait())]
    await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
