"""Computes what a model needs from a device: weights, operations, and KV cache per token. Reads no weights.

The model is built without values on torch's meta device, and declares its cache there as a loaded model does. Its files
are read only for the sizes of quantized weights, from their headers, so a folder with only config.json is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd_cluster.checkpoints.checkpoint import SUPPORTED_MODEL_TYPES, Checkpoint
from pd_cluster.checkpoints.expert_counts import num_experts_of
from pd_cluster.checkpoints.hub import resolve_model
from pd_cluster.checkpoints.json_files import read_json
from pd_cluster.checkpoints.weight_files import QUANTIZERS_FIELDS, weights_nbytes
from pd_cluster.errors import ModelError, called
from pd_cluster.kv.kv_layout import DTYPE_NBYTES, KVLayout

if TYPE_CHECKING:
    import torch

    from pd_cluster.model.language_model.cache_declaration import LayerCache

FLOPS_PER_WEIGHT = 2  # per token: one multiplication and one addition
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token")
SIXTEEN_BITS = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeeds:
    """A whole model's sizes. `layouts`: one for each group of layers, for all ranks; the first keeps all tokens."""

    name: str
    dtype: str
    weights_nbytes: int  # in memory
    read_nbytes: int  # bytes that a step of many sequences reads: all experts, but not the embedding table
    num_active_weights: int  # weights that multiply a token; only the experts chosen for it count
    pair_flops: int  # operations, in all layers, for a token that attends to one other token
    num_layers: int
    num_heads: int
    hidden_size: int
    widest: int  # values per token where a layer is widest
    vocab_size: int
    max_model_len: int
    layouts: tuple[KVLayout, ...]

    @property
    def token_flops(self) -> int:
        """Returns the operations per token, without attention."""
        return FLOPS_PER_WEIGHT * self.num_active_weights

    def why_not_split(self, tp_size: int) -> str:
        """Returns why the model cannot be split over `tp_size` ranks; "" if it can."""
        if self.num_heads % tp_size:
            return f"{self.num_heads} attention heads cannot be divided among {tp_size} ranks"
        if not all(each.can_split(tp_size) for each in self.layouts if not each.holds.is_state):
            return f"{self.layouts[0].num_kv_heads} KV heads cannot be divided among {tp_size} ranks"
        return ""


def model_needs(model: str) -> ModelNeeds:
    """Computes the needs of a model in a folder or on the hub, without fetching its weights. Raises ModelError."""
    from pd_cluster.model.language_model.cache_declaration import least_layouts

    checkpoint = _checkpoint(resolve_model(model, needs_weights=False))
    dtype = _dtype(checkpoint)
    built, caches = model_without_values(checkpoint)
    config, layouts = built.config, least_layouts(caches, 1, dtype)
    num_weights, num_looked_up, num_idle = _counts(built, config)
    per_weight = _weight_nbytes(checkpoint, num_weights, dtype)
    shapes = [each.shape for each in built.parameters() if each.dim() == 2 and config.vocab_size not in each.shape]
    return ModelNeeds(
        name=model,
        dtype=dtype,
        weights_nbytes=round(num_weights * per_weight),
        read_nbytes=round((num_weights - num_looked_up) * per_weight),
        num_active_weights=num_weights - num_looked_up - num_idle,
        pair_flops=_pair_flops(config, layouts),
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        widest=max((max(shape) for shape in shapes), default=config.hidden_size),
        vocab_size=config.vocab_size,
        max_model_len=checkpoint.max_position_embeddings,
        layouts=layouts,
    )


def model_without_values(checkpoint: Checkpoint) -> tuple[Any, tuple[LayerCache, ...]]:
    """Returns transformers' modules of a model on torch's meta device, and the caches that they declare.

    Their dtype is bfloat16, because on that device the experts' kernels accept no other. Raises ModelError.
    """
    import torch
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from pd_cluster.model.language_model.cache_declaration import caches_of
    from pd_cluster.model.loading.transformers_modules import config_of

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config_of(checkpoint), dtype=torch.bfloat16).eval()
        return built, caches_of(built)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, NotImplementedError) as error:
        place = checkpoint.path / "config.json"
        raise ModelError(f"{place}: cannot be built without weights: {' '.join(str(error).split())}") from error
    finally:
        transformers_logging.set_verbosity(before)


def resident_nbytes(checkpoint: Checkpoint, built: torch.nn.Module, dtype: str) -> int:
    """Returns the bytes in memory of all weights. `built`: from `model_without_values`. Raises ModelError."""
    num_weights = sum(each.numel() for each in built.parameters())
    return round(num_weights * _weight_nbytes(checkpoint, num_weights, dtype))


def _checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint with or without its weights. Raises ModelError."""
    if any(path.glob("*.safetensors")):
        return Checkpoint.open(str(path))
    file = path / "config.json"
    config = read_json(file)
    if (model_type := config.get("model_type")) not in SUPPORTED_MODEL_TYPES:
        raise ModelError(
            f"{file}: model_type {model_type!r}: without weights, only the types in docs/models.md can be planned"
        )
    if found := next((name for name in QUANTIZERS_FIELDS if config.get(name)), ""):
        raise ModelError(f"{file}: {found}: only the files show the size of quantized weights; give a complete folder")
    return Checkpoint(path, config, {}, "", None)


def _dtype(checkpoint: Checkpoint) -> str:
    """Returns the dtype of weights and pools on an accelerator: at most 16 bits."""
    found = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "")
    return found if found in SIXTEEN_BITS else "bfloat16"


def _weight_nbytes(checkpoint: Checkpoint, num_weights: int, dtype: str) -> float:
    """Returns the average bytes per weight in memory."""
    if checkpoint.quantization is None:
        return DTYPE_NBYTES[dtype]
    if found := weights_nbytes(checkpoint.path):
        return found / num_weights
    raise ModelError(
        f"{checkpoint.path}: no *.safetensors file; {called('model')} needs the files of quantized weights"
    )


def _counts(model: torch.nn.Module, config: Any) -> tuple[int, int, int]:
    """Returns the numbers of all weights, of weights that are only looked up, and of expert weights a token skips."""
    import torch

    num_experts, per_token = num_experts_of(config.to_dict()), _experts_per_token(config)
    idle_share = 1 - per_token / num_experts if num_experts else 0.0
    head = model.get_output_embeddings()  # type: ignore[operator]
    num_weights = num_of_experts = 0
    for name, each in model.named_parameters():
        num_weights += each.numel()
        if num_experts and ".experts." in name:
            num_of_experts += each.numel()
    tables = [each for each in model.modules() if isinstance(each, torch.nn.Embedding)]
    num_looked_up = sum(each.weight.numel() for each in tables if head is None or each.weight is not head.weight)
    return num_weights, num_looked_up, round(num_of_experts * idle_share)


def _experts_per_token(config: Any) -> int:
    return next((int(value) for name in EXPERTS_PER_TOKEN if (value := getattr(config, name, None))), 1)


def _pair_flops(config: Any, layouts: tuple[KVLayout, ...]) -> int:
    """Returns the operations of a query times a key and of a weight times a value, over all heads and layers.

    Latent attention is counted as prefill computes it: with keys and values of every head.
    """
    found = 0
    for layout in layouts:
        if layout.holds.is_state:
            continue
        width = sum(plane.width for plane in layout.planes if plane.name in ("k", "v"))
        if layout.has_latents:
            width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        found += layout.num_layers * config.num_attention_heads * FLOPS_PER_WEIGHT * width
    return found
