"""Fuses transformers' loaded modules into layers: QKV as one linear, gate and up as one, weights packed on CPU.

Handles known architectures only (model/quirks.py); others stay as they are. Works layer by layer and drops each plain
weight as soon as it is packed, so that memory stays near one copy.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from pd_cluster.model.fuse_attention import has_latents, heads_attention, latent_attention
from pd_cluster.model.fused_lm import FusedCausalLM, ModelEnds, Served
from pd_cluster.model.layer_maker import LayerMaker
from pd_cluster.model.layers.expert_weight import ExpertWeights, experts_of
from pd_cluster.model.layers.fused_layer import FusedLayer
from pd_cluster.model.layers.gated import Activation, ExpertRouter, Experts, SharedExpert
from pd_cluster.model.layers.linear import Linear, packs
from pd_cluster.model.layers.ops import Ops, Rows
from pd_cluster.model.layers.packing import rows_apart
from pd_cluster.model.layers.rope_tables import RopeTables
from pd_cluster.model.layers.up_projections import put_up_projections
from pd_cluster.model.layers.weight import joined, weight_of
from pd_cluster.model.parallel.layers import NORM_IN_MLP, Share, SpanningNorm
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


def fuse(model: Any, ops: Ops, served: Served, share: Share | None = None) -> FusedCausalLM:
    """Takes the model apart: its linear layers are gone afterwards, and so is the mapping of the files.

    `served.adapters`: its linear layers shall take adapters, which are kept there.
    `share`: the model is one rank's share, with the share installed; the fused one does its own sums.
    """
    if share is not None:
        share.remove(model)
    config, inner = model.config, model.model
    is_wide = is_narrow(model)
    if is_wide:
        widen(model)
    put_up_projections(model)
    quirks = ARCHITECTURES[type(model).__name__]
    maker = LayerMaker(ops, None if served.adapters is None else served.adapters.places, "model")
    like = inner.embed_tokens.weight[:1]
    ropes = _ropes(inner, config, quirks, like.float() if is_wide else like)
    layers = [
        _fuse_layer(layer, config, quirks, ropes.order, maker.of(f"layers.{index}"))
        for index, layer in enumerate(_progress(inner.layers))
    ]
    ends = _ends(model, quirks, ropes, maker, share)
    group = None if share is None else share.group
    return FusedCausalLM(
        config, ops, layers, replace(ends, bf16_way=(bf16_way() or "") if is_wide else ""), served, group
    )


def _ropes(inner: Any, config: Any, quirks: Quirks, like: torch.Tensor) -> RopeTables:
    attentions = [layer.self_attn for layer in inner.layers]
    first = attentions[0]
    width = first.qk_rope_head_dim if has_latents(first) else first.head_dim
    kinds = [quirks.rope(attention) for attention in attentions]
    return RopeTables(inner.rotary_emb, kinds, (width, quirks.pairs_neighbours(config)), like, quirks.turn)


def _ends(model: Any, quirks: Quirks, ropes: RopeTables, maker: LayerMaker, share: Share | None) -> ModelEnds:
    """Takes the parts around the layers. The output layer first: it may be packed from the embedding's rows."""
    config, inner, adapters = model.config, model.model, maker.adapters
    tied = model.lm_head.weight is inner.embed_tokens.weight
    multipliers = quirks.multipliers(config)
    head = maker.ops.linear(joined(model.lm_head))
    if adapters is not None:
        head = adapters.beside_head(head, "lm_head", model.lm_head.out_features, model.lm_head.in_features)
    del model.lm_head
    embedding = inner.embed_tokens
    is_wide = is_narrow(embedding)
    if is_wide or packs(embedding.weight):  # otherwise the head uses this weight, or one of its own
        embedding.weight = torch.nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
        if tied:
            log.info("tied embeddings: the output layer has a packed copy of the embedding's rows")
    if is_wide:
        embedding = WideEmbedding(embedding)
    scale = float(getattr(inner.embed_tokens, "scalar_embed_scale", 1.0))
    embed = embedding if share is None else share.embedding(embedding)
    vocab_size = config.vocab_size if share is None else share.plan.vocab_size
    if adapters is not None:
        embed = adapters.beside_embedding(embed, "model.embed_tokens", (vocab_size, config.hidden_size), scale)
    return ModelEnds(
        embed=embed if multipliers.embeddings == 1.0 else _multiplied(embed, multipliers.embeddings),
        ropes=ropes,
        norm=maker.norm(inner, "norm", quirks),
        head=head if multipliers.logits_divisor == 1.0 else _divided(head, multipliers.logits_divisor),
        vocab_size=vocab_size,
        embedding_factor=multipliers.embeddings,
    )


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


def _fuse_layer(layer: Any, config: Any, quirks: Quirks, order: torch.Tensor | None, maker: LayerMaker) -> FusedLayer:
    make = latent_attention if has_latents(layer.self_attn) else heads_attention
    norms = {role: maker.norm(layer, name, quirks) for role, name in quirks.norms.items()}
    mlp = getattr(layer, quirks.mlp)
    if hasattr(mlp, NORM_IN_MLP):
        norms["post_mlp_norm"] = maker.of("mlp").norm(mlp, NORM_IN_MLP, quirks)
    fused = FusedLayer(
        attention=make(layer.self_attn, config, quirks, order, maker.of("self_attn")),
        mlp=_mlp(mlp, config, quirks, maker.of("mlp")),
        residual_multiplier=quirks.multipliers(config).residual,
        **norms,
    )
    delattr(layer, quirks.mlp)
    return fused


def _activation_name(config: Any) -> str:
    """Returns transformers' name of a config's activation."""
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _mlp(mlp: Any, config: Any, quirks: Quirks, maker: LayerMaker) -> Rows:
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
