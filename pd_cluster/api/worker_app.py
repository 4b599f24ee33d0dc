"""A worker's HTTP: liveness and identity. Answers while the engine loads, computes a long step or hangs."""

from __future__ import annotations

import asyncio
import signal
import socket

import msgspec
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from pd_cluster import __version__
from pd_cluster.api.http import install_error_handlers
from pd_cluster.api.server import make_server, serve_until_signal
from pd_cluster.cluster.ranks import Ranks
from pd_cluster.config import WorkerConfig


def make_app(ranks: Ranks) -> FastAPI:
    app = FastAPI(title="pd-cluster worker", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app)

    @app.get("/health")
    async def health() -> JSONResponse:
        info = ranks.info
        ready = info.state == "ready"
        body = {"status": info.state, "name": info.name, "error": info.error or None}
        return JSONResponse(body, 200 if ready else 503)

    @app.get("/instance")
    async def instance() -> Response:
        return Response(msgspec.json.encode(ranks.info), media_type="application/json")

    return app


async def run_worker(config: WorkerConfig, listener: socket.socket, cluster_tag: str) -> None:
    """Starts the rank processes, serves HTTP, ends all. Raises ConfigError or InstanceLost when a rank ends."""
    ranks = Ranks(config, cluster_tag)
    try:
        await ranks.start()
        server = make_server(make_app(ranks))
        await serve_until_signal([(server, listener)], until=ranks.watch(), signalled=ranks.drain)
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
