"""Checks that the files hold exactly the architecture's weights: none is missing, quantized or left over.

A tensor that no module uses is an error, because it might be a factor of another tensor.
"""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.classification_head import HEAD
from pd_cluster.checkpoints.weight_files import BUFFERS, PLAIN_DTYPES, WAY_OUT, quantized
from pd_cluster.errors import ModelError
from pd_cluster.model.language_model.cache_declaration import INDEXED
from pd_cluster.model.layers.states.state_planes import MODULES, state_modules
from pd_cluster.model.loading.placeholder_weights import is_in_other_form
from pd_cluster.model.loading.unlisted_model_check import check_fields

log = logging.getLogger(__name__)

ATTENDING = {"full_attention", "sliding_attention", INDEXED}
OF_HYBRIDS = {"linear_attention", "conv", "hybrid", "mlp", "moe"}
LIMIT, NO_LIMIT = "time_step_limit", (0.0, math.inf)
BOUNDED_ALIKE = ("NemotronHMamba2Mixer",)  # the limit holds for single tokens, too: see states/module_states.py

# Float buffers that earlier versions of transformers saved in each layer; now the modules compute them.
ROTARY = re.compile(r"(?:^|\.)rotary_emb\.(?:(?:original_)?inv_freq|(?:cos|sin)_cached)$")
LAYER = re.compile(r"(?:^|\.)layers\.(?P<index>\d+)\.")
NUM_LAYERS = "num_hidden_layers"
# The field with the number of layers for speculative decoding, whose weights follow the last layer's. transformers
# ignores some of them by name.
NUM_FURTHER_LAYERS = "num_nextn_predict_layers"


def check_stored(checkpoint: Checkpoint) -> None:
    """Checks the dtypes of all tensors before any is read. Raises ModelError that names the file and the tensor."""
    num_spare = 0
    for file, key, dtype, _ in checkpoint.weights.stored():
        names = checkpoint.names_of(key)
        num_spare += checkpoint.layout is not None and checkpoint.layout.is_spare(key)
        if names and dtype not in PLAIN_DTYPES and not BUFFERS.search(key) and not any(map(is_in_other_form, names)):
            raise quantized(f"{file}: {key} ({dtype})")
    if num_spare:
        log.info("%s: %d tensors of layers that predict further tokens are ignored", checkpoint.path, num_spare)


def check_loaded(checkpoint: Checkpoint, model: Any, info: dict[str, Any]) -> None:
    """Checks that the files match the architecture exactly, and that the model can be served. Raises ModelError.

    `info`: the loading info that transformers' from_pretrained returns.
    """
    wrong = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info["mismatched_keys"])
    if wrong:
        raise ModelError(f"{checkpoint.path}: {len(wrong)} weights do not have the shape in config.json: {wrong[0]}")
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"{checkpoint.path}: the safetensors lack {len(missing)} weights, such as {missing[0]}")
    left = sorted(key for key in info["unexpected_keys"] if not _may_be_left(checkpoint, key))
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise ModelError(
            f"{_file_of(checkpoint, left[0])}: {left[0]}{more}: {checkpoint.model_type} has no such weight and would "
            f"be computed without it; if a quantizer made this folder, {WAY_OUT}; otherwise remove such tensors"
        )
    if num_further := sum(is_further(checkpoint, each.key) for each in checkpoint.weights.stored()):
        log.info("%s: %d tensors of layers after the last one are ignored", checkpoint.path, num_further)
    if checkpoint.is_unproven:
        check_fields(model)
    _check_layers(checkpoint, model)


def _check_layers(checkpoint: Checkpoint, model: Any) -> None:
    """Raises ModelError unless all layers are of supported types and compute prompts and single tokens alike."""
    layer_types, recurrent = set(getattr(model.config, "layer_types", None) or ()), state_modules(model)
    if layer_types - ATTENDING - (OF_HYBRIDS if recurrent else set()):
        raise ModelError(
            f"{checkpoint.path}: layer_types {sorted(layer_types)}: only full, sliding and indexed attention and "
            f"the states of {', '.join(sorted(MODULES))} are supported"
        )
    for module in recurrent.values():
        limit = getattr(module, LIMIT, None)
        if limit is not None and tuple(limit) != NO_LIMIT and type(module).__name__ not in BOUNDED_ALIKE:
            raise ModelError(
                f"{checkpoint.path}: config.json has {LIMIT} {list(limit)}, which transformers applies to prompts but "
                f"not to single tokens; only [0, inf] is supported: remove the field"
            )


def _may_be_left(checkpoint: Checkpoint, key: str) -> bool:
    """Whether a tensor that no module uses can be ignored, in addition to those that transformers ignores."""
    is_of_classes = checkpoint.is_classifier and key in HEAD  # the service computes the classes
    return bool(BUFFERS.search(key) or ROTARY.search(key)) or is_of_classes or is_further(checkpoint, key)


def is_further(checkpoint: Checkpoint, key: str) -> bool:
    """Whether a tensor belongs to a layer after the layers in config.json's count, and can be ignored."""
    layer = LAYER.search(key)
    num_layers, num_further = checkpoint.config.get(NUM_LAYERS), checkpoint.config.get(NUM_FURTHER_LAYERS)
    if layer is None or not isinstance(num_layers, int):
        return False
    beyond = int(layer["index"]) - num_layers
    is_cut = NUM_LAYERS in checkpoint.overrides  # the user requests fewer layers than the files have
    return beyond >= 0 and (is_cut or (isinstance(num_further, int) and beyond < num_further))


def _file_of(checkpoint: Checkpoint, name: str) -> Path:
    """Returns the file of a tensor, by its name in the model; the folder if transformers has renamed it."""
    for file, key, *_ in checkpoint.weights.stored():
        if any(name == each or name.endswith(f".{each}") for each in checkpoint.names_of(key)):
            return file
    return checkpoint.path
