"""Admin routes that replace the served weights, with vLLM's names and bodies.

cluster/weights/weight_updates.py executes a command; this module parses it and answers. Only with --weights-dir.
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request

from pd_cluster.api.middleware.http_bodies import read_as, read_body
from pd_cluster.cluster.weights.weight_updates import DEFAULT_NAME, WeightUpdates
from pd_cluster.errors import RequestError

MOST_NAME = 128
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_NAME)]


class StartWeightUpdate(msgspec.Struct, forbid_unknown_fields=True):
    """`mode`: as of /pause, for requests that run when the update finishes. `is_checkpoint_format`: always true."""

    mode: Literal["abort", "wait", "keep"] = "wait"
    is_checkpoint_format: Literal[True] = True


class WeightUpdateInfo(msgspec.Struct, forbid_unknown_fields=True):
    """`folder`: below --weights-dir."""

    folder: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class UpdateWeights(msgspec.Struct, forbid_unknown_fields=True):
    update_info: WeightUpdateInfo


class FinishWeightUpdate(msgspec.Struct, forbid_unknown_fields=True):
    """`weight_version`: the name of the new weights; None: their folder's name."""

    weight_version: Name | None = None


class RenameWeights(msgspec.Struct, forbid_unknown_fields=True):
    new_version: Name


def weight_routes(updates: WeightUpdates) -> APIRouter:
    routes = APIRouter()

    @routes.post("/start_weight_update")
    async def start_weight_update(http: Request) -> dict[str, Any]:
        body = read_as(await read_body(http) or b"{}", StartWeightUpdate)
        await updates.start(body.mode)
        return {"message": "Weight update started"}

    @routes.post("/update_weights")
    async def update_weights(http: Request) -> dict[str, Any]:
        body = read_as(await read_body(http) or b"{}", UpdateWeights)
        await updates.take_folder(body.update_info.folder)
        return {"message": "Weights checked"}

    @routes.post("/finish_weight_update")
    async def finish_weight_update(http: Request) -> dict[str, Any]:
        body = read_as(await read_body(http) or b"{}", FinishWeightUpdate)
        version = await updates.finish(_printable(body.weight_version or "", "weight_version"))
        return {"message": "Weight update finished", "weight_version": version.name, "epoch": version.epoch}

    @routes.post("/abort_weight_update")
    async def abort_weight_update(http: Request) -> dict[str, Any]:
        await updates.abort()
        return {"message": "Weight update aborted"}

    @routes.post("/update_weight_version")
    async def update_weight_version(http: Request) -> dict[str, Any]:
        name = _printable(read_as(await read_body(http) or b"{}", RenameWeights).new_version, "new_version")
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


def _printable(name: str, field: str) -> str:
    """Raises RequestError."""
    if name and not name.isprintable():
        raise RequestError(f"{field}: {reprlib.repr(name)}: has characters that cannot be printed", field)
    return name
