"""Makes the recurrent layers of a fused model from transformers modules, and removes the modules' projections."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch

from pd_cluster.model.language_model.layer_maker import LayerMaker
from pd_cluster.model.layers.fused_layer import LayerAttention
from pd_cluster.model.layers.ops import Ops
from pd_cluster.model.layers.states.recurrent_kernels import StateShape
from pd_cluster.model.layers.states.recurrent_layers import (
    GatedState,
    KimiDeltaState,
    RecurrentLayer,
    RecurrentWithAttention,
    ShortConvState,
)
from pd_cluster.model.layers.states.state_planes import MODULES, StateParts, convolution_of, parts_of, state_modules
from pd_cluster.model.parallel.parallel_layers import MIXERS, SpanningGatedNorm
from pd_cluster.native.recurrence_values import ConvHeads, Convolution, GatedDelta, GatedNorm, Mamba2


def mixers_of(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yields the attentions and recurrent modules of a layer, with their names."""
    for name in MIXERS:
        if (module := getattr(layer, name, None)) is not None:
            yield name, module


def is_recurrent(module: Any) -> bool:
    return type(module).__name__ in MODULES


def attends(module: Any) -> bool:
    """Whether the module is an attention over keys and values, or over latents."""
    return not is_recurrent(module) and any(hasattr(module, name) for name in ("q_proj", "qkv_proj", "kv_b_proj"))


def has_kernels(model: torch.nn.Module, ops: Ops) -> bool:
    """Whether the kernels of `ops` support all recurrent layers of a model."""
    return all(_fits(module, ops) for module in state_modules(model).values())


def _fits(module: Any, ops: Ops) -> bool:
    if getattr(module, "activation", "silu") not in ("silu", "swish"):
        return False
    parts, width = parts_of(module), 0
    if parts.recurrent is not None:
        width = parts.recurrent.num_columns if parts.recurrence == "mamba2" else parts.recurrent.num_rows
    shape = StateShape(parts.kernel_size, len(parts.convolved), width)
    return ops.takes_states(shape, next(module.parameters()).device)


def recurrent(module: Any, maker: LayerMaker) -> LayerAttention:
    """Makes a layer from a module for which `is_recurrent` is true."""
    parts = parts_of(module)
    if parts.recurrence == "short_conv":
        layer = _layer(module, parts, None, maker.ops, has_silu=False)
        return ShortConvState(layer, maker.joined(module, ("in_proj",)), maker.joined(module, ("out_proj",)))
    if parts.recurrence == "kimi_delta":
        return _kimi_delta(module, parts, maker)
    return _mamba2(module, parts, maker) if parts.recurrence == "mamba2" else _gated_delta(module, parts, maker)


def side_by_side(layer: Any, state: LayerAttention, attention: LayerAttention) -> RecurrentWithAttention:
    """Joins the state and the attention of a Falcon-H1 layer."""
    assert isinstance(state, GatedState)
    return RecurrentWithAttention(
        state,
        attention,
        num_features=state.layer.kernel.num_features,
        attention_multiplier=float(layer.attention_in_multiplier),
        output_multipliers=(float(layer.ssm_out_multiplier), float(layer.attn_out_multiplier)),
    )


def _layer(
    module: Any, parts: StateParts, recurrence: GatedDelta | Mamba2 | None, ops: Ops, has_silu: bool = True
) -> RecurrentLayer:
    convolution = convolution_of(module)
    heads = tuple(ConvHeads(part.num_heads, part.channels) for part in parts.convolved)
    own = Convolution(convolution.weight.detach()[:, 0], convolution.bias, heads, has_silu)
    return RecurrentLayer(module.layer_idx, ops.recurrent(own, recurrence))


def _delta(module: Any, parts: StateParts, gate: Any, norm: GatedNorm) -> GatedDelta:
    """`gate`: the module with the parameters of the decays."""
    assert parts.recurrent is not None
    num_heads, key_width, value_width = parts.recurrent
    rates = gate.A_log.detach().float().exp().flatten()
    return GatedDelta(num_heads, parts.convolved[0].num_heads, key_width, value_width, gate.dt_bias, rates, norm)


def _gated_delta(module: Any, parts: StateParts, maker: LayerMaker) -> GatedState:
    norm = GatedNorm("silu after", module.norm.weight.detach(), module.norm.variance_epsilon)
    layer = _layer(module, parts, _delta(module, parts, module, norm), maker.ops)
    num_heads, values = module.num_v_heads, module.value_dim
    widths = (parts.num_channels, values, num_heads, num_heads)
    if hasattr(module, "in_proj_qkvz"):
        projection = maker.joined(module, ("in_proj_qkvz", "in_proj_ba"), rows=_apart(module))
    else:
        projection = maker.joined(module, ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"))
    return GatedState(layer, projection, maker.joined(module, ("out_proj",)), widths)


def _apart(module: Any) -> torch.Tensor:
    """Returns the order that groups the rows of Qwen3-Next's projections by output, not by key head.

    The new order is q, k, v, z, a, b. In the files, q, k, v, z of each key head come first, then b, a of each key head.
    """
    keys, share = module.num_k_heads, module.num_v_heads // module.num_k_heads
    widths = [module.head_k_dim, module.head_k_dim, share * module.head_v_dim, share * module.head_v_dim]
    by_head = torch.arange(keys * sum(widths)).view(keys, -1)
    betas, decays = (torch.arange(keys * 2 * share) + by_head.numel()).view(keys, 2, share).unbind(1)
    return torch.cat([part.flatten() for part in (*torch.split(by_head, widths, dim=1), decays, betas)])


def _kimi_delta(module: Any, parts: StateParts, maker: LayerMaker) -> KimiDeltaState:
    gate = module.forget_gate
    norm = GatedNorm("sigmoid after", module.o_norm.weight.detach(), module.o_norm.variance_epsilon)
    layer = _layer(module, parts, _delta(module, parts, gate, norm), maker.ops)
    module.f_a_proj, module.f_b_proj = gate.f_a_proj, gate.f_b_proj
    names = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")
    widths = parts.num_channels, module.num_heads, module.f_a_proj.out_features, module.g_a_proj.out_features
    del gate.f_a_proj, gate.f_b_proj
    return KimiDeltaState(
        layer,
        projection=maker.joined(module, names),
        decays=maker.joined(module, ("f_b_proj",)),
        gates=maker.joined(module, ("g_b_proj",)),
        output=maker.joined(module, ("o_proj",)),
        widths=widths,
    )


def _mamba2(module: Any, parts: StateParts, maker: LayerMaker) -> GatedState:
    assert parts.recurrent is not None
    num_heads, head_width, size = parts.recurrent
    norm, spanning = GatedNorm("silu after"), None
    if isinstance(module.norm, SpanningGatedNorm):
        norm, spanning = GatedNorm(), module.norm
    elif (own := getattr(module.norm, "weight", None)) is not None:
        is_after = getattr(module.norm, "norm_before_gate", False)
        norm = GatedNorm("silu after" if is_after else "silu before", own.detach(), module.norm.variance_epsilon)
    least, most = module.time_step_limit
    rates = module.A_log.detach().float().exp()
    mamba = Mamba2(
        num_heads, module.n_groups, head_width, size, module.dt_bias, rates, module.D, (float(least), float(most)), norm
    )
    widths = (parts.num_channels, num_heads * head_width, num_heads)
    order = _convolved_first(num_heads * head_width, parts.num_channels, num_heads)
    multipliers = getattr(module, "mup_vector", None)
    return GatedState(
        _layer(module, parts, mamba, maker.ops),
        maker.joined(module, ("in_proj",), rows=order),
        maker.joined(module, ("out_proj",)),
        widths,
        float(getattr(module, "ssm_in_multiplier", 1.0)),
        None if multipliers is None else multipliers.detach().float().flatten()[order],
        spanning,
    )


def _convolved_first(*widths: int) -> torch.Tensor:
    """Returns the order that moves the second of three parts to the front."""
    first, second, third = (torch.arange(start, stop) for start, stop in pairwise(accumulate((0, *widths))))
    return torch.cat((second, first, third))
