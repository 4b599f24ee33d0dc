"""Admin routes that replace the served weights, with vLLM's names and bodies.

cluster/weights/weight_updates.py executes a command; this module parses it and answers. Only with --weights-dir.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from pd_cluster.api.middleware.http_bodies import read_as, read_body
from pd_cluster.cluster.weights.update_bodies import (
    FinishWeightUpdate,
    InitTransfer,
    RenameWeights,
    StartWeightUpdate,
    UpdateWeights,
)
from pd_cluster.cluster.weights.weight_updates import DEFAULT_NAME, WeightUpdates


def weight_routes(updates: WeightUpdates) -> APIRouter:
    routes = APIRouter()
    _add_transfer(routes, updates)

    @routes.post("/start_weight_update")
    async def start_weight_update(http: Request) -> dict[str, Any]:
        body = read_as(await read_body(http) or b"{}", StartWeightUpdate)
        await updates.start(body.mode)
        return {"message": "Weight update started"}

    @routes.post("/update_weights")
    async def update_weights(http: Request) -> dict[str, Any]:
        body = read_as(await read_body(http) or b"{}", UpdateWeights)
        await updates.take(body.update_info.folder, body.update_info.tensors())
        return {"message": "Weights updated"}

    @routes.post("/finish_weight_update")
    async def finish_weight_update(http: Request) -> dict[str, Any]:
        body = read_as(await read_body(http) or b"{}", FinishWeightUpdate)
        version = await updates.finish(body.weight_version or "")
        return {"message": "Weight update finished", "weight_version": version.name, "epoch": version.epoch}

    @routes.post("/abort_weight_update")
    async def abort_weight_update(http: Request) -> dict[str, Any]:
        await updates.abort()
        return {"message": "Weight update aborted"}

    @routes.post("/update_weight_version")
    async def update_weight_version(http: Request) -> dict[str, Any]:
        name = read_as(await read_body(http) or b"{}", RenameWeights).new_version
        await updates.rename(name)
        return {"success": True, "new_version": name}

    @routes.get("/weight_info")
    async def weight_info() -> dict[str, Any]:
        current = updates.current
        return {
            "weight_version": current.name or DEFAULT_NAME,
            "epoch": current.epoch,
            "digest": current.digest or None,
            "phase": updates.phase,
            "instances": updates.versions(),
        }

    return routes


def _add_transfer(routes: APIRouter, updates: WeightUpdates) -> None:
    @routes.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(http: Request) -> dict[str, Any]:
        await updates.join(read_as(await read_body(http) or b"{}", InitTransfer).trainer())
        return {"message": "Weight transfer initialized"}

    @routes.post("/shutdown_weight_transfer_engine")
    async def shutdown_weight_transfer_engine(http: Request) -> dict[str, Any]:
        await updates.leave()
        return {"message": "Weight transfer shut down"}

    @routes.get("/get_world_size")
    async def get_world_size(http: Request) -> dict[str, Any]:
        """Returns how many ranks of a trainer's group this server needs: one, which receives for all instances."""
        return {"world_size": 1}
