"""The app at the public port: the API's routes, the layers in front of them, and routes for operation."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from fastapi_offline import FastAPIOffline
from msgspec import Meta, Struct
from starlette.middleware import Middleware
from starlette.routing import Route

from pd_cluster import __version__
from pd_cluster.api.admin.metrics_routes import (
    THIS_PROCESS,
    AdapterNaming,
    Further,
    MetricSources,
    metrics_routes,
)
from pd_cluster.api.api_extension import ApiExtension
from pd_cluster.api.files.files_api import FILE_PATHS, FilesApi
from pd_cluster.api.middleware.access_log import AccessLog
from pd_cluster.api.middleware.api_key_auth import ApiKeys
from pd_cluster.api.middleware.cors import EXPOSED_HEADERS, Cors
from pd_cluster.api.middleware.direct_routes import Direct, PlainRoute, add_routes
from pd_cluster.api.middleware.drain_middleware import Drain, DrainMiddleware
from pd_cluster.api.middleware.error_responses import install_error_handlers
from pd_cluster.api.middleware.file_keys import FileKeys
from pd_cluster.api.middleware.http_bodies import LOOKING, json_of
from pd_cluster.api.middleware.request_id import RequestIds
from pd_cluster.api.middleware.request_reservation import ReservationMiddleware
from pd_cluster.api.middleware.root_path import RootPath
from pd_cluster.api.middleware.trace_middleware import Traces
from pd_cluster.api.openapi.operations import Operation
from pd_cluster.api.routes.api_routes import api_routes
from pd_cluster.api.routes.generate_routes import legacy_routes
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.placement.routing_policy import is_served, refused_links, why_unavailable
from pd_cluster.cluster.routing.request_admission import ASLEEP, RequestAdmission
from pd_cluster.cluster.tenancy.tenant_counts import with_names
from pd_cluster.process_messages import AllStats
from pd_cluster.service.answers.response_store import ResponseStore
from pd_cluster.service.text_service import TextService

log = logging.getLogger(__name__)

TITLE = "pd-cluster"


class Health(Struct, omit_defaults=True):
    status: Literal["ok", "degraded", "unavailable", "draining"]
    instances: Annotated[dict[str, str], Meta(description="The state of each prefill and decode instance.")]
    links: Annotated[list[str], Meta(description="Pairs of instances that cannot exchange KV cache, with the reason.")]
    reason: Annotated[str | None, Meta(description="The reason why requests cannot be served now.")] = None


class Alive(Struct):
    status: Literal["alive"]


class Version(Struct):
    version: str


def public_app(
    service: TextService,
    instances: list[Instance],
    drain: Drain,
    file_keys: FileKeys | None = None,
    extensions: Sequence[ApiExtension] = (),
    sources: MetricSources = THIS_PROCESS,
) -> FastAPI:
    """`file_keys`: required for a key file. `extensions`: add layers in front of the API."""
    http, openai = service.settings.http, service.settings.is_openai
    assert bool(http.key_file) == (file_keys is not None), "file_keys and the setting of a key file must agree"
    service.router.stats.tenants.named |= {*with_names((), http.tenants)}
    app = _app(service)
    keeps_files = openai and bool(http.files.folder)
    install_error_handlers(app, FILE_PATHS if keeps_files else ())
    layers = [layer for extension in extensions for layer in extension.public_layers(file_keys)]
    _put_in_front(app, service, drain, file_keys, layers)
    store = ResponseStore(http.responses) if openai and http.responses.folder else None
    for routes in api_routes(service, store) if openai else (legacy_routes(service),):
        add_routes(app, routes)
    app.state.background, app.state.num_batch_lines = [], lambda: 0
    further = _adapter_metrics(service)
    if keeps_files:
        files = FilesApi(service, lambda: drain.is_draining, file_keys)
        app.state.background.append(files.run)
        app.state.num_batch_lines = files.num_running
        further.append(files.metric)
        for routes in files.routes:
            add_routes(app, routes)
    add_routes(app, _common_routes(service.router.admission, instances, drain))
    name = service.names.own[0]
    add_routes(app, metrics_routes(service.router, instances, name, drain, sources, further))
    return app


@contextlib.asynccontextmanager
async def in_background(app: FastAPI) -> AsyncIterator[None]:
    """Runs the app's batches while the context is open."""
    running = [asyncio.ensure_future(run()) for run in app.state.background]
    for task in running:
        task.add_done_callback(_note_end)
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _note_end(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("work in the background has ended with an unexpected error", exc_info=error)


def _adapter_metrics(service: TextService) -> list[Further]:
    """Returns the metric of adapters in use, if there are any."""
    if not service.max_loras:
        return []
    adapters = AdapterNaming(service.names.adapters, service.max_loras)

    async def told(found: AllStats) -> bytes:
        return adapters.metric(service.router.adapters.use(), found.adapters)

    return [told]


def _common_routes(admission: RequestAdmission, instances: list[Instance], drain: Drain) -> APIRouter:
    routes = APIRouter(route_class=PlainRoute)

    probe = Operation("Whether requests can be served.", Health).says("Requests cannot be served.", "503")
    alive = Operation("Whether this process answers.", Alive)

    @routes.api_route("/ping", methods=[*LOOKING, "POST"], operation_id="ping", openapi_extra=probe)
    @routes.api_route("/health", methods=LOOKING, openapi_extra=probe)
    async def health(request: Request) -> Response:
        health = health_of(instances, admission.awaits_pair)
        if admission.is_asleep and health.reason is None:  # this process's view of the instances may lag
            health.status, health.reason = "unavailable", ASLEEP
        if drain.is_draining:
            health.status, health.reason = "draining", "this server is stopping"
        return json_of(health) if health.reason is None else json_of(health, 503, {"Retry-After": "1"})

    @routes.api_route("/live", methods=LOOKING, openapi_extra=alive)
    async def live(request: Request) -> Response:
        return json_of(Alive("alive"))

    @routes.api_route("/version", methods=LOOKING, openapi_extra=Operation("The server's version.", Version))
    async def version(request: Request) -> Response:
        return json_of(Version(__version__))

    return routes


def _app(service: TextService) -> FastAPI:
    """Makes the app. /openapi.json is built on first request; /docs shows it, without content from other hosts."""
    http = service.settings.http
    if not http.has_docs:
        return FastAPI(title=TITLE, openapi_url=None)
    shown = {"validatorUrl": None}  # the default validator is an external service
    app = FastAPIOffline(docs_url="/docs", redoc_url=None, title=TITLE, swagger_ui_parameters=shown)
    model = service.names.own[0] if service.settings.is_openai else ""

    def described() -> dict[str, Any]:
        from pd_cluster.api.openapi.openapi_document import document  # imported only when needed

        return document(TITLE, app.routes, model, http.has_keys)

    app.openapi = functools.cache(described)  # type: ignore[method-assign]
    at = next(at for at, route in enumerate(app.router.routes) if getattr(route, "path", "") == app.openapi_url)
    answer: Callable[[Request], Awaitable[Response]] = app.router.routes[at].endpoint  # type: ignore[attr-defined]

    async def built(request: Request) -> Response:
        await asyncio.to_thread(app.openapi)  # up to half a second, the first time
        return await answer(request)

    app.router.routes[at] = Route("/openapi.json", built, include_in_schema=False)
    return app


def _put_in_front(
    app: FastAPI, service: TextService, drain: Drain, file_keys: FileKeys | None, layers: Sequence[Middleware]
) -> None:
    """Adds the layers, innermost first; the last one added sees a request first."""
    http = service.settings.http
    app.add_middleware(Direct, routes=app.router.routes, root_path=http.root_path)
    app.add_middleware(ReservationMiddleware, admission=service.router.admission)
    app.add_middleware(DrainMiddleware, drain=drain, root_path=http.root_path)
    if service.tracing is not None:  # behind the key check, so that only valid callers cause traces
        app.add_middleware(Traces, tracing=service.tracing, root_path=http.root_path)
    if http.has_keys or http.metrics_key:
        app.add_middleware(ApiKeys, http=http, counts=service.router.stats.tenants, file_keys=file_keys)
    if http.returns_request_ids:
        app.add_middleware(RequestIds)
    if http.allowed_origins:  # before the key check: preflights have no key, and pages can read a 401 only with CORS
        app.add_middleware(
            Cors,
            allow_origins=http.allowed_origins,
            allow_methods=http.allowed_methods,
            allow_headers=http.allowed_headers,
            allow_credentials=http.allow_credentials,
            expose_headers=EXPOSED_HEADERS,
        )
    for layer in layers:
        app.add_middleware(layer.cls, *layer.args, **layer.kwargs)
    if http.log.logs_access:
        app.add_middleware(AccessLog, quiet_paths=[http.root_path + path for path in http.log.quiet_paths])
    if http.root_path:
        app.add_middleware(RootPath, root_path=http.root_path)


def health_of(instances: list[Instance], awaits_pair: bool) -> Health:
    """Returns the health, with a reason if no request can be served; `degraded` if an instance or link is missing."""
    shown = {i.name: i.shown_state if not i.reason else f"{i.state}: {i.reason}" for i in instances}
    health = Health("ok", shown, refused_links(instances))
    if awaits_pair or not is_served(instances):
        health.status, health.reason = "unavailable", why_unavailable(instances)
    elif health.links or not all(instance.takes_requests for instance in instances):
        health.status = "degraded"
    return health
