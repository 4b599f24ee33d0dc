"""A fused model, which runs the layers made from transformers' modules in its own loop. Uses no requests or files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from pd_cluster.model.inputs.forward_batch import AuxiliaryStates, ForwardBatch
from pd_cluster.model.language_model.cache_declaration import LayerCache
from pd_cluster.model.language_model.causal_lm import NO_POSITIONS
from pd_cluster.model.layers.expert_share import ExpertBlocks
from pd_cluster.model.layers.fused_layer import FusedLayer
from pd_cluster.model.layers.ops import Norm, Ops, Rope
from pd_cluster.model.layers.packed_linear import Linear
from pd_cluster.model.layers.rope.rope_limit import RopeLimit
from pd_cluster.model.layers.rope.rope_tables import RopeTables
from pd_cluster.model.lora.loaded_adapters import Adapters
from pd_cluster.model.parallel.rank_group import Group, SingleRank


class WholeDecoder(Protocol):
    """Computes all layers of a step in one call."""

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether the decoder supports this batch."""

    def __call__(self, x: torch.Tensor, ropes: dict[str, Rope], batch: ForwardBatch) -> torch.Tensor:
        """Updates x in place; returns what the last layer still has to add to x."""


@runtime_checkable
class DecoderMaker(Protocol):
    """`Ops` that may be able to compute all layers in one call."""

    def decoder(self, layers: Sequence[FusedLayer]) -> WholeDecoder | None:
        """Returns the decoder; None: the layers are computed one by one."""


@dataclass(frozen=True, slots=True)
class ModelEnds:
    """The parts of a fused model before and after its layers."""

    embed: Callable[[torch.Tensor], torch.Tensor]
    ropes: RopeTables
    norm: Norm | None  # None: `head` applies it, and hidden states are those before it
    head: Linear
    vocab_size: int  # the whole model's
    embedding_factor: float = 1.0  # applied by `embed`
    bf16_way: str = ""  # see CausalLM
    # Only in a draft head: joins the embedding to x.
    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """Facts about a model that the loader collects before the model is taken apart."""

    caches: tuple[LayerCache, ...]
    rope_limit: RopeLimit = NO_POSITIONS
    adapters: Adapters | None = None
    experts: ExpertBlocks | None = None  # records the blocks of experts; None: this rank has all experts


class FusedCausalLM:
    """Updates the residual stream x in place. The output of half a layer is added in the operation of the next norm."""

    def __init__(
        self,
        config: Any,
        ops: Ops,
        layers: list[FusedLayer],
        ends: ModelEnds,
        served: Served,
        group: Group | None = None,
    ) -> None:
        self.config, self.ops = config, ops
        self.adapters, self.caches, self.rope_limit = served.adapters, served.caches, served.rope_limit
        self._vocab_size, self._group, self._experts = ends.vocab_size, group or SingleRank(), served.experts
        self.attention, self.key_order = ops.attention, ends.ropes.key_order
        self.bf16_way, self.prompt_states = ends.bf16_way, ops.prompt_states
        products = f", products in bfloat16 by {self.bf16_way}" if self.bf16_way else ""
        states = f", states of prompts by {self.prompt_states}" if self.prompt_states else ""
        self.kernels = f"fused layers, {ops.name} kernels, attention by {ops.attention}{states}{products}"
        self.key_features: torch.Tensor | None = ends.ropes.order
        self.embedding_factor = ends.embedding_factor
        self.ends, self.layers = ends, layers
        self._embed, self._ropes, self._norm, self._head = ends.embed, ends.ropes, ends.norm, ends.head
        self.decoder = self._joined(layers)
        self._parts: dict[tuple[int, ...], list[WholeDecoder]] = {}  # taps -> the decoders between them
        attentions = (layer.attention for layer in layers)
        self.indexers = [each for attention in attentions if (each := getattr(attention, "indexer", None)) is not None]
        self._final_softcap: float | None = getattr(config, "final_logit_softcapping", None)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        if self.adapters is not None:
            self.adapters.places.begin(batch)
        x = self._embed(batch.input_ids[0])  # [num_tokens, hidden_size]
        if (images := batch.images) is not None:
            images.embed(x)
        if batch.virtual is not None:
            batch.virtual.embed(x)
        if (pairs := batch.pairs) is not None:
            assert self.ends.join is not None
            pairs.embeddings = x
            x = self.ends.join(x, pairs.states)
        ropes, taps = self._ropes(x, batch), batch.taps
        if self.decoder is not None and self.adapters is None and self.decoder.takes(batch):
            x = self._added(x, self._decoded(x, ropes, batch), self._norm)
            if taps is not None and not taps.layers:
                taps.states.append(x)
            return self.logits_of(x)
        delta = None
        for layer_idx, layer in enumerate(self.layers[:-1]):
            _tap(taps, layer_idx, x, delta)
            delta = self._after_attention(layer, x, self._attention(layer, x, delta, ropes, batch))
            if images is not None:
                images.deepen(x, layer_idx)
        last = self.layers[-1]
        _tap(taps, len(self.layers) - 1, x, delta)
        attended = self._attention(last, x, delta, ropes, batch)
        if taps is not None and not taps.layers:
            return self._tapped(batch, x, attended)
        return self._last_logits(batch, x, attended)

    def take_part(self) -> None:
        assert self._experts is not None
        for block in self._experts.blocks:
            block.take_part()

    def _last_logits(self, batch: ForwardBatch, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Computes the second half of the last layer, only for the rows whose results are requested; returns logits."""
        hidden, last = batch.hidden, self.layers[-1]
        rows = batch.sample_rows if hidden is None else hidden.kept
        if self._experts is not None and self._experts.are_exchanged:  # all rows must be exchanged in this layer, too
            delta = self._after_attention(last, x, attended)
            x, delta = x[rows], delta[rows]
        else:
            if len(rows) == 0:
                self._group.sum(x.new_zeros(1))  # when this returns, every rank has written its last layer
                return x.new_empty(0, self._vocab_size)
            if len(rows) < len(x):
                x, attended = x[rows], attended[rows]
                if self.adapters is not None:
                    self.adapters.places.rows.keep(rows.numpy() if rows.device.type == "cpu" else batch.kept_rows)
            delta = self._after_attention(last, x, attended)
        if len(rows) == 0:
            return x.new_empty(0, self._vocab_size)
        x = self._added(x, delta, self._norm)
        if hidden is not None:
            hidden.states, x = x[hidden.hidden_at], x[hidden.logits_at]
            if len(x) == 0:
                return x.new_empty(0, self._vocab_size)
        return self.logits_of(x)

    def _joined(self, layers: Sequence[FusedLayer]) -> WholeDecoder | None:
        is_alone = isinstance(self._group, SingleRank)
        return self.ops.decoder(layers) if is_alone and isinstance(self.ops, DecoderMaker) else None

    def _decoded(self, x: torch.Tensor, ropes: dict[str, Rope], batch: ForwardBatch) -> torch.Tensor:
        """Computes all layers in one call, or in one call per stretch between taps; returns the pending addition."""
        taps = batch.taps
        if taps is None or not taps.layers:
            assert self.decoder is not None
            return self.decoder(x, ropes, batch)
        if (parts := self._parts.get(taps.layers)) is None:
            edges = [0, *taps.layers, len(self.layers)]
            found = [self._joined(self.layers[first:stop]) for first, stop in itertools.pairwise(edges) if first < stop]
            parts = self._parts[taps.layers] = [part for part in found if part is not None]
            assert len(parts) == len(found)  # a decoder for all layers implies one for each part
        if taps.layers[0] == 0:
            taps.states.append(x.clone())
        delta = parts[0](x, ropes, batch)
        for part in parts[1:]:
            taps.states.append(x.add_(delta).clone())
            delta = part(x, ropes, batch)
        return delta

    def _tapped(self, batch: ForwardBatch, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Computes the second half of the last layer for all rows and records their final states; returns logits."""
        assert batch.taps is not None
        x = self._added(x, self._after_attention(self.layers[-1], x, attended), self._norm)
        batch.taps.states.append(x)
        if (hidden := batch.hidden) is not None:
            hidden.states = x[hidden.rows]
        x = x[batch.sample_rows]
        return self.logits_of(x) if len(x) else x.new_empty(0, self._vocab_size)

    def logits_of(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the logits [num_rows, vocab_size] of final states [num_rows, hidden_size]."""
        logits = self._head(x)
        if self._final_softcap is not None:
            logits = logits.div_(self._final_softcap).tanh_().mul_(self._final_softcap)
        return self._group.gather(logits)[:, : self._vocab_size]

    def _attention(
        self,
        layer: FusedLayer,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        ropes: dict[str, Rope],
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Adds the pending `delta` to x; returns the output of the layer's attention."""
        return layer.attention.attend(self._added(x, delta, layer.input_norm), ropes, batch)

    def _after_attention(self, layer: FusedLayer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Adds the attention's output to x; returns the next pending delta."""
        delta = self._delta(layer, layer.attention.output(attended), layer.post_attention_norm)
        if layer.mlp is None:
            return delta
        return self._delta(layer, layer.mlp(self._added(x, delta, layer.mlp_norm)), layer.post_mlp_norm)

    def _added(self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm | None) -> torch.Tensor:
        """Adds the pending `delta` to x in place; returns the norm of x."""
        if norm is None:
            return x if delta is None else x.add_(delta)
        normed = self.ops.norm(x, norm) if delta is None else self.ops.add_norm(x, delta, norm)
        return normed if self.adapters is None else self.adapters.places.norms.change(self.ops, norm, x, normed)

    def _delta(self, layer: FusedLayer, output: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """Returns the addition to the residual stream, from this rank's part of the output of half a layer."""
        delta = self._group.sum(output)
        if norm is not None:
            delta = self._added(delta, None, norm)
        return delta if layer.residual_multiplier == 1.0 else delta.mul_(layer.residual_multiplier)


def _tap(taps: AuxiliaryStates | None, layer_idx: int, x: torch.Tensor, delta: torch.Tensor | None) -> None:
    """Records the input of a layer, the residual stream, if a draft head reads it. `delta`: the pending addition."""
    if taps is not None and layer_idx in taps.layers:
        taps.states.append(x.clone() if delta is None else x + delta)
