"""A rank's share of each weight, from transformers' `base_model_tp_plan`. Uses sizes and names, but no weights.

The scheme is Megatron's: weights that produce heads or intermediate features are split by rows (`colwise`), and weights
that consume them by columns (`rowwise`). So a layer needs two sums: after attention and after the MLP. With fewer KV
heads than ranks, KV heads are replicated. Embedding and output layer are split by vocabulary. Layers that round their
inputs to codes take whole rows (layers/whole_rows.py), so they are split by rows, not by columns. transformers' plans
cover only a small part of hybrid models. A table in this file splits their attentions and MLPs, and state_heads.py
splits their recurrent layers by heads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from pd_cluster.errors import ModelError, called
from pd_cluster.kv.kv_layout import KVLayout, can_split_heads, heads_of_rank
from pd_cluster.model.layers.states.state_heads import RECURRENT, StateHeads, expand_for, state_heads
from pd_cluster.model.weights.weight_forms import part_of
from pd_cluster.wire import Plane

Style = Literal["column", "row", "whole", "summed"]

STYLES: dict[str, Style] = {
    "colwise": "column",
    "packed_colwise": "column",
    "colwise_gather_output": "column",  # transformers gathers the result only because later code expects all features
    "rowwise": "row",
    "rowwise_split_input": "row",
    "replicated_with_grad_allreduce": "whole",
    "mla_kv_a_proj": "whole",
    "moe_tp_experts": "whole",  # describes how experts are computed, not how they are split
}
# Latent attention: layers that output heads are split by heads; layers that output latents are whole on all ranks.
LATENT_STYLES: dict[str, Style] = {
    **dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj"), "column"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "whole"),
    "o_proj": "row",
}
# Attentions and MLPs of hybrids. "summed": every rank applies the whole layer to its own part of a sum.
HYBRID_STYLES: dict[str, Style] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_up_proj", "up_proj", "input_linear"), "column"),
    **dict.fromkeys(("o_proj", "out_proj", "down_proj", "output_linear"), "row"),
    "fc2_latent_proj": "summed",
}
# Attentions of models that are split only if a rank has whole experts, because their experts cannot be split.
WITH_WHOLE_EXPERTS: dict[str, dict[str, Style]] = {
    "gpt_oss": {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), "column"), "o_proj": "row"}
}
SINKS = ".self_attn.sinks"  # one value per head
EMBEDDINGS = ("embed_tokens.weight", ".embeddings.weight")
STACKED = ("block_sparse_moe.input_linear", "block_sparse_moe.output_linear")  # Granite 4's experts in files
NO_FIT = "transformers' plan does not match the shapes of its weights"
REFUSED = {
    "gpt_neox": "transformers derives the size of a head from the number of heads",
    "apertus": "its activation has weights that the plan does not split",
    "gemma3n_text": "a layer selects activations by the mean over all of them",
    **dict.fromkeys(("gemma4_text", "mimo_v2_flash"), "its layers have different heads"),
    **dict.fromkeys(("cohere", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "olmoe", "phimoe"), NO_FIT),
}
REFUSED |= dict.fromkeys(("bailing_hybrid", "olmo_hybrid"), "the states of its layers cannot be split")
EXPERT_ALIASES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # names in Mixtral's files
SPLIT_SIZES = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "shared_intermediate_size"),
)
LAYER = re.compile(r"(?:^|\.)layers\.(?P<index>\d+)\.(?P<path>.+)\.(?P<part>\w+)$")
# gate_up_proj is the part "weight"; gate_up_proj_bias and gate_up_proj.bias are the part "bias"
FUSED_EXPERTS = re.compile(
    r"(?:^|\.)layers\.\d+\.(?P<path>.*(?<!shared_)experts)\.(?P<name>gate_up_proj|down_proj)(?:[._](?P<part>\w+))?$"
)

Piece = tuple[int, int]  # [start, stop) in the dimension that is split


@dataclass(frozen=True, slots=True)
class WeightCut:
    """The `pieces` of a weight along `dim`, joined."""

    dim: int = 0
    pieces: tuple[Piece, ...] | None = None  # None: the whole weight
    padded_to: int = 0  # pads with zeros to this number of rows
    # Other ranks have zeros, because the part is added to each rank's term of a sum.
    on_rank_0_only: bool = False


WHOLE = WeightCut()


class ParallelPlan:
    """The split of one architecture over `size` ranks. Raises ModelError with what cannot be split and a remedy."""

    def __init__(self, config: Any, size: int, has_whole_experts: bool = False) -> None:
        """`config`: from transformers. `has_whole_experts`: ranks have different experts, not slices of each."""
        self.size = size
        self.config, self.has_whole_experts = config, has_whole_experts
        self.vocab_size: int = config.vocab_size
        flag = f"{called('tensor_parallel_size')} {size}"
        if config.model_type in REFUSED:
            raise ModelError(f"{flag}: {config.model_type} cannot be split: {REFUSED[config.model_type]}; use 1")
        self.states: StateHeads | None = state_heads(config, size)
        plan: dict[str, str] = {} if self.states else getattr(config, "base_model_tp_plan", None) or {}
        if attention := WITH_WHOLE_EXPERTS.get(config.model_type):
            plan = {}
            if not has_whole_experts:
                name = called("enable_expert_parallel")
                raise ModelError(
                    f"{flag}: only whole experts of {config.model_type} can be spread; give {name}, or use 1"
                )
        elif not plan and self.states is None:
            raise ModelError(f"{flag}: transformers has no tensor parallel plan for {config.model_type}; use 1")
        elif unknown := sorted(set(plan.values()) - set(STYLES)):
            raise ModelError(f"{flag}: the plan of {config.model_type} has the unknown style {unknown[0]}; use 1")
        # The only reason why transformers gathers each rank's queries is that a norm spans them.
        self.norms_span_heads = plan.get("layers.*.self_attn.q_proj") == "colwise_gather_output"
        self._styles = {pattern.rpartition(".")[2]: STYLES[style] for pattern, style in plan.items()}
        if attention is not None or self.states is not None:
            self._styles = dict(attention or HYBRID_STYLES)
        if getattr(config, "kv_lora_rank", None):  # some of transformers' plans do not split latent attention
            self._styles |= LATENT_STYLES
        if "gate_up_proj" in self._styles:  # some files store gate and up separately
            self._styles |= {"gate_proj": "column", "up_proj": "column"}
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", None) or self.num_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads
        if self.num_heads % size:
            raise ModelError(f"{flag}: {self.num_heads} attention heads cannot be split evenly; use a divisor of them")
        if not can_split_heads(self.num_kv_heads, size):
            raise ModelError(
                f"{flag}: {self.num_kv_heads} KV heads can be neither split evenly over {size} ranks nor replicated "
                f"evenly on them"
            )
        self._sizes = {
            name: features for name in SPLIT_SIZES if isinstance(features := getattr(config, name, None), int)
        }
        if getattr(config, "block_auto_adjust_ff_dim", False):
            self._sizes["intermediate_size"] = adjusted_size(config)
        for name, features in self._sizes.items():
            if features % size:
                raise ModelError(f"{flag}: {name} {features} of config.json cannot be split evenly; use a divisor")

    @property
    def local_vocab_size(self) -> int:
        """Returns the number of rows of embedding and output layer on each rank; the last rank's are padded."""
        return -(-self.vocab_size // self.size)

    @property
    def local_kv_heads(self) -> int:
        return max(1, self.num_kv_heads // self.size)

    def local_config(self) -> Any:
        """Returns the config of a model that consists of one rank's share."""
        local = type(self.config).from_dict(self.config.to_dict())
        local.num_attention_heads = self.num_heads // self.size
        local.num_key_value_heads = self.local_kv_heads
        local.head_dim = self.head_dim
        local.vocab_size = self.local_vocab_size
        local.pad_token_id = None  # the id may be outside of this rank's rows
        fields = {name: features // self.size for name, features in self._sizes.items()}
        if self.states is not None:
            fields |= self.states.local_fields(self.size)
        for name, value in fields.items():
            setattr(local, name, value)
        if hasattr(local, "block_auto_adjust_ff_dim"):
            local.block_auto_adjust_ff_dim = False
        if hasattr(local, "mamba_expand"):
            factor = expand_for(local.mamba_n_heads * local.mamba_d_head, local.hidden_size)
            object.__setattr__(local, "mamba_expand", factor)  # bypasses the config's check, which requires an integer
        return local

    def layout_of_rank(self, local: KVLayout, rank: int) -> KVLayout:
        """Returns a rank's layout. `local`: the layout of the rank's model if it is treated as a whole model."""
        if local.rule == "state":
            return self._layout_of_states(local, rank)
        num_kv_heads = 1 if local.has_latents else self.num_kv_heads
        layout = replace(local, num_kv_heads=num_kv_heads, tp_size=self.size, tp_rank=rank)
        assert layout.local_kv_heads == local.num_kv_heads
        return layout

    def _layout_of_states(self, local: KVLayout, rank: int) -> KVLayout:
        assert self.states is not None
        num_heads = self.states.num_heads
        most = max(num_heads.values())
        own = {plane.name: 0 if num_heads[plane.name] == most else num_heads[plane.name] for plane in local.planes}
        planes = tuple(Plane(plane.name, plane.width, own[plane.name]) for plane in local.planes)
        layout = replace(local, num_kv_heads=most, planes=planes, tp_size=self.size, tp_rank=rank)
        assert [layout.local_heads(plane) for plane in planes] == [local.local_heads(plane) for plane in local.planes]
        return layout

    def cut(self, key: str, shape: tuple[int, ...], rank: int, takes_whole_rows: bool = False) -> WeightCut:
        """Returns the cut of a tensor, by its name in the files. `takes_whole_rows`: whether its layer does so."""
        if key.endswith((*EMBEDDINGS, "lm_head.weight", "lm_head.bias")):
            step = self.local_vocab_size
            start = min(rank * step, self.vocab_size)
            return WeightCut(0, ((start, min(start + step, self.vocab_size)),), padded_to=step)
        if key.endswith(SINKS):
            return WeightCut(0, (self._elements((rank, rank + 1), self.size, shape[0], key),))
        if found := FUSED_EXPERTS.search(key):
            name, part, num_leading = found["name"], part_of(found["part"] or "weight"), 1  # dimension 0: the experts
            style: Style = "row" if name == "down_proj" else "column"
        elif found := LAYER.search(key):
            if (in_state := self._in_state(found)) is not None:
                return self._cut_by_heads(key, in_state, shape, rank)
            name, part, num_leading = (
                found["path"].rpartition(".")[2],
                part_of(found["part"]),
                int(found["path"] in STACKED),
            )
            name = EXPERT_ALIASES.get(name, name)
            style = self._styles.get(name, "whole")
        else:
            return WHOLE
        if part is None:
            return WHOLE
        if name in ("q_norm", "k_norm"):
            style = "column" if self.norms_span_heads else "whole"
        if style == "row" and takes_whole_rows:
            if part.outputs is None:
                return WHOLE
            dim = num_leading + part.outputs
            return WeightCut(dim, (self.own_outputs(shape[dim], rank),))
        if style in ("row", "summed") and part.inputs is None:
            return WeightCut(on_rank_0_only=rank != 0) if part.is_added else WHOLE
        dim_or_none = part.inputs if style == "row" else part.outputs
        if style in ("whole", "summed") or dim_or_none is None:
            return WHOLE
        total, pieces = (self.size, [(rank, rank + 1)]) if style == "row" else self._outputs(name, rank)
        dim = num_leading + dim_or_none
        return WeightCut(dim, tuple(self._elements(piece, total, shape[dim], key) for piece in pieces))

    def shares_inputs(self, path: str) -> bool:
        """Whether this linear layer, or the `down_proj` of these experts, has its input features split over ranks."""
        name = path.rpartition(".")[2]
        return self._styles.get(EXPERT_ALIASES.get(name, name)) == "row"

    def own_outputs(self, num_outputs: int, rank: int) -> Piece:
        """Returns a rank's outputs of a layer that takes whole rows; some ranks may have one more than others."""
        return rank * num_outputs // self.size, (rank + 1) * num_outputs // self.size

    def _elements(self, piece: Piece, total: int, length: int, key: str) -> Piece:
        """Returns a piece of `total` equal shares of a dimension as a range of its elements. Raises ModelError if the
        range does not consist of whole elements.
        """
        start, stop = piece[0] * length, piece[1] * length
        if start % total or stop % total:
            raise ModelError(
                f"{called('tensor_parallel_size')} {self.size}: {key} has {length} elements in the split "
                f"dimension, which cannot be split evenly; use a divisor"
            )
        return start // total, stop // total

    def _outputs(self, name: str, rank: int) -> tuple[int, list[Piece]]:
        """Returns into how many equal shares a layer's output features are divided, and which of them the rank has."""
        even = (rank, rank + 1)
        if name in ("gate_up_proj", "input_linear"):  # gates, then ups
            return 2 * self.size, [even, (self.size + rank, self.size + rank + 1)]
        if name in ("k_proj", "v_proj", "k_norm"):
            return self.num_kv_heads, [self._kv_heads(rank)]
        if name == "qkv_proj":
            step, (start, stop) = self.num_heads // self.size, self._kv_heads(rank)
            queries, keys = self.num_heads, self.num_heads + self.num_kv_heads
            found = [(rank * step, (rank + 1) * step), (queries + start, queries + stop), (keys + start, keys + stop)]
            return self.num_heads + 2 * self.num_kv_heads, found
        return self.size, [even]

    def _kv_heads(self, rank: int) -> Piece:
        return heads_of_rank(self.num_kv_heads, self.size, rank)

    def _in_state(self, found: re.Match[str]) -> str | None:
        """Returns a tensor's name within its recurrent layer if it is cut by heads; otherwise None."""
        states, layer_types = self.states, getattr(self.config, "layer_types", None) or ()
        index = int(found["index"])
        if states is None or index >= len(layer_types) or layer_types[index] not in RECURRENT:
            return None
        module, _, name = f"{found['path']}.{found['part']}".partition(".")
        if module != states.module:
            return None
        name = name.removeprefix("forget_gate.").partition(".")[0]
        return name if name in states.outputs else None

    def _cut_by_heads(self, key: str, name: str, shape: tuple[int, ...], rank: int) -> WeightCut:
        """Cuts the outputs of a layer that `_in_state` names; for a plain parameter, its longest dimension."""
        part = None if key.endswith(f".{name}") else part_of(key.rpartition(".")[2])
        dim = shape.index(max(shape)) if part is None else part.outputs
        if dim is None:
            return WHOLE
        assert self.states is not None
        total, pieces = self.states.pieces(name, self.size, rank)
        return WeightCut(dim, tuple(self._elements(piece, total, shape[dim], key) for piece in pieces))


def adjusted_size(config: Any) -> int:
    """Returns the intermediate size of LFM2's MLPs, as transformers computes it from the config."""
    size = int(2 * config.intermediate_size / 3)
    if config.block_ffn_dim_multiplier is None:
        return size
    multiple: int = config.block_multiple_of
    return multiple * -(-int(config.block_ffn_dim_multiplier * size) // multiple)
