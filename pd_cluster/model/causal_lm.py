"""A loaded model as the runner sees it: a ForwardBatch in, logits of its sampled rows out.

`PlainCausalLM` calls transformers' own forward; `FusedCausalLM` runs the same layers in its own loop. Neither knows
requests or files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pd_cluster.model.attention.choice import SDPA, Attention
from pd_cluster.model.batch import ForwardBatch
from pd_cluster.model.linear import Linear
from pd_cluster.model.ops import Heads, Norm, Ops, Rope
from pd_cluster.model.parallel.group import Alone, Group
from pd_cluster.model.rope import LengthRotary, LogN

FORGETFUL = ("StableLmAttention", "NemotronAttention")  # the layers around these do not hand the batch on


class CausalLM(Protocol):
    config: Any  # transformers' own
    kernels: str  # what computes, for the log
    attention: str  # what attends

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [num_samples, vocab_size] of `batch.sample_rows`; writes the batch's keys and values to its pool.

        When it returns on rank 0, every rank has written; on accelerators, when rank 0's device has come so far. On
        ranks other than 0 the logits are of this rank's part of the vocabulary.
        """


class PlainCausalLM:
    """transformers' forward, with attention through the function that the loader registered."""

    def __init__(
        self,
        model: Any,
        vocab_size: int = 0,
        group: Group | None = None,
        attention: Attention = SDPA,
        logn: LogN | None = None,
    ) -> None:
        """`vocab_size` of the whole model, where this is one rank's share."""
        self.config = model.config
        self.attention = attention.name
        self.kernels = f"transformers' modules, attention by {attention.name}"
        self._attend = attention.write_and_attend
        self.model = model
        self._vocab_size = vocab_size or model.config.vocab_size
        self._group = group or Alone()
        self._batch: ForwardBatch | None = None
        self._logn = logn
        self._rotaries = [module for module in model.modules() if isinstance(module, LengthRotary)]
        for module in model.modules():
            if type(module).__name__ in FORGETFUL:
                module.register_forward_pre_hook(self._remind, with_kwargs=True)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        batch.write_and_attend = self._attend
        if self._logn is not None:
            batch.query_factors = self._logn.factors(batch)
        self._set_batch(batch)
        try:
            logits: torch.Tensor = self.model(
                input_ids=batch.input_ids,
                position_ids=batch.positions,
                use_cache=False,
                logits_to_keep=batch.sample_rows,
                forward_batch=batch,
            ).logits
        finally:
            self._set_batch(None)
        return self.whole(logits[0])

    def _set_batch(self, batch: ForwardBatch | None) -> None:
        self._batch = batch
        for rotary in self._rotaries:
            rotary.batch = batch

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """[…, vocab_size] of the module's own logits, where this is one rank's share."""
        return self._group.gather(logits)[..., : self._vocab_size]

    def _remind(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs if self._batch is None else {**kwargs, "forward_batch": self._batch}


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One decoder layer. The two `post_*` norms are Gemma 2's, on what a half adds to the residual stream."""

    heads: Heads
    qkv: Linear
    output: Linear
    mlp: Callable[[torch.Tensor], torch.Tensor]
    input_norm: Norm
    mlp_norm: Norm
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None


class FusedCausalLM:
    """The residual stream x is updated in place; what a half-layer adds to it waits for the next norm."""

    def __init__(
        self,
        config: Any,
        ops: Ops,
        embed: Callable[[torch.Tensor], torch.Tensor],
        rotary: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        layers: list[FusedLayer],
        norm: Norm,
        head: Linear,
        vocab_size: int = 0,
        group: Group | None = None,
    ) -> None:
        """`vocab_size` of the whole model, where this is one rank's share."""
        self.config = config
        self._vocab_size = vocab_size or config.vocab_size
        self._group = group or Alone()
        self.ops = ops
        self.attention = ops.attention
        self.kernels = f"fused layers, {ops.name} kernels, attention by {ops.attention}"
        self._embed, self._rotary, self._layers, self._norm, self._head = embed, rotary, layers, norm, head
        self._final_softcap: float | None = getattr(config, "final_logit_softcapping", None)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        x = self._embed(batch.input_ids[0])  # [num_tokens, hidden_size]
        if isinstance(self._rotary, LengthRotary):
            self._rotary.batch = batch
        cos, sin = self._rotary(x, batch.positions)
        rope = Rope(cos[0], sin[0])
        delta = None
        for layer in self._layers[:-1]:
            delta = self._after_attention(layer, x, self._attention(layer, x, delta, rope, batch))
        last = self._layers[-1]
        attended = self._attention(last, x, delta, rope, batch)
        rows = batch.sample_rows  # nobody reads the other rows of the last layer
        if len(rows) == 0:
            self._group.sum(x.new_zeros(1))  # when this returns, every rank has written its last layer
            return x.new_empty(0, self._vocab_size)
        if len(rows) < len(x):
            x, attended = x[rows], attended[rows]
        delta = self._after_attention(last, x, attended)
        logits = self._head(self.ops.add_norm(x, delta, self._norm))
        if self._final_softcap is not None:
            logits = logits.div_(self._final_softcap).tanh_().mul_(self._final_softcap)
        return self._group.gather(logits)[:, : self._vocab_size]

    def _attention(
        self, layer: FusedLayer, x: torch.Tensor, delta: torch.Tensor | None, rope: Rope, batch: ForwardBatch
    ) -> torch.Tensor:
        """Adds what is due to x; returns [num_tokens, num_heads * head_dim]."""
        ops = self.ops
        normed = ops.norm(x, layer.input_norm) if delta is None else ops.add_norm(x, delta, layer.input_norm)
        return ops.attend(layer.heads, layer.qkv(normed), rope, batch)

    def _after_attention(self, layer: FusedLayer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Adds the attention's output to x; returns what is due next."""
        delta = self._group.sum(layer.output(attended))
        if layer.post_attention_norm is not None:
            delta = self.ops.norm(delta, layer.post_attention_norm)
        delta = self._group.sum(layer.mlp(self.ops.add_norm(x, delta, layer.mlp_norm)))
        if layer.post_mlp_norm is not None:
            delta = self.ops.norm(delta, layer.post_mlp_norm)
        return delta
