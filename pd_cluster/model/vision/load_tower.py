"""Builds transformers' modules that compute a folder's pictures, in float32, and reads their weights."""

from __future__ import annotations

import copy
import logging
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.vision_config import VisionPart
from pd_cluster.checkpoints.weight_files import PLAIN_DTYPES, quantized, text_name
from pd_cluster.devices.device import Device
from pd_cluster.errors import ModelError
from pd_cluster.model.parallel.rank_group import Group
from pd_cluster.model.parallel.weight_slices import read_named
from pd_cluster.model.vision.multimodal_config import whole_config
from pd_cluster.model.vision.vision_classes import CLASSES, class_of
from pd_cluster.model.vision.vision_tower import FeatureForm, Tower

log = logging.getLogger(__name__)

WEIGHTS = re.compile(r"(?:model\.)?visual\.(?P<name>.+)")
TEXT_MODEL = re.compile(r"(?:.*\.)?(?:language_model|text_model|lm_head)\..+")  # modules outside the tower
FAULTS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: Device, num_kept_tokens: int, group: Group) -> Tower:
    """Loads the tower, whole on every rank. Raises ModelError if its weights do not match. `dtype`: see Tower."""
    part = checkpoint.vision
    assert part is not None
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    config = whole_config(checkpoint)
    num_deep = len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
    if num_deep >= (num_layers := int(checkpoint.config["num_hidden_layers"])):
        raise ModelError(
            f"{checkpoint.path / 'config.json'}: deepstack_visual_indexes: {num_deep} indexes for {num_layers} "
            f"layers; the last layer cannot have one"
        )
    module = _tower(checkpoint, part, config) if CLASSES[part.model_type].tower else _whole(checkpoint, config)
    module.requires_grad_(False)
    module = module.eval().to(device.torch_name)
    log.info("images: %s in float32, %d weights", type(module).__name__, sum(p.numel() for p in module.parameters()))
    features = FeatureForm(dtype, 1 + num_deep, int(checkpoint.config["hidden_size"]))
    return Tower(module, part, device, features, num_kept_tokens, group)


def _tower(checkpoint: Checkpoint, part: VisionPart, config: Any) -> Any:
    """Returns a tower that is a separate model in transformers."""
    kind = class_of(part, CLASSES[part.model_type].tower)
    module, info = _load(checkpoint, kind, config.vision_config, _tower_name)
    _check(checkpoint, info, lambda key: f"visual.{key}")
    return module


def _whole(checkpoint: Checkpoint, config: Any) -> Any:
    """Returns the whole model without its text model, which is loaded separately.

    transformers builds the whole model, but with a text model of zero layers, so that it recognizes and converts the
    weights' names.
    """
    kind = AutoModelForImageTextToText._model_mapping[type(config)]
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    module, info = _load(checkpoint, kind, config, _others_name)
    info["missing_keys"] = [key for key in info["missing_keys"] if not TEXT_MODEL.fullmatch(key)]
    _check(checkpoint, info, str)
    module.model.language_model = torch.nn.Identity()
    return module.model


def _load(checkpoint: Checkpoint, kind: Any, config: Any, name_of: Callable[[str], str]) -> tuple[Any, Any]:
    _check_stored(checkpoint, name_of)
    try:
        found: tuple[Any, Any] = kind.from_pretrained(
            None,
            config=config,
            state_dict=read_named(checkpoint.weights, name_of),
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # wrong sizes are refused below, with the tensors' names
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"{checkpoint.path}: cannot load the vision tower: {error}") from error
    return found


def _check(checkpoint: Checkpoint, info: Any, name: Callable[[str], str]) -> None:
    for kind_of_fault in FAULTS:
        if wrong := sorted(str(key[0] if isinstance(key, tuple) else key) for key in info[kind_of_fault]):
            fault = kind_of_fault.partition("_")[0]
            raise ModelError(f"{checkpoint.path}: {name(wrong[0])}: {fault} among the weights of the vision tower")


def _tower_name(key: str) -> str:
    found = WEIGHTS.fullmatch(key)
    return found["name"] if found is not None else ""


def _others_name(key: str) -> str:
    """Returns the name of a weight outside the text model; "" for other weights."""
    return "" if text_name(key) else key


def _check_stored(checkpoint: Checkpoint, name_of: Callable[[str], str]) -> None:
    for each in checkpoint.weights.stored():
        if any(map(name_of, each.names)) and each.dtype not in PLAIN_DTYPES:
            raise quantized(f"{each.file}: {each.key} ({each.dtype})")
