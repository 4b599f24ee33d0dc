"""A worker's HTTP: liveness and identity. Answers while the engine loads, computes a long step or hangs."""

from __future__ import annotations

import socket

import msgspec
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from pd_cluster import __version__
from pd_cluster.api.http import install_error_handlers
from pd_cluster.api.server import make_server, serve_until_signal
from pd_cluster.cluster.rank_process import RankProcess
from pd_cluster.config import WorkerConfig


def make_app(rank: RankProcess) -> FastAPI:
    app = FastAPI(title="pd-cluster worker", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app)

    @app.get("/health")
    async def health() -> JSONResponse:
        ready = rank.info.state == "ready"
        body = {"status": rank.info.state, "name": rank.info.name, "error": rank.info.error or None}
        return JSONResponse(body, 200 if ready else 503)

    @app.get("/instance")
    async def instance() -> Response:
        return Response(msgspec.json.encode(rank.info), media_type="application/json")

    return app


async def run_worker(config: WorkerConfig, listener: socket.socket, cluster_tag: str) -> None:
    """Starts the rank process, serves HTTP, ends both. Raises ConfigError or InstanceLost when the rank ends."""
    rank = RankProcess(config, cluster_tag)
    try:
        await rank.start()
        server = make_server(make_app(rank), drain_timeout_s=1)
        await serve_until_signal([(server, listener)], until=rank.watch())
    finally:
        await rank.stop()
