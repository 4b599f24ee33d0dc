"""Assigns the heads of recurrent layers, and so the features of weights, to ranks. Uses names and sizes only.

A key head stays together with its value heads, and with its part of everything between the two projections: decays,
betas, gates, channels of the convolution. With fewer heads than ranks, heads are replicated. The ranks add up their
outputs once, after the output projection. transformers' own plans do not split such layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pd_cluster.errors import ModelError, called
from pd_cluster.kv.kv_layout import can_split_heads, heads_of_rank

CHANNELS = 16  # a short convolution has no heads, so it is split by this many channels
RECURRENT = ("linear_attention", "conv", "hybrid")  # transformers' types of layers with a state


class HeadRun(NamedTuple):
    """Consecutive features of a tensor: `width` for each of `num_heads` heads, starting at the layer's head `first`."""

    layer_heads: int
    width: int
    first: int
    num_heads: int

    @property
    def num_features(self) -> int:
        return self.num_heads * self.width


def all_of(num_heads: int, width: int = 1) -> HeadRun:
    return HeadRun(num_heads, width, 0, num_heads)


@dataclass(frozen=True, slots=True)
class StateHeads:
    """The recurrent layers of one architecture, before they are split."""

    module: str  # name of the recurrent module in a layer
    outputs: Mapping[str, tuple[HeadRun, ...]]  # tensor of the module -> the runs of heads between which it can be cut
    summed: str  # the projection whose input is split by heads and whose output is summed over ranks
    num_heads: Mapping[str, int]  # plane of the state -> its number of heads
    fields: Mapping[str, int] = field(default_factory=dict)  # config field -> number of heads, groups or features
    num_norm_groups: int = 0  # groups of heads that are normed together; 0: heads are normed separately or not at all
    num_norm_features: int = 0  # features of all these groups together

    def pieces(self, name: str, size: int, rank: int) -> tuple[int, list[tuple[int, int]]]:
        """Returns the number of features of a tensor in `outputs`, and the pieces [start, stop) that a rank has."""
        found, offset = list[tuple[int, int]](), 0
        for run in self.outputs[name]:
            start, stop = heads_of_rank(run.layer_heads, size, rank)
            start, stop = max(start - run.first, 0), min(stop - run.first, run.num_heads)
            if start < stop:
                found.append((offset + start * run.width, offset + stop * run.width))
            offset += run.num_features
        return offset, found

    def local_fields(self, size: int) -> dict[str, int]:
        """Returns the values of `fields` for the config of one rank's share."""
        return {name: max(1, number // size) for name, number in self.fields.items()}


def _gated_delta(config: Any) -> StateHeads:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_width, value_width = config.linear_key_head_dim, config.linear_value_head_dim
    share = values // keys
    convolved = (all_of(keys, key_width), all_of(keys, key_width), all_of(values, value_width))
    by_key_head, gates = list[HeadRun](), list[HeadRun]()  # Qwen3-Next: q, k, v, z of each key head; the same for b, a
    for key in range(keys):
        own = HeadRun(values, value_width, key * share, share)
        by_key_head += [HeadRun(keys, 2 * key_width, key, 1), own, own]
        gates += [own._replace(width=1)] * 2
    outputs = {
        "in_proj_qkvz": tuple(by_key_head),
        "in_proj_ba": tuple(gates),
        **dict.fromkeys(("in_proj_qkv", "conv1d"), convolved),
        "in_proj_z": (all_of(values, value_width),),
        **dict.fromkeys(("in_proj_a", "in_proj_b", "A_log", "dt_bias"), (all_of(values),)),
    }
    return StateHeads(
        module="linear_attn",
        outputs=outputs,
        summed="out_proj",
        num_heads={"state": values, "conv_q": keys, "conv_k": keys, "conv_v": values},
        fields={"linear_num_key_heads": keys, "linear_num_value_heads": values},
    )


def _kimi_delta(config: Any) -> StateHeads:
    heads, width = config.linear_num_heads, config.linear_head_dim
    whole = (all_of(heads, width),)
    outputs = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d"), whole),
        **dict.fromkeys(("f_b_proj", "g_b_proj", "dt_bias"), whole),
        "conv1d": whole * 3,
        **dict.fromkeys(("b_proj", "A_log"), (all_of(heads),)),
    }
    planes = dict.fromkeys(("state", "conv_q", "conv_k", "conv_v"), heads)
    return StateHeads("self_attn", outputs, "o_proj", planes, {"linear_num_heads": heads})


class _MambaSizes(NamedTuple):
    """The number of heads, their width, the number of groups that share B and C, and the width of B and C."""

    heads: int
    width: int
    groups: int
    state: int


def _mamba2(module: str, sizes: _MambaSizes, fields: Mapping[str, int], is_normed: bool = True) -> StateHeads:
    inner, shared = all_of(sizes.heads, sizes.width), all_of(sizes.groups, sizes.state)
    outputs = {
        "in_proj": (inner, inner, shared, shared, all_of(sizes.heads)),
        "conv1d": (inner, shared, shared),
        **dict.fromkeys(("A_log", "D", "dt_bias"), (all_of(sizes.heads),)),
        "norm": (inner,),
    }
    return StateHeads(
        module=module,
        outputs=outputs,
        summed="out_proj",
        num_heads={"state": sizes.heads, "conv_x": sizes.heads, "conv_b": sizes.groups, "conv_c": sizes.groups},
        fields=fields,
        num_norm_groups=sizes.groups if is_normed else 0,
        num_norm_features=inner.num_features,
    )


def _bamba(config: Any) -> StateHeads:
    sizes = _MambaSizes(config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state)
    fields = {"mamba_n_heads": sizes.heads, "mamba_n_groups": sizes.groups}
    if not hasattr(config, "mamba_d_ssm"):
        return _mamba2("mamba", sizes, fields)
    fields["mamba_d_ssm"] = sizes.heads * sizes.width
    return _mamba2("mamba", sizes, fields, config.mamba_rms_norm)


def _nemotron(config: Any) -> StateHeads:
    sizes = _MambaSizes(config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size)
    return _mamba2("mixer", sizes, {"mamba_num_heads": sizes.heads, "n_groups": sizes.groups})


def _short_conv(config: Any) -> StateHeads:
    whole = (all_of(config.hidden_size // CHANNELS, CHANNELS),)
    outputs = {"in_proj": whole * 3, "conv": whole}
    return StateHeads("conv", outputs, "out_proj", {"conv": config.hidden_size // CHANNELS})


# model_type -> the function that describes its recurrent layers, from transformers' config
LAYERS: Mapping[str, Callable[[Any], StateHeads]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _gated_delta),
    "kimi_linear": _kimi_delta,
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), _bamba),
    "nemotron_h": _nemotron,
    **dict.fromkeys(("lfm2", "lfm2_moe"), _short_conv),
}


def state_heads(config: Any, size: int) -> StateHeads | None:
    """Returns an architecture's recurrent layers for `size` ranks; None: it has none to split.

    Raises ModelError if the heads cannot be spread over the ranks.
    """
    if config.model_type not in LAYERS:
        return None
    flag = f"{called('tensor_parallel_size')} {size}"
    if LAYERS[config.model_type] is _short_conv and config.hidden_size % (CHANNELS * size):
        raise ModelError(
            f"{flag}: {config.hidden_size} channels of convolutions cannot be split by multiples of {CHANNELS}; use a "
            f"divisor of {config.hidden_size // CHANNELS}, or 1"
        )
    found = LAYERS[config.model_type](config)
    most = max(found.num_heads.values())
    if most % size:
        raise ModelError(f"{flag}: {most} heads of states cannot be split evenly; use a divisor of them")
    for plane, num_heads in found.num_heads.items():
        if not can_split_heads(num_heads, size):
            raise ModelError(
                f"{flag}: {num_heads} heads of {plane} in states can be neither split evenly over {size} ranks nor "
                f"replicated evenly on them"
            )
    return found


def expand_for(num_features: int, hidden_size: int) -> float:
    """Returns the smallest `expand` whose product with hidden_size Mamba-2 truncates to `num_features`."""
    factor = num_features / hidden_size
    return factor if int(factor * hidden_size) == num_features else math.nextafter(factor, math.inf)
