"""The bodies of the commands that replace weights: vLLM's names and fields. Knows nothing of HTTP."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.process_messages import JoinTrainer, SentTensor

MOST_NAME = 128
PRINTABLE = r"^[!-~]([ -~]*[!-~])?$"  # a version's name
MOST_TENSORS = 1 << 18
RECEIVE_TIMEOUT_S = 600.0  # for the trainer to join, and for the tensors of one command
TensorNames = Annotated[list[Annotated[str, msgspec.Meta(max_length=1024)]], msgspec.Meta(max_length=MOST_TENSORS)]
Dimension = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Shapes = Annotated[list[Annotated[list[Dimension], msgspec.Meta(max_length=16)]], msgspec.Meta(max_length=MOST_TENSORS)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_NAME, pattern=PRINTABLE)]


class StartWeightUpdate(msgspec.Struct, forbid_unknown_fields=True):
    """`mode`: as for /pause; applies to requests that run when the update finishes. `is_checkpoint_format`: always
    true.
    """

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

    def trainer(self) -> JoinTrainer:
        """Returns the trainer's group. Raises RequestError."""
        info = self.init_info
        if info.rank_offset >= info.world_size:
            raise RequestError(f"rank_offset: {info.rank_offset}; give less than world_size", "init_info")
        return JoinTrainer(
            backend=info.backend,
            address=info.master_address,
            port=info.master_port,
            rank=info.rank_offset,
            world_size=info.world_size,
            timeout_s=RECEIVE_TIMEOUT_S,
        )


class WeightUpdateInfo(msgspec.Struct, forbid_unknown_fields=True):
    """Either `folder`, below --weights-dir, or the tensors that the trainer sends next, in vLLM's three lists."""

    folder: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    names: TensorNames = []
    dtype_names: TensorNames = []
    shapes: Shapes = []

    def tensors(self) -> list[SentTensor]:
        """Returns the tensors to receive; [] if a folder is given. Raises RequestError."""
        if self.folder and self.names:
            raise RequestError("update_info: give either a folder or names", "update_info")
        if self.folder:
            return []
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
