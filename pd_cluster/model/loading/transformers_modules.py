"""Loads the transformers module of a checkpoint, or of a rank's share, with attention through the paged pool.

transformers builds the modules, and reads the weights that are in its own form. This file reads all other weights, one
safetensors file after another.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from pd_cluster.checkpoints.architectures import PLAIN_TYPES, null_fields, plain_fields
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.weight_files import QUANTIZERS_FIELDS, text_name
from pd_cluster.devices.device import Device
from pd_cluster.errors import ConfigError, ModelError, called
from pd_cluster.kv.pool_memory import TORCH_DTYPES
from pd_cluster.model.layers.attention import sdpa
from pd_cluster.model.loading.placeholder_weights import PlaceholderModules, hold, is_in_other_form
from pd_cluster.model.loading.quantized_files import read_quantized
from pd_cluster.model.loading.uninitialized_modules import UninitializedModules
from pd_cluster.model.loading.weight_check import check_loaded, check_stored, is_further
from pd_cluster.model.parallel.expert_modules import ExpertModules
from pd_cluster.model.parallel.parallel_layers import RankShare, narrowed, rebuilt
from pd_cluster.model.parallel.rank_tensors import WHOLE_PART, RankTensors
from pd_cluster.model.parallel.weight_slices import has_head, names, read_named, read_shard, read_whole
from pd_cluster.model.vision import vision_experts as vision_experts
from pd_cluster.model.vision.multimodal_config import whole_config
from pd_cluster.numerics import overridden

TRANSPOSED_EXPERTS = (
    "qwen3_vl_moe",
)  # the published files have inputs before outputs; files saved by transformers do not


def config_of(checkpoint: Checkpoint) -> Any:
    """Returns transformers' config with the checkpoint's overrides, or only its text part if only that is served.

    Raises ModelError for invalid values.
    """
    overrides = checkpoint.overrides
    is_as_written = not (checkpoint.part_of or overrides or checkpoint.whole or checkpoint.quantization)
    try:
        if is_as_written:
            return AutoConfig.from_pretrained(checkpoint.path, local_files_only=True)
        settings = text_settings(checkpoint) if checkpoint.part_of else checkpoint.config
        return CONFIG_MAPPING[checkpoint.model_type].from_dict(_with_floats(settings))
    except Exception as error:  # also huggingface_hub's errors for values of the wrong type
        given = f"{called('hf_overrides')} {checkpoint.hf_overrides}"
        place = given if overrides else str(checkpoint.path / "config.json")
        raise ModelError(f"{place}: {' '.join(str(error).split())}{null_fields(checkpoint.config)}") from error


def _with_floats(value: Any) -> Any:
    """Converts {"__float__": "Infinity"} and the like, which transformers writes to config.json, back to floats."""
    if isinstance(value, list):
        return [_with_floats(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"}:
        return float(value["__float__"])
    return {name: _with_floats(each) for name, each in value.items()}


def text_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the text model's config of a multimodal folder, in transformers' form."""
    whole = whole_config(checkpoint)
    text = whole.text_config
    left_out = ("model_type", *QUANTIZERS_FIELDS)
    own = {name: value for name, value in text.to_dict().items() if name not in left_out}
    if text.model_type in PLAIN_TYPES:  # its three rows of positions are equal for text
        rope = {name: value for name, value in (own.get("rope_parameters") or {}).items() if "mrope" not in name}
        own["rope_parameters"] = {**rope, "rope_type": "default"} if rope.get("rope_type") == "mrope" else rope
        own |= plain_fields(text.model_type, own)
    # Models differ in which of the two configs counts. If the output layer is not tied, the files have its weight.
    is_tied = any(getattr(config, "tie_word_embeddings", False) for config in (whole, text))
    own["tie_word_embeddings"] = is_tied and not has_head(checkpoint.weights)
    return overridden(own, checkpoint.overrides)


def load_plain(
    checkpoint: Checkpoint,
    dtype: str,
    device: Device,
    share: RankShare | None = None,
    experts: ExpertModules | None = None,
) -> torch.nn.Module:
    """Loads transformers' model, or a rank's share, with attention through the pool. Raises ModelError, ConfigError."""
    AttentionInterface.register(sdpa.NAME, sdpa.forward)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    source: dict[str, Any] = {"pretrained_model_name_or_path": checkpoint.path}
    architecture: Any = AutoModelForCausalLM
    held = PlaceholderModules()
    if checkpoint.quantization is None:
        check_stored(checkpoint)
    weights = _read_weights(checkpoint, _part_of(share, experts), TORCH_DTYPES[dtype])
    if weights is not None:
        local = config_of(checkpoint) if share is None else share.plan.local_config()
        architecture = _class_of(local, share, experts)
        held = hold(weights, architecture, local, TORCH_DTYPES[dtype], share)
        source = {"pretrained_model_name_or_path": None, "config": local, "state_dict": weights}
    else:
        source["config"] = config_of(checkpoint)
    try:
        with UninitializedModules() if _is_quick(checkpoint, device) else nullcontext():
            model, info = architecture.from_pretrained(
                **source,
                dtype=TORCH_DTYPES[dtype],
                attn_implementation=sdpa.NAME,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # wrong sizes are refused below, with the tensors' names
                **({} if held else straight_to(device)),  # on a device, placeholders would occupy their full memory
            )
    except torch.OutOfMemoryError as error:
        raise _too_large(checkpoint, dtype, device) from error
    except (OSError, ValueError, RuntimeError, LookupError, ImportError, TypeError, AttributeError) as error:
        if error.args == (sdpa.NAME,):
            raise ModelError(
                f"{checkpoint.path}: {checkpoint.config['model_type']} has its own attention functions instead of "
                f"those that can be registered with transformers; this architecture cannot be served"
            ) from error
        hint = null_fields(checkpoint.config)
        raise ModelError(f"{checkpoint.path}: cannot load the model: {' '.join(str(error).split())}{hint}") from error
    check_loaded(checkpoint, model, info)
    held.install(model)
    if experts is not None:
        experts.install(model)
    if share is not None:
        share.install(model)
    try:
        loaded: torch.nn.Module = model.eval().to(device.torch_name)
    except torch.OutOfMemoryError as error:
        raise _too_large(checkpoint, dtype, device) from error
    return loaded


def _is_quick(checkpoint: Checkpoint, device: Device) -> bool:
    """Whether to build modules without values. Not on accelerators, where start-up takes longer for other reasons."""
    return not (device.is_accelerator or checkpoint.is_unproven or checkpoint.rope.kind)


def _class_of(config: Any, share: RankShare | None, experts: ExpertModules | None) -> type[Any]:
    """Returns the class in transformers; if this rank has a share, its modules have the sizes of the share."""
    architecture = AutoModelForCausalLM._model_mapping[type(config)]
    if share is not None:
        architecture = narrowed(architecture, share.plan)
    return architecture if experts is None else rebuilt(architecture, experts.shrink)


def _part_of(share: RankShare | None, experts: ExpertModules | None) -> RankTensors:
    files = None if experts is None else experts.files
    return RankTensors(experts=files) if share is None else RankTensors(share.plan, share.group.rank, files)


def _read_weights(checkpoint: Checkpoint, part: RankTensors, dtype: torch.dtype) -> dict[str, torch.Tensor] | None:
    """Returns this rank's weights by name; None: they are in transformers' own form, and transformers reads them."""
    if checkpoint.quantization is not None:
        if checkpoint.part_of == vision_experts.WHOLE_TYPE:
            raise ModelError(f"{checkpoint.path}: vision experts cannot be quantized; serve unquantized weights")
        return read_quantized(checkpoint.weights, checkpoint.quantization, partial(_name_of, checkpoint), dtype, part)
    if checkpoint.part_of == vision_experts.WHOLE_TYPE:
        return vision_experts.as_text_model(read_named(checkpoint.weights, vision_experts.texts_name(checkpoint), part))
    if part != WHOLE_PART or checkpoint.part_of:
        return read_shard(checkpoint.weights, part, bool(checkpoint.part_of), expert_width(checkpoint))
    if checkpoint.layout is not None or any(map(is_in_other_form, names(checkpoint.weights))):
        return read_whole(checkpoint.weights)
    return None


def _name_of(checkpoint: Checkpoint, key: str) -> str:
    """Returns a tensor's name in the model; "" for tensors of layers after the last, which no module could use."""
    return "" if is_further(checkpoint, key) else text_name(key) if checkpoint.part_of else key


def expert_width(checkpoint: Checkpoint) -> int:
    """Returns hidden_size if the files may store stacked experts transposed, otherwise 0."""
    return int(checkpoint.config["hidden_size"]) if checkpoint.part_of in TRANSPOSED_EXPERTS else 0


def _too_large(checkpoint: Checkpoint, dtype: str, device: Device) -> ConfigError:
    where = f"{device.torch_name} in {dtype}"
    way_out = f"give more devices, or another {called('dtype')}"
    return ConfigError(f"{checkpoint.path}: the weights do not fit {where}; {way_out}")


def straight_to(device: Device) -> dict[str, Any]:
    """Returns arguments with which transformers and accelerate fill an accelerator's memory from several threads."""
    if device.is_accelerator and importlib.util.find_spec("accelerate") is not None:
        return {"device_map": {"": device.torch_name}}
    return {}  # the weights are loaded on the host, then moved to the device
