"""The scheduler instance put together: mailbox, membership, router, text, HTTP. Never imports torch."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from pd_cluster import __version__, wire
from pd_cluster.api.drain import Drain, DrainGate
from pd_cluster.api.http import install_error_handlers
from pd_cluster.api.legacy import legacy_routes
from pd_cluster.api.metrics import METRICS_MEDIA_TYPE, metrics_of
from pd_cluster.api.openai import openai_routes
from pd_cluster.api.server import make_server, serve_until_signal
from pd_cluster.api.service import TextService
from pd_cluster.api.timelines import timeline_routes
from pd_cluster.checkpoint import Checkpoint
from pd_cluster.cluster.instance import Instance
from pd_cluster.cluster.membership import Membership, instances_of
from pd_cluster.cluster.place import Place
from pd_cluster.cluster.policy import least_loaded, refused_links, why_unavailable
from pd_cluster.cluster.router import ReplayLimits, Router
from pd_cluster.cluster.timeline import Timelines
from pd_cluster.config import EngineConfig, Timeouts
from pd_cluster.errors import Unavailable
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
    listener: socket.socket,
    admin_listener: socket.socket,
    max_logprobs: int,
    max_attempts: int,
) -> None:
    """Serves until a signal. Raises ConfigError: a model that cannot be served, ports in the wrong order."""
    checkpoint = Checkpoint.open(engine.model)
    handler = _Handler(asyncio.get_running_loop())
    mailbox = Mailbox("scheduler", secrets.randbits(62), "scheduler", place.secret, timeouts, handler)
    together_s = timeouts.dead_after_s + timeouts.heartbeat_interval_s  # the latest that a death is seen
    replay = ReplayLimits(max_attempts, timeouts.replay_wait_s, together_s)
    router = Router(mailbox, least_loaded, timeouts.request_timeout_s, replay)
    instances = instances_of(place, ports)
    membership = Membership(place, instances, mailbox, timeouts, checkpoint.identity, router.on_lost)
    router.membership = handler.membership = membership
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
    )
    mailbox.start()
    try:
        drain = Drain(timeouts.drain_timeout_s, router.end_all)
        servers = [
            (make_server(public_app(service, instances, openai, drain)), listener),
            (make_server(admin_app(instances, router.timelines)), admin_listener),
        ]
        failure = _first_failure(membership.run(), handler.fatal)
        await serve_until_signal(servers, failure, drain.begin, drain)
    finally:
        await service.guides.close()
        mailbox.close()


async def _first_failure(running: Any, fatal: asyncio.Future[None]) -> None:
    """Ends with the first exception of the two; a lone error out of a task group comes as itself."""
    task = asyncio.ensure_future(running)
    try:
        await asyncio.wait({task, fatal}, return_when=asyncio.FIRST_COMPLETED)
        (fatal if fatal.done() else task).result()
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def public_app(service: TextService, instances: list[Instance], openai: bool, drain: Drain) -> FastAPI:
    app = FastAPI(title="pd-cluster", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(DrainGate, drain=drain)
    install_error_handlers(app)
    app.include_router(openai_routes(service) if openai else legacy_routes(service))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(metrics_of(instances, service.served_model_names[0]), media_type=METRICS_MEDIA_TYPE)

    @app.get("/health")
    async def health() -> JSONResponse:
        status, body = health_of(instances)
        if drain.is_draining:
            status, body = 503, {**body, "status": "draining", "reason": "this server is stopping"}
        return JSONResponse(body, status, {} if status == 200 else {"Retry-After": "1"})

    return app


def admin_app(instances: list[Instance], timelines: Timelines) -> FastAPI:
    app = FastAPI(title="pd-cluster admin", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app)
    app.include_router(timeline_routes(timelines))

    @app.get("/instances")
    async def list_instances() -> dict[str, Any]:
        return {"instances": [describe(instance) for instance in instances]}

    return app


def health_of(instances: list[Instance]) -> tuple[int, dict[str, Any]]:
    """200 when a request can be served, with `degraded` when not everybody is there; 503 otherwise."""
    body: dict[str, Any] = {
        "status": "ok",
        "instances": {i.name: i.shown_state if not i.reason else f"{i.state}: {i.reason}" for i in instances},
        "links": refused_links(instances),
    }
    try:
        least_loaded(instances)
    except Unavailable:
        return 503, {**body, "status": "unavailable", "reason": why_unavailable(instances)}
    if body["links"] or not all(instance.takes_requests for instance in instances):
        body["status"] = "degraded"
    return 200, body


def describe(instance: Instance) -> dict[str, Any]:
    """One entry of `/instances`."""
    info, load = instance.info, instance.load
    return {
        "instance_id": instance.name,
        "role": instance.role,
        "state": instance.shown_state,
        "reason": instance.reason or None,
        "pid": info.pid if info is not None else None,
        "host": instance.host,
        "port": instance.port,
        "epoch": f"{instance.epoch:x}",
        "device_ids": instance.device_ids,
        "num_outstanding": instance.num_outstanding,
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "num_landing": load.num_landing,
        "num_exporting": load.num_exporting,
        "num_blocks": load.num_blocks,
        "num_free_blocks": load.num_free_blocks,
        "num_cached_blocks": load.num_cached_blocks,
        "num_held_blocks": load.num_held_blocks,
        "num_preemptions": load.num_preemptions,
        "num_swap_blocks": load.num_swap_blocks,
        "num_free_swap_blocks": load.num_free_swap_blocks,
        "num_prefix_query_tokens": load.num_prefix_query_tokens,
        "num_prefix_hit_tokens": load.num_prefix_hit_tokens,
        "num_steps": load.num_steps,
        "num_heartbeats": instance.num_heartbeats,
        "kv_sent_nbytes": load.kv_sent_nbytes,
        "kv_received_nbytes": load.kv_received_nbytes,
        "num_dropped_kv_frames": load.num_dropped_kv_frames,
        "links": load.links,
    }
