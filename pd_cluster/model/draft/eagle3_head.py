"""Loads an EAGLE-3 head: a decoder layer that reads a token's embedding and states of the model's inner layers.

Its attention reads the normed embedding followed by the normed states; its residual stream starts with the states only.
`fc` computes the states once per token, from the inputs of three of the model's layers. Later drafts of a chain use
the head's own output instead. See https://arxiv.org/abs/2503.01840 and vLLM's llama_eagle3.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pd_cluster.checkpoints.eagle3_config import Eagle3Config
from pd_cluster.checkpoints.eagle3_folder import (
    EMBEDDING,
    FC,
    INPUT_NORM,
    LAYER,
    LM_HEAD,
    Eagle3Folder,
    Eagle3Target,
)
from pd_cluster.checkpoints.hub import resolve_model
from pd_cluster.errors import ConfigError, ModelError, called, first_line
from pd_cluster.kv.kv_layout import keys_and_values
from pd_cluster.model.draft.draft_head import FIRST_KEY, DraftHead
from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.kernels.cpu.ops import CpuOps
from pd_cluster.model.language_model.cache_declaration import LayerCache, has_latents
from pd_cluster.model.language_model.causal_lm import CausalLM
from pd_cluster.model.language_model.fuse_mlp import ACTIVATIONS
from pd_cluster.model.language_model.fused_lm import FusedCausalLM, ModelEnds, Served
from pd_cluster.model.layers.fused_layer import FusedLayer, HeadsAttention
from pd_cluster.model.layers.gated_mlp import GatedMLP
from pd_cluster.model.layers.linear_weight import PlainWeight
from pd_cluster.model.layers.ops import Heads, Norm, Ops, Rope
from pd_cluster.model.layers.packed_linear import Linear
from pd_cluster.model.layers.rope.rope_tables import WHOLE_MODEL, RopeTables
from pd_cluster.model.loading.transformers_modules import config_of
from pd_cluster.model.planning.load_plan import LoadPlan

log = logging.getLogger(__name__)

PLACE = called("speculative_config")
WAY_OUT = "give method ngram or suffix"
IDS_AT_ONCE = 4096  # rows to compare at a time


def check_eagle3(plan: LoadPlan) -> Eagle3Folder:
    """Returns the head that the settings name, without its weights. Raises ConfigError, ModelError.

    The head must match the model that will be loaded.
    """
    speculation = plan.config.speculation
    method = f"{PLACE}: method eagle3"
    if plan.device.is_accelerator:
        raise ConfigError(f"{method}: draft heads run on CPUs only, and this is {plan.device.kind}; {WAY_OUT}")
    if not plan.is_alone:
        raise ConfigError(f"{method}: {called('tensor_parallel_size')} {plan.group.size}: use 1, or {WAY_OUT}")
    where = f"{PLACE}: model"
    path = resolve_model(
        speculation.model, speculation.revision, plan.config.download_dir, where, revision_flag=f"{PLACE}: revision"
    )
    folder = Eagle3Folder.read(path)
    _rotary(folder.config)
    config = config_of(plan.checkpoint)
    if getattr(config, "kv_lora_rank", None):
        raise ConfigError(
            f"{method}: {plan.checkpoint.path} keeps latents, but {folder.config.file} has a layer of keys and values; "
            f"give method mtp, ngram or suffix"
        )
    num_heads = config.num_attention_heads
    folder.check_fits(
        Eagle3Target(
            path=plan.checkpoint.path,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            vocab_size=config.vocab_size,
        )
    )
    return folder


def load_eagle3(plan: LoadPlan, target: CausalLM) -> DraftHead:
    """Loads the head that the settings of the target's plan name. Raises ConfigError, ModelError.

    If the target's matrices are bfloat16 and the CPU can multiply these, the head's matrices are bfloat16, too. All
    other values are float32.
    """
    folder = check_eagle3(plan)
    if not isinstance(target, FusedCausalLM) or not isinstance(target.ops, CpuOps):
        raise ConfigError(
            f"{PLACE}: method eagle3: {plan.checkpoint.path} runs with {target.kernels}, but heads need the attention "
            f"of the C kernels; {WAY_OUT}"
        )
    _check_caches(folder, target)
    dtype = torch.bfloat16 if target.bf16_way else torch.float32
    with torch.no_grad():
        weights = _HeadWeights(folder, target.ops, dtype)
        model = _model_of(weights, target)
        project = _projection(weights)
    taps = folder.taps(len(target.layers))
    found = folder.token_ids
    token_ids = None if found is None else torch.tensor(found, dtype=torch.int64)
    read = f"inputs of layers {', '.join(map(str, taps))}" if taps else "final states"
    log.info("draft head: %s, EAGLE-3 over the model's %s, %s", folder.path, read, dtype)
    return DraftHead(model, folder.identity, project, taps, token_ids)


def _check_caches(folder: Eagle3Folder, target: FusedCausalLM) -> None:
    """Raises ModelError unless the model's layers and the head's layer keep the same planes."""
    config, kept = folder.config, target.caches[0]
    wanted = LayerCache(config.num_kv_heads, keys_and_values(config.head_dim))
    if has_latents(target.caches) or kept.apart_from_index != wanted:
        raise ModelError(
            f"{config.file}: the head's layer keeps {_shape(wanted)} for each token, but the model's layers keep "
            f"{_shape(kept.apart_from_index)}; {WAY_OUT}"
        )


def _shape(cache: LayerCache) -> str:
    planes = " and ".join(f"{plane.name} ({plane.width} values)" for plane in cache.planes)
    return f"{cache.num_heads} {'head' if cache.num_heads == 1 else 'heads'} of {planes}" if planes else "nothing"


class _HeadWeights:
    """Reads a head's tensors as parts of a fused model. `dtype`: the dtype of matrices; all others become float32."""

    def __init__(self, folder: Eagle3Folder, ops: Ops, dtype: torch.dtype) -> None:
        self.folder, self.config, self.ops, self._dtype = folder, folder.config, ops, dtype

    def __contains__(self, name: str) -> bool:
        return name in self.folder.weights

    def matrix(self, name: str) -> torch.Tensor:
        return self._read(name, self._dtype)

    def linear(self, *names: str) -> Linear:
        """Returns one layer that joins the named layers along their output features."""
        return self.ops.linear(PlainWeight.join([PlainWeight(self.matrix(name)) for name in names]))

    def norm(self, name: str) -> Norm:
        return Norm(self._read(name, torch.float32), self.config.eps)

    def _read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        weight = self.folder.weights[name]
        try:
            with safe_open(weight.file, framework="pt") as stream:
                found: torch.Tensor = stream.get_tensor(weight.key)
        except (OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"{weight.file}: {weight.key}: cannot be read: {error}") from error
        return found.to(dtype, copy=True)  # a copy, because a view would keep the file mapped


@dataclass(frozen=True, slots=True)
class PairAttention:
    """The attention of a head's layer. Its input is a token's normed embedding, followed by the normed states."""

    inner: HeadsAttention
    embedding_norm: Norm

    @property
    def output(self) -> Linear:
        return self.inner.output

    def attend(self, x: torch.Tensor, ropes: dict[str, Rope], batch: ForwardBatch) -> torch.Tensor:
        """Attends. `x`: the normed states. See LayerAttention."""
        assert batch.pairs is not None
        assert batch.pairs.embeddings is not None
        embeddings = self.inner.ops.norm(batch.pairs.embeddings, self.embedding_norm)
        return self.inner.attend(torch.cat((embeddings, x), dim=-1), ropes, batch)


def _model_of(weights: _HeadWeights, target: FusedCausalLM) -> FusedCausalLM:
    config, ops = weights.config, weights.ops
    hidden_norm, norm = weights.norm(f"{LAYER}hidden_norm.weight"), weights.norm("norm.weight")
    head = weights.linear(LM_HEAD) if LM_HEAD in weights else target.logits_of
    rotary = _rotary(config)
    ends = ModelEnds(
        embed=_embedding(weights, target),
        ropes=RopeTables(rotary, [WHOLE_MODEL], (config.head_dim, False), torch.zeros(1, 1), _turn),
        norm=norm if config.norm_output else None,
        head=head if config.norm_output else _behind(norm, head, ops),
        vocab_size=rotary.config.vocab_size,
        bf16_way=target.bf16_way,
        join=_joining(hidden_norm, ops) if config.norm_before_residual else lambda _, states: states.clone(),
    )
    layer = FusedLayer(
        attention=_attention(weights, len(target.layers)),
        mlp=GatedMLP(
            weights.linear(*(f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up"))),
            weights.linear(f"{LAYER}mlp.down_proj.weight"),
            ops,
            ACTIVATIONS[config.activation],
            config.intermediate_size,
        ),
        input_norm=None if config.norm_before_residual else hidden_norm,  # otherwise `join` applies this norm
        mlp_norm=weights.norm(f"{LAYER}post_attention_layernorm.weight"),
    )
    cache = LayerCache(config.num_kv_heads, keys_and_values(config.head_dim))
    return FusedCausalLM(rotary.config, ops, [layer], ends, Served((cache,), adapters=target.adapters))


def _rotary(config: Eagle3Config) -> Any:
    """Returns transformers' rotary module; its `config` also describes the layer and the output layer. Raises
    ModelError.
    """
    try:
        return LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=1,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                vocab_size=config.draft_vocab_size or config.vocab_size,
                rms_norm_eps=config.eps,
                hidden_act=config.activation,
                **config.rope,
            )
        )
    # huggingface_hub raises errors of its own for values of the wrong type, and rope formulas raise others.
    except Exception as error:
        raise ModelError(f"{config.file}: {dict(config.rope)}: {first_line(error)}; {WAY_OUT}") from error


def _attention(weights: _HeadWeights, layer_idx: int) -> PairAttention:
    config, attention = weights.config, f"{LAYER}self_attn."
    heads = Heads(
        layer_idx=layer_idx,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scaling=config.head_dim**-0.5,
        sliding_window=config.window,
        q_norm=weights.norm(f"{attention}q_norm.weight") if config.norms_heads else None,
        k_norm=weights.norm(f"{attention}k_norm.weight") if config.norms_heads else None,
        first_key=FIRST_KEY,
    )
    inner = HeadsAttention(
        heads,
        weights.linear(*(f"{attention}{name}_proj.weight" for name in "qkv")),
        weights.linear(f"{attention}o_proj.weight"),
        weights.ops,
    )
    return PairAttention(inner, weights.norm(f"{LAYER}input_layernorm.weight"))


def _embedding(weights: _HeadWeights, target: FusedCausalLM) -> Linear:
    """Returns the head's own embedding if its values differ from the target's; otherwise the target's embedding."""
    if EMBEDDING not in weights:
        return target.ends.embed
    own = weights.matrix(EMBEDDING)

    def embed(input_ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(input_ids, own).float()

    for start in range(0, len(own), IDS_AT_ONCE):
        ids = torch.arange(start, min(start + IDS_AT_ONCE, len(own)))
        if not torch.equal(embed(ids), target.ends.embed(ids)):
            log.info("draft head: %s has its own embedding, %d MiB", weights.folder.path, own.nbytes >> 20)
            return embed
    return target.ends.embed


def _projection(weights: _HeadWeights) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns `DraftHead.project`."""
    config, ops = weights.config, weights.ops
    if not config.num_taps:
        return lambda states: states
    fc = weights.linear(FC)
    norm = weights.norm(INPUT_NORM) if config.norms_before_fc else None
    numbers = range(config.num_taps if config.norms_each_tap else 0)
    each = [weights.norm(f"fc_norm.{at}.weight") for at in numbers]

    def project(tapped: torch.Tensor) -> torch.Tensor:
        if each:
            parts = tapped.chunk(config.num_taps, dim=-1)
            tapped = torch.cat([ops.norm(part.contiguous(), own) for part, own in zip(parts, each, strict=True)], -1)
        return fc(tapped if norm is None else ops.norm(tapped, norm))

    return project


def _behind(norm: Norm, head: Linear, ops: Ops) -> Linear:
    """Returns the output layer with the norm before it; in a chain of drafts, the states are those before the norm."""
    return lambda x: head(ops.norm(x, norm))


def _joining(norm: Norm, ops: Ops) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda _, states: ops.norm(states, norm)


def _turn(module: Any, x: torch.Tensor, positions: torch.Tensor, _: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Uses the first of M-RoPE's three rows of positions, which are equal for text."""
    found: tuple[torch.Tensor, torch.Tensor] = module(x, positions if positions.dim() == 2 else positions[0])
    return found
