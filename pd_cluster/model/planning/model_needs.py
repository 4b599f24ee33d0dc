"""Counts what a model needs of a device: weights, operations and the KV cache of a token. Reads no weight.

The model is built without numbers, on torch's meta device, and declares its cache there as a loaded one does. Its files
are read only for the sizes of quantized weights, from their headers, so a folder with config.json alone is enough.
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

FLOPS_PER_WEIGHT = 2  # of a token: a product and a sum
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token")
SIXTEEN_BITS = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeeds:
    """A whole model's sizes. `layouts`: of its groups of layers, the first one that of all tokens, undivided."""

    name: str
    dtype: str
    weights_nbytes: int  # in memory
    read_nbytes: int  # of them, by a step of many sequences: all experts, but no table of embeddings
    num_active_weights: int  # that a token is multiplied with: its experts alone
    pair_flops: int  # of one token that attends to another, all layers
    num_layers: int
    num_heads: int
    hidden_size: int
    widest: int  # numbers of a token between two products of a layer
    vocab_size: int
    max_model_len: int
    layouts: tuple[KVLayout, ...]

    @property
    def token_flops(self) -> int:
        """Counts the operations of a token, those of attention apart."""
        return FLOPS_PER_WEIGHT * self.num_active_weights

    def why_not_split(self, tp_size: int) -> str:
        """Returns why so many ranks cannot share the model; "" if they can."""
        if self.num_heads % tp_size:
            return f"{self.num_heads} attention heads cannot be divided among {tp_size} ranks"
        if not all(each.can_split(tp_size) for each in self.layouts if not each.holds.is_state):
            return f"{self.layouts[0].num_kv_heads} KV heads cannot be divided among {tp_size} ranks"
        return ""


def model_needs(model: str) -> ModelNeeds:
    """Counts the needs of a folder or a hub's model, whose weights are not fetched. Raises ModelError."""
    import torch
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from pd_cluster.kv.pool_memory import TORCH_DTYPES
    from pd_cluster.model.language_model.cache_declaration import caches_of, least_layouts
    from pd_cluster.model.loading.transformers_modules import config_of

    transformers_logging.set_verbosity_error()
    checkpoint = _checkpoint(resolve_model(model, needs_weights=False))
    config, dtype = config_of(checkpoint), _dtype(checkpoint)
    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config, dtype=TORCH_DTYPES[dtype]).eval()
        layouts = least_layouts(caches_of(built), 1, dtype)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, NotImplementedError) as error:
        place = checkpoint.path / "config.json"
        raise ModelError(f"{place}: cannot be built without weights: {' '.join(str(error).split())}") from error
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


def _checkpoint(path: Path) -> Checkpoint:
    """Opens a whole folder, or one whose weights are not there. Raises ModelError."""
    if any(path.glob("*.safetensors")):
        return Checkpoint.open(str(path))
    file = path / "config.json"
    config = read_json(file)
    if (model_type := config.get("model_type")) not in SUPPORTED_MODEL_TYPES:
        raise ModelError(
            f"{file}: model_type {model_type!r}: without weights, only types of docs/models.md are planned"
        )
    if found := next((name for name in QUANTIZERS_FIELDS if config.get(name)), ""):
        raise ModelError(f"{file}: {found}: only their files tell the size of quantized weights; give a whole folder")
    return Checkpoint(path, config, {}, "", None)


def _dtype(checkpoint: Checkpoint) -> str:
    """Returns that of an accelerator's weights and pools, in 16 bits where the files have more."""
    found = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "")
    return found if found in SIXTEEN_BITS else "bfloat16"


def _weight_nbytes(checkpoint: Checkpoint, num_weights: int, dtype: str) -> float:
    """Returns the bytes of a weight in memory, on average."""
    if checkpoint.quantization is None:
        return DTYPE_NBYTES[dtype]
    if found := weights_nbytes(checkpoint.path):
        return found / num_weights
    raise ModelError(f"{checkpoint.path}: no *.safetensors file; {called('model')} needs those of quantized weights")


def _counts(model: torch.nn.Module, config: Any) -> tuple[int, int, int]:
    """Counts all weights, those that are looked up and never multiplied, and those of experts that a token skips."""
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
    """Counts the products of a query with a key and of a weight with a value, of all heads in all layers.

    Latent attention is counted with keys and values of every head, as prompts compute it.
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
