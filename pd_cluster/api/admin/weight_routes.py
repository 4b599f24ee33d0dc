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
from pd_cluster.process_messages import JoinTrainer, SentTensor

MOST_NAME = 128
MOST_TENSORS = 1 << 18
RECEIVE_TIMEOUT_S = 600.0  # for the trainer to join, and for the tensors of one command
TensorNames = Annotated[list[Annotated[str, msgspec.Meta(max_length=1024)]], msgspec.Meta(max_length=MOST_TENSORS)]
Dimension = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Shapes = Annotated[list[Annotated[list[Dimension], msgspec.Meta(max_length=16)]], msgspec.Meta(max_length=MOST_TENSORS)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_NAME)]


class StartWeightUpdate(msgspec.Struct, forbid_unknown_fields=True):
    """`mode`: as of /pause, for requests that run when the update finishes. `is_checkpoint_format`: always true."""

    mode: Literal["abort", "wait", "keep"] = "wait"
    is_checkpoint_format: Literal[True] = True


class TrainerGroup(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's fields. This server is one rank, `rank_offset`; rank 0 of the group sends. `packed`: always false."""

    master_address: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 1
    world_size: Annotated[int, msgspec.Meta(ge=2, le=65536)] = 2
    backend: Literal["gloo", "nccl", "hccl"] = "gloo"
    packed: Literal[False] = False


class InitTransfer(msgspec.Struct, forbid_unknown_fields=True):
    init_info: TrainerGroup


class WeightUpdateInfo(msgspec.Struct, forbid_unknown_fields=True):
    """`folder`: below --weights-dir; or the tensors that the trainer sends next, in vLLM's three lists."""

    folder: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    names: TensorNames = []
    dtype_names: TensorNames = []
    shapes: Shapes = []

    def tensors(self) -> list[SentTensor]:
        """Raises RequestError."""
        if self.folder and self.names:
            raise RequestError("update_info: give either a folder or names", "update_info")
        if not self.names:
            raise RequestError("update_info: give a folder, or names, dtype_names and shapes", "update_info")
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            counts = f"{len(self.names)}, {len(self.dtype_names)} and {len(self.shapes)}"
            raise RequestError(
                f"update_info: names, dtype_names and shapes have {counts} entries; give as many of each", "update_info"
            )
        return [SentTensor(*each) for each in zip(self.names, self.dtype_names, self.shapes, strict=True)]


class UpdateWeights(msgspec.Struct, forbid_unknown_fields=True):
    update_info: WeightUpdateInfo


class FinishWeightUpdate(msgspec.Struct, forbid_unknown_fields=True):
    """`weight_version`: the name of the new weights; None: their folder's name."""

    weight_version: Name | None = None


class RenameWeights(msgspec.Struct, forbid_unknown_fields=True):
    new_version: Name


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
        info = body.update_info
        if info.folder and not info.names:
            await updates.take_folder(info.folder)
        else:
            await updates.take_tensors(info.tensors())
        return {"message": "Weights updated"}

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


def _add_transfer(routes: APIRouter, updates: WeightUpdates) -> None:
    @routes.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(http: Request) -> dict[str, Any]:
        info = read_as(await read_body(http) or b"{}", InitTransfer).init_info
        if info.rank_offset >= info.world_size:
            raise RequestError(f"rank_offset: {info.rank_offset}; give less than world_size", "init_info")
        await updates.join(
            JoinTrainer(
                backend=info.backend,
                address=info.master_address,
                port=info.master_port,
                rank=info.rank_offset,
                world_size=info.world_size,
                timeout_s=RECEIVE_TIMEOUT_S,
            )
        )
        return {"message": "Weight transfer initialized"}

    @routes.post("/shutdown_weight_transfer_engine")
    async def shutdown_weight_transfer_engine(http: Request) -> dict[str, Any]:
        await updates.leave()
        return {"message": "Weight transfer shut down"}

    @routes.get("/get_world_size")
    async def get_world_size(http: Request) -> dict[str, Any]:
        """The ranks of a trainer's group that this server needs: one receives for all instances."""
        return {"world_size": 1}


def _printable(name: str, field: str) -> str:
    """Raises RequestError."""
    if name and not name.isprintable():
        raise RequestError(f"{field}: {reprlib.repr(name)}: has characters that cannot be printed", field)
    return name
