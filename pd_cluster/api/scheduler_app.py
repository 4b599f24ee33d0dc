"""The scheduler instance put together: mailbox, membership, router, text, HTTP. Never imports torch."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from pd_cluster import __version__, wire
from pd_cluster.api.admin_app import AdminAccess, admin_app
from pd_cluster.api.http import install_error_handlers
from pd_cluster.api.legacy import legacy_routes
from pd_cluster.api.metrics import METRICS_MEDIA_TYPE, metrics_of
from pd_cluster.api.openai import openai_routes
from pd_cluster.api.server import make_server, serve_until_signal
from pd_cluster.api.service import TextService
from pd_cluster.checkpoint import Checkpoint
from pd_cluster.cluster.auto_role import AutoRole
from pd_cluster.cluster.elastic import Elastic, Tables
from pd_cluster.cluster.instance import Instance
from pd_cluster.cluster.membership import Membership, instances_of
from pd_cluster.cluster.place import Place
from pd_cluster.cluster.policy import POLICIES, check_served, refused_links, why_unavailable
from pd_cluster.cluster.predict import Goals
from pd_cluster.cluster.router import Router
from pd_cluster.config import EngineConfig, RoutingConfig, Timeouts
from pd_cluster.errors import Refused, Unavailable
from pd_cluster.mailbox import Mailbox

log = logging.getLogger(__name__)


class _Handler:
    """Carries the mailbox's events from its thread to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.membership: Membership
        self.router: Router
        self.fatal: asyncio.Future[None] = loop.create_future()

    def on_opened(self, conn: str, peer: str, kind: str) -> None:
        self._call(self.membership.on_opened, conn)

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None:
        if isinstance(body, wire.Outputs):
            self.router.timelines.heard(conn, body.now_s)  # here, before it waits for its turn on the loop
            self._call(self.router.on_outputs, conn, body)
        elif isinstance(body, wire.Heartbeat) and body.load is not None:
            self._call(self.membership.on_heartbeat, conn, body.load)
        elif isinstance(body, wire.CacheKeys):
            self._call(self.membership.on_cache_keys, conn, body)

    def on_closed(self, conn: str, peer: str, reason: str) -> None:
        self._call(self.membership.on_closed, conn, reason)
        self._call(self.router.timelines.gone, conn)

    def on_fatal(self, error: BaseException) -> None:
        self._call(self.fatal.set_exception, error)

    def load(self) -> wire.Load | None:
        return None

    def _call(self, function: Callable[..., object], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)


async def run_scheduler(
    place: Place,
    ports: list[int],
    engine: EngineConfig,
    served_model_names: list[str],
    openai: bool,
    timeouts: Timeouts,
    routing: RoutingConfig,
    listener: socket.socket,
    admin_listener: socket.socket,
    max_logprobs: int,
    access: AdminAccess,
    tables: Tables,
    auto_role: AutoRole | None,
) -> None:
    """Serves until a signal. Raises ConfigError: a model that cannot be served, ports in the wrong order."""
    checkpoint = Checkpoint.open(engine.model)
    handler = _Handler(asyncio.get_running_loop())
    mailbox = Mailbox("scheduler", secrets.randbits(62), "scheduler", place.secret, timeouts, handler)
    goals = Goals(routing.slo_ttft_s, routing.slo_tpot_s)
    router = Router(mailbox, POLICIES[routing.policy], timeouts.request_timeout_s, goals)
    instances = instances_of(place, ports)
    membership = Membership(place, instances, mailbox, timeouts, checkpoint.identity, router.on_lost)
    router.membership = handler.membership = membership
    elastic = Elastic(membership, tables, router.move_on, timeouts.drain_timeout_s)
    handler.router = router
    limit = checkpoint.max_model_len(engine.max_model_len)
    service = TextService(
        router,
        checkpoint,
        engine.model,
        served_model_names,
        limit,
        engine.seed,
        max_logprobs,
        engine.max_num_seqs,
        timeouts.guided_timeout_s,
        routing.has_priorities,
    )
    mailbox.start()
    try:
        drain_s = timeouts.drain_timeout_s
        servers = [
            (make_server(public_app(service, instances, openai), drain_s), listener),
            (make_server(admin_app(elastic, router.timelines, access), 1), admin_listener),
        ]
        failure = _first_failure(_run(membership, elastic, auto_role), handler.fatal)
        await serve_until_signal(servers, failure, router.end_all, drain_s)
    finally:
        await service.guides.close()
        mailbox.close()


async def _run(membership: Membership, elastic: Elastic, auto_role: AutoRole | None) -> None:
    """Until cancelled, or one of them raises. SIGHUP reads the tables again."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        loop.add_signal_handler(signal.SIGHUP, lambda: group.create_task(_reload(elastic)))
        group.create_task(membership.run())
        group.create_task(elastic.run())
        if auto_role is not None:
            group.create_task(_change_roles(elastic, auto_role))
        try:
            await asyncio.Event().wait()
        finally:
            loop.add_signal_handler(signal.SIGHUP, lambda: None)  # this process ends; there is nothing to read for


async def _reload(elastic: Elastic) -> None:
    try:
        log.info("SIGHUP: the rank table was read again; %s", await elastic.reload())
    except Refused as error:
        log.error("SIGHUP: %s", error)


async def _change_roles(elastic: Elastic, auto_role: AutoRole) -> None:
    while True:
        await asyncio.sleep(auto_role.rules.period_s)
        flip = auto_role.observe(time.monotonic(), elastic.instances)
        if flip is not None:
            log.warning("--auto-role: %s becomes %s: %s", flip.name, flip.role, flip.why)
            elastic.change_role(flip.name, flip.role)


async def _first_failure(running: Any, fatal: asyncio.Future[None]) -> None:
    """Ends with the first exception of the two; a lone error out of a task group comes as itself."""
    task = asyncio.ensure_future(running)
    try:
        await asyncio.wait({task, fatal}, return_when=asyncio.FIRST_COMPLETED)
        (fatal if fatal.done() else task).result()
    except ExceptionGroup as group:
        first: Exception = group
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def public_app(service: TextService, instances: list[Instance], openai: bool) -> FastAPI:
    app = FastAPI(title="pd-cluster", version=__version__, docs_url=None, redoc_url=None)
    install_error_handlers(app)
    app.include_router(openai_routes(service) if openai else legacy_routes(service))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(metrics_of(instances, service.served_model_names[0]), media_type=METRICS_MEDIA_TYPE)

    @app.get("/health")
    async def health() -> JSONResponse:
        status, body = health_of(instances)
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
