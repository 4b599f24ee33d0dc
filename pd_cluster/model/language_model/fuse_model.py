"""Fuses the modules of a loaded model into layers: QKV as one linear, gate and up as one; packs weights on CPU.

Only the architectures in architecture_quirks.py are fused; others stay unchanged. Each plain weight is dropped as soon
as it is packed, layer by layer, so that peak memory stays near one copy of the model.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from pd_cluster.devices.device import Device
from pd_cluster.model.language_model.architecture_quirks import ARCHITECTURES, Quirks
from pd_cluster.model.language_model.fuse_attention import has_latents, heads_attention, latent_attention
from pd_cluster.model.language_model.fuse_mlp import ACTIVATIONS, activation_name, mlp_of
from pd_cluster.model.language_model.fuse_states import attends, is_recurrent, mixers_of, recurrent, side_by_side
from pd_cluster.model.language_model.fused_lm import FusedCausalLM, ModelEnds, Served
from pd_cluster.model.language_model.layer_maker import LayerMaker
from pd_cluster.model.language_model.mixed_precision import WideEmbedding, is_narrow, widen
from pd_cluster.model.layers.attention.up_projections import split_up_projections
from pd_cluster.model.layers.expert_share import ExpertBlocks, ExpertShare
from pd_cluster.model.layers.fused_layer import FusedLayer, LayerAttention
from pd_cluster.model.layers.linear_weight import joined
from pd_cluster.model.layers.ops import Ops
from pd_cluster.model.layers.packed_linear import Linear, packs
from pd_cluster.model.layers.rope.rope_tables import RopeTables
from pd_cluster.model.layers.states.recurrent_layers import NoAttention
from pd_cluster.model.lora.lora_targets import LoraTargets
from pd_cluster.model.parallel.parallel_layers import NORM_IN_MLP, RankShare, SpanningGatedNorm, SpanningNorm
from pd_cluster.model.vision.vision_experts import ModalityExperts
from pd_cluster.native.packed_products import bf16_way

log = logging.getLogger(__name__)

ROTARY = ("rotary_emb", "pos_emb")  # names of the rotary embedding; a model without rope has none


def can_fuse(model: torch.nn.Module) -> bool:
    """Whether the architecture is known and, on CPU, computes in float32 (also with mixed_precision.py).

    Recurrent layers also need kernels: see fuse_states.has_kernels.
    """
    if not is_known(type(model), model.config) or any(
        isinstance(module, ModalityExperts) for module in model.modules()
    ):
        return False  # text tokens and picture tokens use different experts
    return is_narrow(model) or all(p.dtype == torch.float32 or p.device.type != "cpu" for p in model.parameters())


def is_known(architecture: type[Any], config: Any) -> bool:
    """Whether the layers of this transformers class can be fused, with this config."""
    quirks = ARCHITECTURES.get(architecture.__name__)
    if quirks is None or not architecture.__module__.startswith("transformers.models."):
        return False
    return all(getattr(config, name, value) == value for name, value in quirks.only_with.items())


def why_not_deterministic(model: Any) -> str:
    """Returns a phrase for the part of a model whose order of sums depends on the batch; "" if there is none."""
    if not can_fuse(model):
        return f"{type(model).__name__}'s layers are not fused"
    if any(isinstance(module, SpanningNorm) for module in model.modules()):
        return f"{type(model).__name__}'s norms of queries and keys span several ranks"
    if any(isinstance(module, SpanningGatedNorm) for module in model.modules()):
        return f"{type(model).__name__}'s norms of states span several ranks"
    name = activation_name(model.config)
    if ARCHITECTURES[type(model).__name__].activation is None and name not in ACTIVATIONS:
        return f"{type(model).__name__}'s activation {name} has no kernel"
    return ""


def fuse(model: Any, ops: Ops, served: Served, share: RankShare | None = None) -> FusedCausalLM:
    """Fuses the model and takes it apart: afterwards `model` has no linear layers and no mapping to its files.

    `served.adapters`: collects the linear layers that can have adapters. `share`: the rank's share whose parts are
    installed in `model`; they are removed here, because the fused model sums over the ranks by itself.
    """
    if share is not None:
        share.remove(model)
    config, inner = model.config, model.model
    is_wide = is_narrow(model)
    if is_wide:
        widen(model)
    split_up_projections(model)
    quirks = ARCHITECTURES[type(model).__name__]
    maker = LayerMaker(ops, None if served.adapters is None else served.adapters.places, "model", served.experts)
    like = getattr(inner, quirks.embedding).weight[:1]
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


def fused_parts(
    model: Any, fused: FusedCausalLM, device: Device, share: RankShare | None = None, experts: ExpertShare | None = None
) -> Iterator[tuple[Any, Any]]:
    """Yields each part of a fused model together with the same part made from other weights.

    `model`: the modules with the other weights, on the host; `share` and `experts` as at the first load. Only the
    yielded part is on the device, so the caller drops it before the next one.
    """
    if share is not None:
        share.remove(model)
    config, inner, ends = model.config, model.model, fused.ends
    quirks, order = ARCHITECTURES[type(model).__name__], ends.ropes.order
    targets = None if fused.adapters is None else LoraTargets()  # not used: the adapters' memory stays as it is
    maker = LayerMaker(fused.ops, targets, "model", None if experts is None else ExpertBlocks(experts))
    for index, layer in enumerate(inner.layers):
        inner.layers[index] = torch.nn.Identity()
        layer.to(device.torch_name)
        split_up_projections(layer)
        yield fused.layers[index], _fuse_layer(layer, config, quirks, order, maker.of(f"layers.{index}"))
        del layer
    model.to(device.torch_name)
    yield ends, replace(_ends(model, quirks, ends.ropes, maker, share), bf16_way=ends.bf16_way)


def _ropes(inner: Any, config: Any, quirks: Quirks, like: torch.Tensor) -> RopeTables:
    mixers = (module for layer in inner.layers for _, module in mixers_of(layer))
    attentions = [module for module in mixers if attends(module)]
    first = attentions[0]
    width = first.qk_rope_head_dim if has_latents(first) else first.head_dim
    kinds = [quirks.rope(attention) for attention in attentions]
    module = next((found for name in ROTARY if (found := getattr(inner, name, None)) is not None), None)
    return RopeTables(module, kinds, (width, quirks.pairs_neighbours(config)), like, quirks.turn)


def _ends(model: Any, quirks: Quirks, ropes: RopeTables, maker: LayerMaker, share: RankShare | None) -> ModelEnds:
    """Removes the parts around the layers. The output layer is first: it may be packed from the embedding's rows."""
    config, inner, adapters = model.config, model.model, maker.adapters
    embedding = getattr(inner, quirks.embedding)
    tied = model.lm_head.weight is embedding.weight
    multipliers = quirks.multipliers(config)
    head = maker.ops.linear(joined(model.lm_head))
    if adapters is not None:
        head = adapters.attach_head(head, "lm_head", model.lm_head.out_features, model.lm_head.in_features)
    del model.lm_head
    is_wide = is_narrow(embedding)
    if is_wide or packs(embedding.weight):  # otherwise the head shares this weight, or has its own
        embedding.weight = torch.nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
        if tied:
            log.info("tied embeddings: the output layer has a packed copy of the embedding's rows")
    if is_wide:
        embedding = WideEmbedding(embedding)
    scale = float(getattr(getattr(inner, quirks.embedding), "scalar_embed_scale", 1.0))
    embed = embedding if share is None else share.embedding(embedding)
    vocab_size = config.vocab_size if share is None else share.plan.vocab_size
    if adapters is not None:
        embed = adapters.attach_embedding(embed, f"model.{quirks.embedding}", (vocab_size, config.hidden_size), scale)
    return ModelEnds(
        embed=embed if multipliers.embeddings == 1.0 else _multiplied(embed, multipliers.embeddings),
        ropes=ropes,
        norm=maker.norm(inner, quirks.last_norm, quirks),
        head=head if multipliers.logits_divisor == 1.0 else _divided(head, multipliers.logits_divisor),
        vocab_size=vocab_size,
        embedding_factor=multipliers.embeddings,
    )


def _multiplied(embed: Linear, factor: float) -> Linear:
    return lambda input_ids: embed(input_ids) * factor


def _divided(head: Linear, divisor: float) -> Linear:
    return lambda x: head(x).div_(divisor)


def _progress(layers: Any) -> Iterator[Any]:
    """Yields the layers with a progress bar on a terminal; otherwise logs one line."""
    on_terminal = sys.stderr.isatty()
    if not on_terminal:
        log.info("packing the weights of %d layers", len(layers))
    yield from transformers_logging.tqdm(layers, desc="Packing weights", unit="layer", disable=not on_terminal)


def _fuse_layer(layer: Any, config: Any, quirks: Quirks, order: torch.Tensor | None, maker: LayerMaker) -> FusedLayer:
    norms = {role: maker.norm(layer, name, quirks) for role, name in quirks.norms.items()}
    mlp = getattr(layer, quirks.mlp, None)
    if hasattr(mlp, NORM_IN_MLP):
        norms["post_mlp_norm"] = maker.of("mlp").norm(mlp, NORM_IN_MLP, quirks)
    return FusedLayer(
        attention=_first_half(layer, config, quirks, order, maker),
        mlp=mlp_of(layer, quirks.mlp, config, quirks, maker) if quirks.has_second_half else None,
        residual_multiplier=quirks.multipliers(config).residual,
        **norms,
    )


def _first_half(
    layer: Any, config: Any, quirks: Quirks, order: torch.Tensor | None, maker: LayerMaker
) -> LayerAttention:
    """Returns the layer's attention, its state, or both side by side."""
    states, attentions = list[LayerAttention](), list[LayerAttention]()
    for name, module in mixers_of(layer):
        own = maker.of(name)
        if is_recurrent(module):
            states.append(recurrent(module, own))
        elif attends(module):
            make = latent_attention if has_latents(module) else heads_attention
            attentions.append(make(module, config, quirks, order, own))
        else:
            return NoAttention(mlp_of(layer, name, config, quirks, maker))
    if len(states) + len(attentions) == 1:
        return (*states, *attentions)[0]
    (state,), (attention,) = states, attentions
    return side_by_side(layer, state, attention)
