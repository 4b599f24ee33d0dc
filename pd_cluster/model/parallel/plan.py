"""Which share of each weight a rank holds, from transformers' `base_model_tp_plan`. Sizes and names: no weights.

Megatron's scheme: what makes heads or intermediate features is split by rows of its weight (`colwise`), what takes
them in by columns (`rowwise`), so that a layer needs two sums: after attention and after the MLP. KV heads fewer than
ranks are replicated. Embedding and output layer are split by vocabulary.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from pd_cluster.errors import ModelError
from pd_cluster.kv.layout import KVLayout, can_split_heads

Style = Literal["column", "row", "whole"]

STYLES: dict[str, Style] = {
    "colwise": "column",
    "packed_colwise": "column",
    "colwise_gather_output": "column",  # gathered by transformers only because what follows is not told its share
    "rowwise": "row",
    "rowwise_split_input": "row",
    "replicated_with_grad_allreduce": "whole",
    "moe_tp_experts": "whole",  # says how experts compute, not how they are split
}
NO_FIT = "transformers' plan does not fit the shapes of its weights"
REFUSED = {
    "gpt_neox": "transformers derives the size of a head from the number of heads",
    "apertus": "its activation has weights that the plan does not know",
    **dict.fromkeys(("cohere", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "olmoe", "phimoe"), NO_FIT),
}
EXPERT_ALIASES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # Mixtral's files
SPLIT_SIZES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
LAYER = re.compile(r"(?:^|\.)layers\.\d+\.(?P<path>.+)\.(?P<kind>weight|bias)$")
FUSED_EXPERTS = re.compile(r"(?:^|\.)layers\.\d+\..*experts\.(?P<name>gate_up_proj|down_proj)$")

Piece = tuple[int, int]  # [start, stop) along the dimension that is split


@dataclass(frozen=True, slots=True)
class Cut:
    """`pieces` of a weight along `dim`, joined; None: all of it. `padded_to` rows, with zeros, where it has fewer.

    `on_rank_0_only`: zeros elsewhere, for what is added to a sum.
    """

    dim: int = 0
    pieces: tuple[Piece, ...] | None = None
    padded_to: int = 0
    on_rank_0_only: bool = False


WHOLE = Cut()


class Plan:
    """One architecture on `size` ranks. Raises ModelError, naming what cannot be split and what to do."""

    def __init__(self, config: Any, size: int) -> None:
        """`config` is transformers' own."""
        self.size = size
        self.config = config
        self.vocab_size: int = config.vocab_size
        flag = f"--tensor-parallel-size {size}"
        if config.model_type in REFUSED:
            raise ModelError(f"{flag}: {config.model_type} cannot be split: {REFUSED[config.model_type]}; use 1")
        plan: dict[str, str] | None = getattr(config, "base_model_tp_plan", None)
        if not plan:
            raise ModelError(f"{flag}: transformers has no tensor parallel plan for {config.model_type}; use 1")
        if unknown := sorted(set(plan.values()) - set(STYLES)):
            raise ModelError(f"{flag}: the plan of {config.model_type} has the unknown style {unknown[0]}; use 1")
        # Why else should transformers gather what each rank has computed of the queries?
        self.norms_span_heads = plan.get("layers.*.self_attn.q_proj") == "colwise_gather_output"
        self._styles = {pattern.rpartition(".")[2]: STYLES[style] for pattern, style in plan.items()}
        if "gate_up_proj" in self._styles:  # in the files of some, its halves are apart
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
        for name in SPLIT_SIZES:
            features = getattr(config, name, None)
            if isinstance(features, int) and features % size:
                raise ModelError(f"{flag}: {name} {features} of config.json cannot be split evenly; use a divisor")

    @property
    def local_vocab_size(self) -> int:
        """Rows of embedding and output layer on each rank; the last rank's are padded."""
        return -(-self.vocab_size // self.size)

    @property
    def local_kv_heads(self) -> int:
        return max(1, self.num_kv_heads // self.size)

    def local_config(self) -> Any:
        """The config of a model that is one rank's share."""
        local = type(self.config).from_dict(self.config.to_dict())
        local.num_attention_heads = self.num_heads // self.size
        local.num_key_value_heads = self.local_kv_heads
        local.head_dim = self.head_dim
        local.vocab_size = self.local_vocab_size
        local.pad_token_id = None  # it need not be one of this rank's rows
        for name in SPLIT_SIZES:
            features = getattr(self.config, name, None)
            if isinstance(features, int):
                setattr(local, name, features // self.size)
        return local

    def layout_of_rank(self, local: KVLayout, rank: int) -> KVLayout:
        """`local`: of this rank's model, taken for a whole one."""
        layout = replace(local, num_kv_heads=self.num_kv_heads, tp_size=self.size, tp_rank=rank)
        assert layout.local_kv_heads == local.num_kv_heads
        return layout

    def cut(self, key: str, shape: tuple[int, ...], rank: int) -> Cut:
        """`key`: a tensor's name in the safetensors files."""
        if key.endswith(("embed_tokens.weight", "lm_head.weight", "lm_head.bias")):
            step = self.local_vocab_size
            start = min(rank * step, self.vocab_size)
            return Cut(0, ((start, min(start + step, self.vocab_size)),), padded_to=step)
        if found := FUSED_EXPERTS.search(key):  # [num_experts, out_features, in_features]
            if found["name"] == "down_proj":
                return Cut(2, (self._even(shape[2], rank),))
            return Cut(1, self._halves(shape[1], rank))
        found = LAYER.search(key)
        if not found:
            return WHOLE
        name = found["path"].rpartition(".")[2]
        name = EXPERT_ALIASES.get(name, name)
        if name in ("q_norm", "k_norm"):
            return Cut(0, (self._heads(name[0], shape[0], rank),)) if self.norms_span_heads else WHOLE
        style = self._styles.get(name, "whole")
        if style == "row":
            if found["kind"] == "bias":
                return Cut(on_rank_0_only=rank != 0)
            return Cut(1, (self._even(shape[1], rank),))
        if style == "whole":
            return WHOLE
        if name == "qkv_proj":
            return Cut(0, self._packed_heads(rank))
        if name == "gate_up_proj":
            return Cut(0, self._halves(shape[0], rank))
        if name in ("q_proj", "k_proj", "v_proj"):
            return Cut(0, (self._heads(name[0], shape[0], rank),))
        return Cut(0, (self._even(shape[0], rank),))

    def _even(self, length: int, rank: int) -> Piece:
        step = length // self.size
        return rank * step, (rank + 1) * step

    def _halves(self, length: int, rank: int) -> tuple[Piece, ...]:
        """Gate and up, one after the other."""
        start, stop = self._even(length // 2, rank)
        return (start, stop), (start + length // 2, stop + length // 2)

    def _heads(self, which: str, length: int, rank: int) -> Piece:
        """`which`: q, k or v."""
        if which == "q":
            return self._even(length, rank)
        layout = KVLayout(1, self.num_kv_heads, self.head_dim, self.head_dim, 1, "float32", self.size, rank)
        start, stop = layout.head_range
        return start * self.head_dim, stop * self.head_dim

    def _packed_heads(self, rank: int) -> tuple[Piece, ...]:
        """Queries, keys and values, one after the other."""
        num_q, num_kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q_start, q_stop = self._even(num_q, rank)
        start, stop = self._heads("k", num_kv, rank)
        return (q_start, q_stop), (num_q + start, num_q + stop), (num_q + num_kv + start, num_q + num_kv + stop)
