"""The app at the public port: the API's routes, /metrics, /load and /health."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from pd_cluster import __version__
from pd_cluster.api.drain import Drain, DrainGate
from pd_cluster.api.http import install_error_handlers
from pd_cluster.api.legacy import legacy_routes
from pd_cluster.api.metrics import Totals, metrics_routes
from pd_cluster.api.openai import openai_routes
from pd_cluster.api.service import TextService
from pd_cluster.cluster.instance import Instance
from pd_cluster.cluster.policy import check_served, refused_links, why_unavailable
from pd_cluster.errors import Unavailable


def public_app(
    service: TextService, instances: list[Instance], openai: bool, drain: Drain, totals: Totals | None = None
) -> FastAPI:
    """`totals`: of all API processes, where there are several."""
    app = FastAPI(title="pd-cluster", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(DrainGate, drain=drain)
    install_error_handlers(app)
    app.include_router(openai_routes(service) if openai else legacy_routes(service))
    app.include_router(metrics_routes(service.router, instances, service.served_model_names[0], drain, totals))

    @app.get("/health")
    async def health() -> JSONResponse:
        status, body = health_of(instances)
        if drain.is_draining:
            status, body = 503, {**body, "status": "draining", "reason": "this server is stopping"}
        return JSONResponse(body, status, {} if status == 200 else {"Retry-After": "1"})

    return app


def health_of(instances: list[Instance]) -> tuple[int, dict[str, Any]]:
    """200 when a request can be served, with `degraded` when not everybody is there; 503 otherwise."""
    body: dict[str, Any] = {
        "status": "ok",
        "instances": {i.name: i.shown_state if not i.reason else f"{i.state}: {i.reason}" for i in instances},
        "links": refused_links(instances),
    }
    try:
        check_served(instances)
    except Unavailable:
        return 503, {**body, "status": "unavailable", "reason": why_unavailable(instances)}
    if body["links"] or not all(instance.takes_requests for instance in instances):
        body["status"] = "degraded"
    return 200, body
