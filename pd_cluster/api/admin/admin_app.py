"""The scheduler's admin port: the instances, and commands that change the cluster.

cluster/members/elastic_membership.py executes a command; this module parses it, allows or refuses it, and answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from pd_cluster import __version__
from pd_cluster.api.admin.log_routes import log_routes
from pd_cluster.api.admin.overview_routes import overview_routes
from pd_cluster.api.admin.timeline_routes import TimelineSource, timeline_routes
from pd_cluster.api.api_extension import ApiExtension
from pd_cluster.api.middleware.admin_access import AdminAccess
from pd_cluster.api.middleware.error_responses import install_error_handlers
from pd_cluster.api.middleware.http_bodies import guarded_by, read_as, read_body
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.members.adapter_registry import AdapterBook
from pd_cluster.cluster.members.elastic_membership import ElasticMembership
from pd_cluster.cluster.overview.cluster_overview import Overview
from pd_cluster.cluster.overview.kv_tier_use import tiers_of
from pd_cluster.errors import RequestError
from pd_cluster.types import Role

MOST_TIMEOUT_S = 86_400.0


class Add(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    port: int


class DrainOptions(msgspec.Struct, forbid_unknown_fields=True):
    force: bool = False
    timeout_s: float | None = None


class ChangeRole(DrainOptions, forbid_unknown_fields=True):
    role: str = ""


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


class AdapterLoad(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's body. `load_inplace`: replaces an adapter of the same name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class AdapterUnload(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's body. `lora_int_id` has no effect, as in vLLM."""

    lora_name: str
    lora_int_id: int | None = None


class NamedAdapter(msgspec.Struct, forbid_unknown_fields=True):
    """SageMaker's body. `src`: the adapter's folder. `preload`, `pin`: no effect; adapters always load and stay."""

    name: str
    src: str
    load_inplace: bool = False
    preload: Literal[True] = True
    pin: bool = False


Body = TypeVar("Body", Add, DrainOptions, ChangeRole, Nothing, AdapterLoad, AdapterUnload, NamedAdapter)


@dataclass(frozen=True, slots=True)
class ShownCluster:
    """The contents of /overview. `logs`: the folder of the processes' logs. `model`: the model's name.

    `extensions`: the extras that add routes. `scheduler`: this scheduler's name.
    """

    overview: Overview
    model: str
    logs: Path
    extensions: Sequence[ApiExtension] = ()
    scheduler: str = "scheduler"


def admin_app(
    elastic: ElasticMembership,
    timelines: TimelineSource,
    access: AdminAccess,
    adapters: AdapterBook | None = None,
    control: APIRouter | None = None,
    shown: ShownCluster | None = None,
) -> FastAPI:
    """Makes the app. `adapters` None: there are no routes to change adapters at run time.

    `control`: the routes of control_routes.py. `shown` None: no /overview and no extensions.
    """
    app = FastAPI(title="pd-cluster admin", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app)
    guarded = [guarded_by(access.check)]
    seen = [timeline_routes(timelines), instance_routes(elastic)]
    if shown is not None:
        logs = log_routes(shown.logs, lambda: [each.name for each in elastic.instances], shown.scheduler)
        seen.append(
            overview_routes(shown.overview, lambda: [describe(each) for each in elastic.instances], shown.model)
        )
        app.include_router(logs, dependencies=[guarded_by(access.check_token)])
        for extension in shown.extensions:
            app.include_router(extension.admin_routes((*seen, logs)))
    for routes in seen:
        app.include_router(routes, dependencies=guarded)
    if adapters is not None:
        app.include_router(adapter_routes(adapters), dependencies=guarded)
    if control is not None:
        app.include_router(control, dependencies=guarded)
    return app


def instance_routes(elastic: ElasticMembership) -> APIRouter:
    """Makes routes that answer with the instance's state right after the command; GET /instances shows later states."""
    routes = APIRouter()

    async def done(instance: Instance) -> dict[str, Any]:
        """Returns the answer to a command: the instance's entry, and the names of all affected instances."""
        names = [each.name for each in elastic.unit_of(instance)]
        return {**describe(await elastic.done(instance)), "instance_ids": names}

    @routes.get("/instances")
    async def list_instances() -> dict[str, Any]:
        return {"instances": [describe(instance) for instance in elastic.instances]}

    @routes.post("/instances")
    async def add(request: Request) -> dict[str, Any]:
        body = await _read(request, Add)
        if not 1 <= body.port <= 65535:
            raise RequestError(f"port: {body.port}; give a port from 1 to 65535", param="port")
        added = await elastic.done(await elastic.add(body.name, body.port))
        return {**describe(added), "instance_ids": [added.name]}

    @routes.post("/instances/{name}/drain")
    async def drain(name: str, request: Request) -> dict[str, Any]:
        body = await _read(request, DrainOptions)
        return await done(elastic.drain(name, body.force, _timeout_s(body)))

    @routes.post("/instances/{name}/undrain")
    async def undrain(name: str, request: Request) -> dict[str, Any]:
        await _read(request, Nothing)
        return await done(elastic.undrain(name))

    @routes.post("/instances/{name}/remove")
    async def remove(name: str, request: Request) -> dict[str, Any]:
        body = await _read(request, DrainOptions)
        return await done(elastic.remove(name, body.force, _timeout_s(body)))

    @routes.post("/instances/{name}/role")
    async def change_role(name: str, request: Request) -> dict[str, Any]:
        body = await _read(request, ChangeRole)
        return await done(elastic.change_role(name, _role(body.role), body.force, _timeout_s(body)))

    return routes


def adapter_routes(book: AdapterBook) -> APIRouter:
    """Makes vLLM's routes to load and unload adapters, which answer with a line of text when they have finished."""
    routes = APIRouter()

    @routes.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        body = await _read(request, AdapterLoad)
        await book.load(body.lora_name, body.lora_path, body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        body = await _read(request, AdapterUnload)
        await book.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @routes.post("/adapters")
    async def load_named(request: Request) -> Response:
        body = await _read(request, NamedAdapter)
        await book.load(body.name, body.src, body.load_inplace)
        return PlainTextResponse(f"Adapter {body.name} registered")

    @routes.delete("/adapters/{name:path}")  # names may contain slashes
    async def unload_named(name: str) -> Response:
        await book.unload(name)
        return PlainTextResponse(f"Adapter {name} unregistered")

    return routes


async def _read(request: Request, kind: type[Body]) -> Body:
    """Parses a body; an empty one is an empty object. Raises RequestError."""
    return read_as(await read_body(request) or b"{}", kind)


def _role(text: str) -> Role:
    match text:
        case "prefill" | "decode":
            return text
    raise RequestError(f"role: {text[:100]!r}; give prefill or decode", param="role")


def _timeout_s(body: DrainOptions) -> float | None:
    if body.timeout_s is not None and not 0 <= body.timeout_s <= MOST_TIMEOUT_S:
        raise RequestError(f"timeout_s: {body.timeout_s:g}; give 0 to {MOST_TIMEOUT_S:g} seconds", param="timeout_s")
    return body.timeout_s


def describe(instance: Instance) -> dict[str, Any]:
    """Returns one entry of `/instances`."""
    info, load = instance.info, instance.load
    return {
        "instance_id": instance.name,
        "role": instance.role,
        "next_role": instance.next_role,
        "service": instance.service,
        "drain_timeout_s": instance.drain_timeout_s,
        "state": instance.shown_state,
        "reason": instance.reason or None,
        "sleep_level": load.sleep_level,
        "pid": info.pid if info is not None else None,
        "rank_pids": info.rank_pids if info is not None else [],
        "host": instance.host,
        "port": instance.port,
        "epoch": f"{instance.epoch:x}",
        "device_ids": instance.device_ids,
        "unit": instance.unit or None,
        "unit_rank": instance.unit_rank,
        "unit_size": instance.unit_size,
        "num_outstanding": instance.num_outstanding,
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "num_landing": load.num_landing,
        "num_exporting": load.num_exporting,
        "num_blocks": load.num_blocks,
        "num_free_blocks": load.num_free_blocks,
        "num_cached_blocks": load.num_cached_blocks,
        "num_held_blocks": load.num_held_blocks,
        "groups": [{**msgspec.structs.asdict(each), "num_blocks": each.num_blocks} for each in load.groups],
        "num_preemptions": load.num_preemptions,
        "num_swap_blocks": load.num_swap_blocks,
        "num_free_swap_blocks": load.num_free_swap_blocks,
        "tiers": tiers_of(load),
        "num_prefix_query_tokens": load.num_prefix_query_tokens,
        "num_prefix_hit_tokens": load.num_prefix_hit_tokens,
        "num_pulled_tokens": load.num_pulled_tokens,
        "num_failed_pulls": load.num_failed_pulls,
        "num_encoded_images": load.num_encoded_images,
        "num_landed_images": load.num_landed_images,
        "num_encoder_fallbacks": load.num_encoder_fallbacks,
        "feature_nbytes": load.feature_nbytes,
        "num_steps": load.num_steps,
        "num_rounds": load.num_rounds,
        "num_idle_rounds": load.num_idle_rounds,
        "exchange_s": load.exchange_s,
        "decode_step_s": load.decode_step_s,
        "tokens_per_step": load.tokens_per_step,
        "num_draft_tokens": load.drafts.num_tokens,
        "num_accepted_tokens": load.drafts.num_accepted,
        "num_heartbeats": instance.num_heartbeats,
        "kv_sent_nbytes": load.kv_sent_nbytes,
        "kv_received_nbytes": load.kv_received_nbytes,
        "num_dropped_kv_frames": load.num_dropped_kv_frames,
        "num_quarantined_blocks": load.num_quarantined_blocks,
        "links": {peer: str(state) for peer, state in load.links.items()},
    }
