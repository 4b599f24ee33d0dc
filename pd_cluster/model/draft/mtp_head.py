"""The layer after a checkpoint's last layer, which predicts the token after the next one (MTP), as a draft head.

DeepSeek-V3, GLM-4.5 and others store this layer as model.layers.N of a model with N layers. It is a decoder layer with
`shared_head.norm`; `enorm`, `hnorm` and `eh_proj` compute its input from a token's embedding and the states of the
preceding token. The stored embedding and output layer of the head are copies of the model's, so they are not read. The
head is loaded as a model with one layer of the same type, by the same code and with the same checks as any model.

States are taken after a final norm, either the model's or the head's own, and pair j has rotary position j.
transformers' MtpModel (modeling_layers.py) computes the same. vLLM (models/deepseek_mtp.py) differs: it counts
positions of pairs from 0, zeroes the embedding at position 0, and takes a chain's states before the norm. So its
predictions differ for the first draft from a sequence's first pair, and for all drafts of a chain from the second on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.quantization_config import Quantization
from pd_cluster.checkpoints.tensor_layouts import Layout, WeightFolder
from pd_cluster.checkpoints.tensor_place import TensorPlace
from pd_cluster.checkpoints.weight_files import PLAIN_DTYPES, QUANTIZERS_TENSORS
from pd_cluster.errors import ConfigError, ModelError
from pd_cluster.kv.pool_memory import TORCH_DTYPES
from pd_cluster.model.draft.draft_head import FIRST_KEY, DraftHead
from pd_cluster.model.draft.draft_plan import PLACE
from pd_cluster.model.kernels.cpu.ops import CpuOps
from pd_cluster.model.language_model.architecture_quirks import ARCHITECTURES
from pd_cluster.model.language_model.cache_declaration import is_indexed
from pd_cluster.model.language_model.causal_lm import CausalLM
from pd_cluster.model.language_model.fuse_model import is_known
from pd_cluster.model.language_model.fused_lm import FusedCausalLM, Served
from pd_cluster.model.language_model.layer_maker import norm_weight
from pd_cluster.model.layers.fused_layer import FusedLayer, HeadsAttention, LatentAttention
from pd_cluster.model.layers.linear_weight import PLAIN
from pd_cluster.model.layers.ops import Norm, Ops
from pd_cluster.model.layers.packed_linear import Linear
from pd_cluster.model.loading.model_loader import LoadChoices, load_model
from pd_cluster.model.loading.quantized_files import read_quantized
from pd_cluster.model.loading.transformers_modules import config_of
from pd_cluster.model.parallel.rank_tensors import WHOLE_PART
from pd_cluster.model.parallel.weight_slices import read_whole
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.model.weights.weight_forms import form_of
from pd_cluster.settings.speculation import MTP_TYPES

log = logging.getLogger(__name__)

Join = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

WAY_OUT = "give another method, such as ngram or suffix"
NORMS, PROJECTION = ("enorm", "hnorm"), "eh_proj"
NEEDED = (*NORMS, PROJECTION, "shared_head.norm")
NOT_OF_THE_LAYER = (*NORMS, PROJECTION, "embed_tokens", "shared_head")
FIRST = "model.layers.0."  # the layer's name in the model with one layer
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FEW_ROWS = 16  # rows of the model's embedding: the checks of the layer use this small vocabulary


def check_mtp(plan: LoadPlan) -> None:
    """Checks everything that can be known before any weight is read. Raises ConfigError, ModelError."""
    checkpoint, mtp_type = plan.checkpoint, plan.config.speculation.mtp_type
    if plan.device.is_accelerator or not plan.is_alone:
        where = plan.device.kind if plan.device.is_accelerator else f"{plan.group.size} ranks"
        raise ConfigError(f"{PLACE}: method mtp runs only on CPUs with one rank, but this is {where}; {WAY_OUT}")
    if mtp_type and checkpoint.model_type not in MTP_TYPES[mtp_type]:
        types = " and ".join(MTP_TYPES[mtp_type])
        raise ConfigError(
            f"{PLACE}: method {mtp_type} is for {types}, but {checkpoint.path} is {checkpoint.model_type}; give mtp"
        )
    if why := _why_not(checkpoint):
        raise ConfigError(f"{PLACE}: method mtp: {checkpoint.path} {why}; {WAY_OUT}")


def load_mtp(plan: LoadPlan, target: CausalLM) -> DraftHead:
    """Loads the head of a plan that `check_mtp` has checked, after the model. Raises ConfigError, ModelError."""
    checkpoint = plan.checkpoint
    if not isinstance(target, FusedCausalLM) or not isinstance(target.ops, CpuOps):
        raise ConfigError(f"{PLACE}: method mtp needs the C kernels, but this model has {target.kernels}; {WAY_OUT}")
    one, index = _load_layer(plan), len(target.layers)
    if replace(one.caches[0], window=0) != replace(target.caches[-1], window=0):
        raise ModelError(
            f"{checkpoint.path}: layer {index} keeps {one.caches[0].num_heads} heads of "
            f"{[plane.width for plane in one.caches[0].planes]} values, but the layer before it keeps "
            f"{target.caches[-1].num_heads} of {[plane.width for plane in target.caches[-1].planes]}; {WAY_OUT}"
        )
    one.config.vocab_size = target.config.vocab_size
    ends = replace(
        one.ends,
        embed=target.ends.embed,
        head=target.ends.head,
        vocab_size=target.ends.vocab_size,
        embedding_factor=target.ends.embedding_factor,
        join=_join_of(plan, one, target.ops),
    )
    layers = [_behind(layer, index, target.ops) for layer in one.layers]
    # The model's adapters also apply to the head's embedding and output layer.
    served = Served(one.caches, target.rope_limit, target.adapters)
    model = FusedCausalLM(one.config, target.ops, layers, ends, served)
    log.info("draft head: layer %d of %s, %s", index, checkpoint.path, model.kernels)
    return DraftHead(model, f"mtp {checkpoint.identity}", project=lambda states: states, is_of_model=True)


def _why_not(checkpoint: Checkpoint) -> str:
    """Returns a clause, with the model as subject, that says why it has no usable MTP layer; "" if it has one.

    Raises ModelError.
    """
    if checkpoint.layout is not None or checkpoint.part_of or checkpoint.is_unproven:
        return "is not a listed text model's own folder in transformers' layout"
    config = config_of(checkpoint)
    prefix = _prefix(checkpoint)
    stored = {part.key.rpartition(".")[0] for part in checkpoint.weights.stored()}
    if missing := [name for name in NEEDED if prefix + name not in stored]:
        return f"has no {prefix}{missing[0]}, so no MTP layer after its last layer"
    if is_indexed(config):
        return f"is a {checkpoint.model_type}, whose sparse attention draft heads do not support"
    if not is_known(_architecture(config), config):
        return f"is a {checkpoint.model_type}, whose layers are not fused"
    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        return "has layers of several types, but does not name the type of the MTP layer"
    return ""


def _prefix(checkpoint: Checkpoint) -> str:
    return f"model.layers.{checkpoint.config['num_hidden_layers']}."


def _architecture(config: Any) -> Any:
    return AutoModelForCausalLM._model_mapping[type(config)]


def _load_layer(plan: LoadPlan) -> FusedCausalLM:
    """Loads the decoder layer as a separate model, with a few rows of the embedding as embedding and output layer."""
    checkpoint, config = plan.checkpoint, plan.config
    try:
        choices = LoadChoices(
            config.attention_backend, block_size=plan.block_size, kv_cache_dtype=config.kv_cache_dtype
        )
        one = load_model(_as_model(checkpoint), plan.dtype, plan.device, choices=choices)
    except ModelError as error:
        raise ModelError(
            f"{error} (layer 0 in this message is layer {checkpoint.config['num_hidden_layers']} of the checkpoint)"
        ) from error
    assert isinstance(one, FusedCausalLM)  # as the model is: see _why_not
    return one


def _as_model(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the layer as a checkpoint with a single layer.

    Fields for the types of layers are set as in transformers' `get_mtp_config`; the tensors show whether the layer has
    experts.
    """
    known = config_of(checkpoint)
    prefix, num_rows = _prefix(checkpoint), min(FEW_ROWS, int(checkpoint.config["vocab_size"]))
    has_experts = any(part.key.startswith(f"{prefix}mlp.experts.") for part in checkpoint.weights.stored())
    changed: dict[str, Any] = {"num_hidden_layers": 1, "num_nextn_predict_layers": 0, "vocab_size": num_rows}
    changed |= {"pad_token_id": None, "tie_word_embeddings": False}
    if hasattr(known, "first_k_dense_replace"):
        changed["first_k_dense_replace"] = 0 if has_experts else 1
    if getattr(known, "mlp_layer_types", None):
        changed["mlp_layer_types"] = ["sparse" if has_experts else "dense"]
    if getattr(known, "layer_types", None):
        changed["layer_types"] = known.layer_types[:1]
    config = {**checkpoint.config, **changed}
    layout = _layout(partial(_name_of_layer, prefix), num_rows)
    return replace(
        checkpoint,
        config=config,
        whole=config,  # replaces the file's config, which describes the whole model
        layout=layout,
        quantization=_quantization(WeightFolder(checkpoint.path, layout), checkpoint.quantization),
        takes_adapters=False,
        head_scheme="",
    )


def _name_of_layer(prefix: str, key: str) -> tuple[str, ...]:
    """Returns the names of a stored tensor in the model with a single layer; empty if it is not read."""
    if key == EMBEDDING:
        return EMBEDDING, HEAD
    name = key.removeprefix(prefix)
    if name == key:
        return ()
    if name.startswith("shared_head.norm."):
        return (f"model.{name.removeprefix('shared_head.')}",)
    return () if name.startswith(tuple(f"{each}." for each in NOT_OF_THE_LAYER)) else (FIRST + name,)


def _name_beside_layer(prefix: str, key: str) -> tuple[str, ...]:
    """Returns the name of a tensor that helps to compute the layer's input; empty for other tensors."""
    name = key.removeprefix(prefix)
    is_read = name != key and name.startswith(tuple(f"{each}." for each in (*NORMS, PROJECTION)))
    return (FIRST + name,) if is_read else ()


def _layout(names: Callable[[str], tuple[str, ...]], num_rows: int) -> Layout:
    """`num_rows`: how many rows of the embedding are read, if it is read."""

    def places(key: str, shape: tuple[int, ...]) -> tuple[TensorPlace, ...]:
        pieces = ((0, num_rows),) if key == EMBEDDING else None
        return tuple(TensorPlace(name, pieces) for name in names(key))

    return Layout("MTP", names, places)


def _quantization(folder: WeightFolder, found: Quantization | None) -> Quantization | None:
    """Returns the quantization of these tensors; None if they are not quantized, as is often the case."""
    if found is None or found.at_load:
        return found
    for part in folder.stored():
        is_scale = part.key.rpartition(".")[2] in QUANTIZERS_TENSORS
        if part.names and (is_scale or part.dtype not in PLAIN_DTYPES):
            types = {name: kind for key, kind in found.types.items() for name in folder.names(key)}
            return replace(found, types=types)
    return None


def _join_of(plan: LoadPlan, one: FusedCausalLM, ops: Ops) -> Join:
    """Returns the function that computes the layer's input from embeddings and states. Raises ModelError."""
    checkpoint, dtype = plan.checkpoint, TORCH_DTYPES[plan.dtype]
    folder = WeightFolder(checkpoint.path, _layout(partial(_name_beside_layer, _prefix(checkpoint)), 0))
    found = _quantization(folder, checkpoint.quantization)
    weights = read_whole(folder) if found is None else read_quantized(folder, found, str, dtype, WHOLE_PART)
    config = config_of(checkpoint)
    quirks = ARCHITECTURES[_architecture(config).__name__]
    norms = (weights.pop(f"{FIRST}{name}.weight").float() for name in NORMS)
    assert one.ends.norm is not None
    eps = one.ends.norm.eps
    enorm, hnorm = (Norm(norm_weight(weight, quirks), eps) for weight in norms)
    project = _projection(checkpoint, weights, dtype, ops)
    is_turned = bool(getattr(config, "mtp_hidden_states_first", False))

    def join(embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        halves = ops.norm(embeddings, enorm), ops.norm(states, hnorm)
        return project(torch.cat(halves[::-1] if is_turned else halves, dim=-1))

    return join


def _projection(checkpoint: Checkpoint, weights: dict[str, torch.Tensor], dtype: torch.dtype, ops: Ops) -> Linear:
    """Returns the input projection. Raises ModelError if it has another shape."""
    place, width = f"{_prefix(checkpoint)}{PROJECTION}", int(checkpoint.config["hidden_size"])
    parts = {name.removeprefix(f"{FIRST}{PROJECTION}."): tensor for name, tensor in weights.items()}
    form = form_of(parts, f"{checkpoint.path}: {place}")
    weight = form.weight.of({name: each.to(dtype) for name, each in parts.items()} if form is PLAIN else parts, dtype)
    if (shape := tuple(weight.matrix().shape)) != (width, 2 * width):
        raise ModelError(
            f"{checkpoint.path}: {place}: its shape is {list(shape)}, not {[width, 2 * width]}; copy the file again"
        )
    return ops.linear(weight)


def _behind(layer: FusedLayer, index: int, ops: CpuOps) -> FusedLayer:
    """Returns the layer with index `index` in the model's pool; its first pair is in slot FIRST_KEY."""
    attention = layer.attention
    if isinstance(attention, HeadsAttention):
        heads = replace(attention.heads, layer_idx=index, first_key=FIRST_KEY)
        return replace(layer, attention=replace(attention, heads=heads, ops=ops))
    assert isinstance(attention, LatentAttention)
    latents = replace(attention.latents, layer_idx=index, first_key=FIRST_KEY)
    return replace(layer, attention=replace(attention, latents=latents, ops=ops))
