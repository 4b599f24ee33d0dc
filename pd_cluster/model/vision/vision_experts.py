"""The experts of ERNIE 4.5 VL: every layer has experts for text and others for pictures.

The text model is loaded as ERNIE 4.5 MoE; this file adds the experts for pictures, all of which every rank has.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.weight_files import text_name
from pd_cluster.devices.device import Device
from pd_cluster.errors import ModelError
from pd_cluster.model.parallel.rank_group import Group
from pd_cluster.model.parallel.weight_slices import read_named

WHOLE_TYPE = "ernie4_5_vl_moe"
EXPERT = re.compile(r"(?P<layer>model\.layers\.\d+\.mlp)\.experts\.(?P<index>\d+)\.(?P<name>\w+)\.weight")
ROUTER = re.compile(r"(?P<layer>model\.layers\.\d+\.mlp)\.gate\.weight(?P<of_pictures>_1)?")
BIAS = "mlp.moe_statics.e_score_correction_bias"


class ModalityExperts(torch.nn.Module):
    """A sparse block. `rows`: the picture rows of a step, and all other rows; None: there are no pictures."""

    def __init__(self, texts: Any, pictures: Any, group: Group) -> None:
        """`group`: the ranks that share the text experts, whose results on each rank are already summed."""
        super().__init__()
        self._group = group
        self.texts, self.pictures = texts, pictures
        self.rows: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes x [1, num_tokens, hidden_size]."""
        if self.rows is None:
            found: torch.Tensor = self.texts(x)
            return found
        seen, read = self.rows
        found = torch.empty_like(x)
        if len(read):
            found[:, read] = self.texts(x[:, read])
        shown = self.pictures(x[:, seen])
        if self.texts.shared_experts is not None:
            shown = shown + self._group.sum(self.texts.shared_experts(x[:, seen]))
        found[:, seen] = shown
        return found


def texts_name(checkpoint: Checkpoint) -> Callable[[str], str]:
    """Returns a function that maps the names of the text model's weights to themselves, and all others to ""."""
    num_experts = int(checkpoint.config["moe_num_experts"])

    def name_of(key: str) -> str:
        name = text_name(key)
        if (expert := EXPERT.fullmatch(name)) is not None:
            return name if int(expert["index"]) < num_experts else ""
        router = ROUTER.fullmatch(name)
        return "" if router is not None and router["of_pictures"] else name

    return name_of


def as_text_model(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the text model's weights as the files of ERNIE 4.5 MoE store them."""
    found = {}
    for name, each in weights.items():
        if ROUTER.fullmatch(name):
            each = each.transpose(0, 1).contiguous()
        elif name.endswith(BIAS):
            each = each[:1].clone()
        found[name] = each
    return found


def install_vision_experts(
    model: Any, checkpoint: Checkpoint, dtype: torch.dtype, device: Device, group: Group
) -> None:
    """Adds the picture experts to the text experts. Raises ModelError if the weights do not match."""
    num_experts, width = int(checkpoint.config["moe_num_experts"]), _width(checkpoint)

    def name_of(key: str) -> str:
        name = text_name(key)
        expert, router = EXPERT.fullmatch(name), ROUTER.fullmatch(name)
        is_own = (expert is not None and int(expert["index"]) >= num_experts) or name.endswith(BIAS)
        return name if is_own or (router is not None and router["of_pictures"]) else ""

    weights = read_named(checkpoint.weights, name_of)
    for index, layer in enumerate(model.model.layers):
        if not hasattr(layer.mlp, "experts"):
            continue
        config = copy.deepcopy(model.config)
        config.moe_intermediate_size, config.moe_num_shared_experts = width, 0
        with torch.device("meta"):
            block = type(layer.mlp)(config)
        state = _state(weights, f"model.layers.{index}.mlp", num_experts, checkpoint)
        for name, each in state.items():
            if block.get_parameter(name).shape != each.shape:
                raise ModelError(
                    f"{checkpoint.path}: layer {index}: {name} of the pictures' experts has the shape "
                    f"{list(each.shape)}; config.json requires {list(block.get_parameter(name).shape)}"
                )
        state = {name: each.to(torch.float32 if "statics" in name else dtype) for name, each in state.items()}
        block.load_state_dict(state, assign=True)
        layer.mlp = ModalityExperts(layer.mlp, block.requires_grad_(False).eval().to(device.torch_name), group)


def _state(
    weights: dict[str, torch.Tensor], layer: str, num_experts: int, checkpoint: Checkpoint
) -> dict[str, torch.Tensor]:
    def expert(index: int, name: str) -> torch.Tensor:
        return weights.pop(f"{layer}.experts.{num_experts + index}.{name}.weight")

    try:
        joined = [torch.cat((expert(i, "gate_proj"), expert(i, "up_proj"))) for i in range(num_experts)]
        return {
            "gate.weight": weights.pop(f"{layer}.gate.weight_1").transpose(0, 1).contiguous(),
            "gate.moe_statics.e_score_correction_bias": weights.pop(f"{layer}.{BIAS.removeprefix('mlp.')}")[1:].clone(),
            "experts.gate_up_proj": torch.stack(joined),
            "experts.down_proj": torch.stack([expert(i, "down_proj") for i in range(num_experts)]),
        }
    except KeyError as missing:
        raise ModelError(f"{checkpoint.path}: {missing.args[0]}: missing among the picture experts") from None


def _width(checkpoint: Checkpoint) -> int:
    """Returns the intermediate size of a picture expert."""
    return int(checkpoint.config["picture_intermediate_size"])
