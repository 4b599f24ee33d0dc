"""A worker's HTTP: liveness and identity. Answers while the engine loads, computes a long step or hangs."""

from __future__ import annotations

import asyncio
import signal
import socket

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pd_cluster.api.error_answers import install_error_handlers
from pd_cluster.api.server import make_server, serve_until_signal
from pd_cluster.cluster.ranks import Ranks
from pd_cluster.config import ConnectionLimits, WorkerConfig
from pd_cluster.engine.preloader import Preloader
from pd_cluster.errors import RequestError

MOST_WAIT_S = 0.5


def make_app(ranks: Ranks) -> Starlette:
    async def health(request: Request) -> Response:
        info = ranks.info
        ready = info.state == "ready"
        body = {"status": info.state, "name": info.name, "error": info.error or None}
        return JSONResponse(body, 200 if ready else 503)

    async def instance(request: Request) -> Response:
        """While the state is `unless` the answer waits, up to `for_s` seconds."""
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
) -> None:
    """Starts the rank processes, serves HTTP, ends all. Raises ConfigError or InstanceLost when a rank ends."""
    ranks = Ranks(config, preloader)
    try:
        server = make_server(make_app(ranks), connections)
        await serve_until_signal([(server, listener)], until=ranks.run(), signalled=ranks.drain)
        await _until_drained(ranks, config.timeouts.drain_timeout_s)
    finally:
        await ranks.stop()


async def _until_drained(ranks: Ranks, timeout_s: float) -> None:
    """Until what ran has ended, the time is over, or a second signal."""
    impatient = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, impatient.set)
    waiting = [asyncio.ensure_future(ranks.ended()), asyncio.ensure_future(impatient.wait())]
    await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
