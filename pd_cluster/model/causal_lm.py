"""The runner's view of a loaded model: a ForwardBatch in, logits of its sampled rows out.

`PlainCausalLM` calls transformers' own forward; `FusedCausalLM` runs the same layers in its own loop. Neither knows
requests or files.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from pd_cluster.model.attention.latent import LatentCache
from pd_cluster.model.attention_choice import SDPA, Attention
from pd_cluster.model.batch import ForwardBatch, Taps
from pd_cluster.model.declared import LayerCache, cache_argument, caches_of, has_latents
from pd_cluster.model.layers.fused_layer import FusedLayer
from pd_cluster.model.layers.linear import Linear
from pd_cluster.model.layers.ops import Norm, Ops, Rope
from pd_cluster.model.layers.rope import LengthRotary, LogN
from pd_cluster.model.layers.rope_tables import MODELS_ORDER, RopeTables
from pd_cluster.model.layers.up_projections import put_up_projections
from pd_cluster.model.layers.weight import WeightForm
from pd_cluster.model.lora.adapters import Adapters
from pd_cluster.model.parallel.group import Alone, Group
from pd_cluster.model.rope_limit import RopeLimit
from pd_cluster.model.vision.experts import ByKind
from pd_cluster.model.weak_hook import WeakHook

FORGETFUL = ("StableLmAttention", "NemotronAttention")  # the layers around these do not pass the batch on

ASKS_FOR_PADDING = "warn_if_padding_and_no_attention_mask"  # a method of transformers' models; no batch here is padded

NO_POSITIONS = RopeLimit(why_not="nothing proves that this model takes them")


class CausalLM(Protocol):
    config: Any  # transformers' own
    kernels: str  # the kernels in use, for the log
    attention: str  # the attention in use
    rope_limit: RopeLimit  # the rotary positions that requests may bring
    key_order: str  # of a head's features in the KV pool
    key_features: torch.Tensor | None  # [head_dim] int64: that order, of the model's own features; None: as they are
    embedding_factor: float  # of embeddings, before the first layer
    adapters: Adapters | None  # None: it was loaded without places for adapters
    caches: tuple[LayerCache, ...]  # what each layer keeps, on this rank
    bf16_way: str  # how weights of bfloat16 are multiplied with float32 activations; "": not so

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns logits [num_samples, vocab_size] of `batch.sample_rows`; writes keys and values to the batch's pool.

        Fills in the states of `batch.hidden`, if it is there, on every rank. They remain None if a model has no part
        without its output layer.
        When it returns on rank 0, every rank has written; on accelerators, once rank 0's device has reached that point.
        On ranks other than 0 the logits cover this rank's part of the vocabulary.
        """


class PlainCausalLM:
    """transformers' forward, with attention through the function that the loader registered."""

    def __init__(
        self,
        model: Any,
        caches: tuple[LayerCache, ...] = (),
        vocab_size: int = 0,
        group: Group | None = None,
        attention: Attention = SDPA,
        logn: LogN | None = None,
        rope_limit: RopeLimit | None = None,
    ) -> None:
        """`caches`: its own, if they are known. `vocab_size`: the whole model's, if this is one rank's share.

        `rope_limit` None: no positions but indices.
        """
        self.config, self.caches = model.config, caches or caches_of(model)
        self.adapters: Adapters | None = None
        self.attention = attention.name
        self.kernels = f"transformers' modules, attention by {attention.name}"
        self.key_order = MODELS_ORDER
        self.key_features: torch.Tensor | None = None
        self.embedding_factor = 1.0
        self.bf16_way = ""
        self._attend = attention.write_and_attend
        self._has_latents, self._cache_argument = has_latents(self.caches), cache_argument(model)
        self._up_projections = put_up_projections(model) if self._has_latents else []
        self.model = model
        self._vocab_size = vocab_size or model.config.vocab_size
        self._group = group or Alone()
        self._batch: ForwardBatch | None = None
        self._logn = logn
        self.rope_limit = rope_limit or NO_POSITIONS
        held = (getattr(module, "form", None) for module in model.modules())
        self.rounds_activations = any(isinstance(form, WeightForm) and form.rounds_activations for form in held)
        self._by_kind = [module for module in model.modules() if isinstance(module, ByKind)]
        self._rotaries = [module for module in model.modules() if isinstance(module, LengthRotary)]
        for module in _below_output_layer(model):
            module.register_forward_hook(WeakHook(self._keep_hidden))
        for module in model.modules():
            if type(module).__name__ in FORGETFUL:
                module.register_forward_pre_hook(WeakHook(self._remind), with_kwargs=True)
            if hasattr(module, ASKS_FOR_PADDING):  # in each step it would wait for the device
                setattr(module, ASKS_FOR_PADDING, lambda *_: None)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        batch.write_and_attend = self._attend
        if self._logn is not None:
            batch.query_factors = self._logn.factors(batch)
        if self.adapters is not None:
            self.adapters.places.begin(batch)
        self._set_batch(batch)
        tokens: dict[str, Any] = {"input_ids": batch.input_ids}
        if batch.images is not None or batch.virtual is not None:
            embeddings = self.model.get_input_embeddings()(batch.input_ids)
            if batch.images is not None:
                batch.images.embed(embeddings[0])
            if batch.virtual is not None:
                batch.virtual.embed(embeddings[0])
            tokens = {"inputs_embeds": embeddings}
        try:
            if self._has_latents:
                tokens[self._cache_argument] = LatentCache(batch)
            logits: torch.Tensor = self.model(
                **tokens,
                position_ids=batch.rope_positions,
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
        images = None if batch is None else batch.images
        for up in self._up_projections:
            up.is_absorbed = batch is not None
        for block in self._by_kind:
            block.rows = None if images is None else images.experts

    def take_deep_features(self) -> None:
        """Lets its layers take what pictures add to the residual stream after them (DeepStack)."""
        for layer_idx, layer in enumerate(self.model.model.layers):
            layer.register_forward_hook(partial(WeakHook(self._deepen), layer_idx))

    def _deepen(self, layer_idx: int, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if self._batch is not None and self._batch.images is not None:
            self._batch.images.deepen(output[0], layer_idx)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Joins the shares of the module's own logits to […, vocab_size]."""
        return self._group.gather(logits)[..., : self._vocab_size]

    def _keep_hidden(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Keeps the wanted rows of what the layers return to the output layer: transformers' `last_hidden_state`."""
        if self._batch is not None and (hidden := self._batch.hidden) is not None:
            hidden.states = output[0][0, hidden.rows]

    def _remind(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs if self._batch is None else {**kwargs, "forward_batch": self._batch}


def _below_output_layer(model: Any) -> list[torch.nn.Module]:
    """Returns the modules that return `last_hidden_state`, the outermost last; OPT's own calls only the inner one."""
    base = model.base_model
    found = [module for module in (base.get_decoder(), base) if module is not model]
    return found if len(found) < 2 or found[0] is not found[1] else found[:1]


class WholeDecoder(Protocol):
    """All layers of a step as one function."""

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether it can compute this batch."""

    def __call__(self, x: torch.Tensor, ropes: dict[str, Rope], batch: ForwardBatch) -> torch.Tensor:
        """Updates x; returns what the last layer adds to it."""


@runtime_checkable
class JoinsLayers(Protocol):
    """`Ops` that may compute all layers at once."""

    def decoder(self, layers: Sequence[FusedLayer]) -> WholeDecoder | None:
        """None: they are computed one by one."""


@dataclass(frozen=True, slots=True)
class ModelEnds:
    """The parts of a fused model around its layers."""

    embed: Callable[[torch.Tensor], torch.Tensor]
    ropes: RopeTables
    norm: Norm | None  # None: `head` has it, and states are those before it
    head: Linear
    vocab_size: int  # the whole model's
    embedding_factor: float = 1.0  # which `embed` applies
    bf16_way: str = ""  # as in CausalLM
    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None  # a draft head's: to x


@dataclass(frozen=True, slots=True)
class Served:
    """A loader finds this out about a model before it takes it apart."""

    caches: tuple[LayerCache, ...]
    rope_limit: RopeLimit = NO_POSITIONS
    adapters: Adapters | None = None


class FusedCausalLM:
    """Updates the residual stream x in place; the output of a half-layer is added at the next norm."""

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
        self._vocab_size, self._group = ends.vocab_size, group or Alone()
        self.attention, self.key_order = ops.attention, ends.ropes.key_order
        self.bf16_way = ends.bf16_way
        products = f", products in bfloat16 by {self.bf16_way}" if self.bf16_way else ""
        self.kernels = f"fused layers, {ops.name} kernels, attention by {ops.attention}{products}"
        self.key_features: torch.Tensor | None = ends.ropes.order
        self.embedding_factor = ends.embedding_factor
        self.ends, self.layers = ends, layers
        self._embed, self._ropes, self._norm, self._head = ends.embed, ends.ropes, ends.norm, ends.head
        self.decoder = self._joined(layers)
        self._parts: dict[tuple[int, ...], list[WholeDecoder]] = {}  # by taps, the decoders between them
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
        hidden = batch.hidden
        if taps is not None and not taps.layers:
            return self._tapped(batch, x, attended)
        rows = batch.sample_rows if hidden is None else hidden.kept  # the other rows of the last layer are not read
        if len(rows) == 0:
            self._group.sum(x.new_zeros(1))  # when this returns, every rank has written its last layer
            return x.new_empty(0, self._vocab_size)
        if len(rows) < len(x):
            x, attended = x[rows], attended[rows]
            if self.adapters is not None:
                self.adapters.places.rows.keep(rows.numpy() if rows.device.type == "cpu" else batch.kept_rows)
        delta = self._after_attention(last, x, attended)
        x = self._added(x, delta, self._norm)
        if hidden is not None:
            hidden.states, x = x[hidden.hidden_at], x[hidden.logits_at]
            if len(x) == 0:
                return x.new_empty(0, self._vocab_size)
        return self.logits_of(x)

    def _joined(self, layers: Sequence[FusedLayer]) -> WholeDecoder | None:
        is_alone = isinstance(self._group, Alone)
        return self.ops.decoder(layers) if is_alone and isinstance(self.ops, JoinsLayers) else None

    def _decoded(self, x: torch.Tensor, ropes: dict[str, Rope], batch: ForwardBatch) -> torch.Tensor:
        """Computes all layers as one, or as one between two taps; returns what the last one adds to x."""
        taps = batch.taps
        if taps is None or not taps.layers:
            assert self.decoder is not None
            return self.decoder(x, ropes, batch)
        if (parts := self._parts.get(taps.layers)) is None:
            edges = [0, *taps.layers, len(self.layers)]
            found = [self._joined(self.layers[first:stop]) for first, stop in itertools.pairwise(edges) if first < stop]
            parts = self._parts[taps.layers] = [part for part in found if part is not None]
            assert len(parts) == len(found)  # they are parts of one that was joined
        if taps.layers[0] == 0:
            taps.states.append(x.clone())
        delta = parts[0](x, ropes, batch)
        for part in parts[1:]:
            taps.states.append(x.add_(delta).clone())
            delta = part(x, ropes, batch)
        return delta

    def _tapped(self, batch: ForwardBatch, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Computes the second half of the last layer for all rows, whose final states are tapped; returns logits."""
        assert batch.taps is not None
        x = self._added(x, self._after_attention(self.layers[-1], x, attended), self._norm)
        batch.taps.states.append(x)
        if (hidden := batch.hidden) is not None:
            hidden.states = x[hidden.rows]
        x = x[batch.sample_rows]
        return self.logits_of(x) if len(x) else x.new_empty(0, self._vocab_size)

    def logits_of(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output layer's [num_rows, vocab_size] of final states [num_rows, hidden_size]."""
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
        """Adds the pending delta to x; returns what the layer's attention makes of it."""
        return layer.attention.attend(self._added(x, delta, layer.input_norm), ropes, batch)

    def _after_attention(self, layer: FusedLayer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Adds the attention's output to x; returns the next pending delta."""
        delta = self._delta(layer, layer.attention.output(attended), layer.post_attention_norm)
        return self._delta(layer, layer.mlp(self._added(x, delta, layer.mlp_norm)), layer.post_mlp_norm)

    def _added(self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm | None) -> torch.Tensor:
        """Adds the pending delta to x in place; returns x normed."""
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


def _tap(taps: Taps | None, layer_idx: int, x: torch.Tensor, delta: torch.Tensor | None) -> None:
    """Notes the residual stream that enters a layer, if a draft head reads it. `delta`: what is still to be added."""
    if taps is not None and layer_idx in taps.layers:
        taps.states.append(x.clone() if delta is None else x + delta)
