"""Fuses transformers' loaded modules into layers: QKV as one linear, gate and up as one, weights packed on CPU.

Handles known architectures only (model/quirks.py); others stay as they are. Works layer by layer and drops each plain
weight as soon as it is packed, so that memory stays near one copy.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from pd_cluster.model.causal_lm import FusedCausalLM, FusedLayer
from pd_cluster.model.layers.expert_weight import ExpertWeights, experts_of
from pd_cluster.model.layers.gated import Activation, ExpertRouter, Experts, GatedMLP, SharedExpert
from pd_cluster.model.layers.linear import Linear, packs
from pd_cluster.model.layers.ops import Heads, Norm, Ops, Rows
from pd_cluster.model.layers.packing import rows_apart
from pd_cluster.model.layers.rope_tables import RopeTables, qkv_order
from pd_cluster.model.layers.weight import between_ranks, joined, weight_of
from pd_cluster.model.lora.places import AdapterPlaces
from pd_cluster.model.parallel.layers import Share, SpanningNorm
from pd_cluster.model.quirks import ARCHITECTURES, Quirks
from pd_cluster.model.vision.experts import ByKind
from pd_cluster.model.wide import WideEmbedding, is_narrow, widen
from pd_cluster.native.products import bf16_way

log = logging.getLogger(__name__)

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def can_fuse(model: torch.nn.Module) -> bool:
    """Whether the architecture is known, and where it runs on CPU, computes in float32 (model/wide.py included)."""
    if not is_known(type(model), model.config) or any(isinstance(module, ByKind) for module in model.modules()):
        return False  # tokens of texts and of pictures have experts of their own
    return is_narrow(model) or all(p.dtype == torch.float32 or p.device.type != "cpu" for p in model.parameters())


def is_known(architecture: type[Any], config: Any) -> bool:
    """Whether layers of this class of transformers' models can be fused, with this config."""
    quirks = ARCHITECTURES.get(architecture.__name__)
    if quirks is None or not architecture.__module__.startswith("transformers.models."):
        return False
    return all(getattr(config, name, value) == value for name, value in quirks.only_with.items())


def why_not_deterministic(model: Any) -> str:
    """Returns which part of a model would still be computed by modules whose sums follow the batch; "" if none."""
    if not can_fuse(model):
        return f"{type(model).__name__}'s layers are not fused"
    if any(isinstance(module, SpanningNorm) for module in model.modules()):
        return f"{type(model).__name__}'s norms of queries and keys span several ranks"
    name = _activation_name(model.config)
    if ARCHITECTURES[type(model).__name__].activation is None and name not in ACTIVATIONS:
        return f"{type(model).__name__}'s activation {name} has no kernel"
    return ""


def fuse(model: Any, ops: Ops, share: Share | None = None, adapters: AdapterPlaces | None = None) -> FusedCausalLM:
    """Takes the model apart: its linear layers are gone afterwards, and so is the mapping of the files.

    `adapters`: its linear layers shall take adapters, which are kept there.
    `share`: the model is one rank's share, with the share installed; the fused one does its own sums.
    """
    if share is not None:
        share.remove(model)
    config, inner = model.config, model.model
    is_wide = is_narrow(model)
    if is_wide:
        widen(model)
    tied = model.lm_head.weight is inner.embed_tokens.weight
    quirks = ARCHITECTURES[type(model).__name__]
    attentions = [layer.self_attn for layer in inner.layers]
    ropes = RopeTables(
        inner.rotary_emb,
        [quirks.rope(attention) for attention in attentions],
        (attentions[0].head_dim, quirks.pairs_neighbours),
        inner.embed_tokens.weight[:1].float() if is_wide else inner.embed_tokens.weight[:1],
        quirks.turn,
    )
    layers = [
        _fuse_layer(layer, config, quirks, ropes.order, _Maker(ops, adapters, f"model.layers.{index}"))
        for index, layer in enumerate(_progress(inner.layers))
    ]
    head = ops.linear(joined(model.lm_head))
    if adapters is not None:
        head = adapters.beside_head(head, "lm_head", model.lm_head.out_features, model.lm_head.in_features)
    del model.lm_head
    embedding = inner.embed_tokens
    if is_wide or packs(embedding.weight):  # otherwise the head uses this weight, or one of its own
        embedding.weight = torch.nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
        if tied:
            log.info("tied embeddings: the output layer has a packed copy of the embedding's rows")
    if is_wide:
        embedding = WideEmbedding(embedding)
    scale = float(getattr(inner.embed_tokens, "scalar_embed_scale", 1.0))
    embed = embedding if share is None else share.embedding(embedding)
    if adapters is not None:
        vocab_size = config.vocab_size if share is None else share.plan.vocab_size
        embed = adapters.beside_embedding(embed, "model.embed_tokens", (vocab_size, config.hidden_size), scale)
    factor = config.embedding_multiplier if quirks.multiplies else 1.0
    fused = FusedCausalLM(
        config=config,
        ops=ops,
        embed=embed if factor == 1.0 else _multiplied(embed, factor),
        ropes=ropes,
        layers=layers,
        norm=_Maker(ops, adapters, "model").norm(inner, "norm", quirks),
        head=_divided(head, config.logits_scaling) if quirks.multiplies else head,
        vocab_size=0 if share is None else share.plan.vocab_size,
        group=None if share is None else share.group,
        bf16_way=(bf16_way() or "") if is_wide else "",
    )
    fused.embedding_factor = factor
    return fused


def _multiplied(embed: Linear, factor: float) -> Linear:
    return lambda input_ids: embed(input_ids) * factor


def _divided(head: Linear, divisor: float) -> Linear:
    return lambda x: head(x).div_(divisor)


def _progress(layers: Any) -> Iterator[Any]:
    """Shows a progress bar on a terminal; otherwise logs one line."""
    on_terminal = sys.stderr.isatty()
    if not on_terminal:
        log.info("packing the weights of %d layers", len(layers))
    yield from transformers_logging.tqdm(layers, desc="Packing weights", unit="layer", disable=not on_terminal)


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes the linear layers of one decoder layer, with adapters beside them if there are to be any."""

    ops: Ops
    adapters: AdapterPlaces | None
    path: str

    def of(self, name: str) -> _Maker:
        return replace(self, path=f"{self.path}.{name}")

    def joined(self, module: Any, *choices: tuple[str, ...], rows: torch.Tensor | None = None) -> Linear:
        """Takes the linear layers of the first choice that the module has, joined into one, out of it."""
        names = next(names for names in choices if hasattr(module, names[0]))
        modules = {name: getattr(module, name) for name in names}
        found = self.ops.linear(joined(*modules.values(), rows=rows))
        if len(names) == 1:  # layers that are joined have whole rows on every rank
            found = between_ranks(modules[names[0]], found)
        if self.adapters is not None:
            features = {name: (each.out_features, each.in_features) for name, each in modules.items()}
            found = self.adapters.beside(found, self.path, features, rows)
        for name in names:
            delattr(module, name)
        return found

    def norm(self, module: Any, name: str, quirks: Quirks) -> Norm:
        """Takes a norm of whole rows."""
        found = getattr(module, name)
        norm = _norm(found, quirks)
        if self.adapters is not None:
            eps, dtype = norm.eps, found.weight.dtype
            self.adapters.norms.beside(
                f"{self.path}.{name}", norm, lambda weight: Norm(_norm_weight(weight.to(dtype), quirks), eps)
            )
        return norm

    def gated_mlp(self, mlp: Any, activation: Activation) -> GatedMLP:
        intermediate_size: int = mlp.down_proj.in_features
        gate_up = self.joined(mlp, ("gate_up_proj",), ("gate_proj", "up_proj"))
        down = self.joined(mlp, ("down_proj",))
        if self.adapters is None:
            return GatedMLP(gate_up, down, self.ops, activation, intermediate_size)
        rows = self.adapters.rows
        return GatedMLP(gate_up, down, self.ops, activation, intermediate_size, lambda: rows.are_adapted)


def _fuse_layer(layer: Any, config: Any, quirks: Quirks, order: torch.Tensor | None, maker: _Maker) -> FusedLayer:
    attention = layer.self_attn
    heads = _heads(attention, config, quirks, order)
    rows = None if order is None else qkv_order(order, heads.num_heads, heads.num_kv_heads)
    beside = maker.of("self_attn")
    qkv = beside.joined(attention, ("qkv_proj",), ("q_proj", "k_proj", "v_proj"), rows=rows)
    fused = FusedLayer(
        heads=heads,
        qkv=qkv,
        output=beside.joined(attention, ("o_proj",)),
        mlp=_mlp(layer.mlp, config, quirks, maker.of("mlp")),
        rope=quirks.rope(attention),
        spanning=_spanning(attention, heads, maker.ops, quirks) if quirks.norms_span_heads else (),
        residual_multiplier=config.residual_multiplier if quirks.multiplies else 1.0,
        **{role: maker.norm(layer, name, quirks) for role, name in quirks.norms.items()},
    )
    del layer.mlp
    return fused


def _heads(attention: Any, config: Any, quirks: Quirks, order: torch.Tensor | None) -> Heads:
    norms = {}
    if hasattr(attention, "q_norm") and not quirks.norms_span_heads:
        norms = {name: _norm(getattr(attention, name), quirks, order) for name in ("q_norm", "k_norm")}
    sinks = getattr(attention, "sinks", None)
    return Heads(
        layer_idx=attention.layer_idx,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        sliding_window=quirks.window(attention),
        softcap=attention.attn_logit_softcapping if quirks.caps_scores else None,
        sinks=None if sinks is None else sinks.detach().clone(),
        **norms,
    )


def _norm(module: Any, quirks: Quirks, order: torch.Tensor | None = None) -> Norm:
    """`order`: that of a head's features, if they are what is normed."""
    weight = _norm_weight(module.weight.detach().clone(), quirks)
    if order is not None:
        weight = weight[order.to(weight.device)]
    return Norm(weight, module.eps if hasattr(module, "eps") else module.variance_epsilon)


def _norm_weight(weight: torch.Tensor, quirks: Quirks) -> torch.Tensor:
    """Returns what a norm multiplies by, from a weight of the files."""
    if quirks.adds_one:
        return 1.0 + weight.float()  # in 16 bits the sum would lose the weight
    return weight.float() if quirks.scales_in_float32 else weight


def _spanning(
    attention: Any, heads: Heads, ops: Ops, quirks: Quirks
) -> tuple[tuple[slice, Callable[[torch.Tensor], torch.Tensor]], ...]:
    """Returns the norms of all query heads and of all key heads, each with its part of the rows of QKV."""
    first_key = heads.num_heads * heads.head_dim
    parts = (slice(first_key), slice(first_key, first_key + heads.num_kv_heads * heads.head_dim))
    return tuple(
        (part, _spanning_norm(module, ops, quirks))
        for part, module in zip(parts, (attention.q_norm, attention.k_norm), strict=True)
    )


def _spanning_norm(module: Any, ops: Ops, quirks: Quirks) -> Callable[[torch.Tensor], torch.Tensor]:
    if isinstance(module, SpanningNorm):  # with the other ranks
        return module
    norm = _norm(module, quirks)
    return lambda x: ops.norm(x, norm)


def _activation_name(config: Any) -> str:
    """Returns transformers' name of a config's activation."""
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _mlp(mlp: Any, config: Any, quirks: Quirks, maker: _Maker) -> Rows:
    """Returns the MLP as a function, [num_rows, hidden_size] to the same shape."""
    ops = maker.ops
    activation = quirks.activation or ACTIVATIONS.get(_activation_name(config))
    if activation is None:  # an activation without a kernel: the module itself, on a batch of one sequence
        if maker.adapters is not None:
            maker.adapters.take_over(mlp, maker.path)
        return lambda x: mlp(x[None])[0]
    if not hasattr(mlp, "experts"):
        return maker.gated_mlp(mlp, activation)
    experts = ops.experts(ExpertRouter.of(mlp, quirks.router), _experts(mlp, quirks), activation)
    if maker.adapters is not None and isinstance(experts, Experts):
        features = getattr(mlp, quirks.router).weight.shape
        router = {quirks.router: (int(features[0]), int(features[1]))}
        experts.router = maker.adapters.beside(experts.router, maker.path, router, None)
        maker.adapters.beside_experts(experts.layers, f"{maker.path}.experts")
    if getattr(mlp, "shared_experts", None) is not None:
        return SharedExpert(experts, maker.of("shared_experts").gated_mlp(mlp.shared_experts, activation))
    if not hasattr(mlp, "shared_expert"):
        return experts
    shared = maker.of("shared_expert").gated_mlp(mlp.shared_expert, activation)
    gate = weight_of(mlp.shared_expert_gate).matrix()
    if packs(gate):
        weigh = rows_apart(gate)
        if maker.adapters is not None:
            own = {"shared_expert_gate": (int(gate.shape[0]), int(gate.shape[1]))}
            weigh = maker.adapters.beside(weigh, maker.path, own, None)
    else:
        weigh = maker.joined(mlp, ("shared_expert_gate",))
    return SharedExpert(experts, shared, weigh)


def _experts(mlp: Any, quirks: Quirks) -> ExpertWeights:
    """Takes the experts' weights out of a sparse block, gates before ups."""
    weights = experts_of(mlp.experts)
    del mlp.experts
    if not quirks.interleaves_gates:
        return weights
    rows = torch.arange(weights.gate_up.out_features)
    return replace(weights, gate_up=weights.gate_up.reordered(torch.cat((rows[::2], rows[1::2]))))
