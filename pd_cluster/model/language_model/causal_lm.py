"""The interface of a loaded model to the runner: it takes a ForwardBatch and returns logits of its sampled rows.

`PlainCausalLM` calls transformers' own forward; fused_lm.py runs the same layers in its own loop. Neither uses
requests or files.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any, Protocol

import torch

from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.kernels.attention_backend import SDPA, Attention
from pd_cluster.model.language_model.cache_declaration import (
    LayerCache,
    cache_argument,
    caches_of,
    has_latents,
    has_states,
)
from pd_cluster.model.language_model.weak_hook import WeakHook
from pd_cluster.model.layers.attention.latent_attention import LatentCache
from pd_cluster.model.layers.attention.up_projections import split_up_projections
from pd_cluster.model.layers.linear_weight import WeightForm
from pd_cluster.model.layers.rope.rope_limit import RopeLimit
from pd_cluster.model.layers.rope.rope_scaling import LengthRotary, LogN
from pd_cluster.model.layers.rope.rope_tables import MODELS_ORDER
from pd_cluster.model.layers.states.module_states import drive
from pd_cluster.model.lora.loaded_adapters import Adapters
from pd_cluster.model.parallel.expert_modules import ParallelExperts
from pd_cluster.model.parallel.parallel_layers import RankShare
from pd_cluster.model.parallel.rank_group import SingleRank
from pd_cluster.model.vision.vision_experts import ModalityExperts

WITHOUT_BATCH_ARGUMENT = ("StableLmAttention", "NemotronAttention")  # their layers do not pass on the batch

PADDING_CHECK = "warn_if_padding_and_no_attention_mask"  # transformers' method; batches here have no padding

NO_POSITIONS = RopeLimit(why_not="no check at load shows that this model supports them")


class CausalLM(Protocol):
    config: Any  # from transformers
    kernels: str  # name of the kernels in use, for the log
    attention: str  # name of the attention in use
    rope_limit: RopeLimit  # the rotary positions that requests may have
    key_order: str  # order of a head's features in the KV pool, by name
    # [head_dim] int64: for each feature in the pool's order, its index in the model's order; None: both are equal.
    key_features: torch.Tensor | None
    embedding_factor: float  # factor of embeddings before the first layer
    adapters: Adapters | None  # None: loaded without support for adapters
    caches: tuple[LayerCache, ...]  # the cache of each layer on this rank
    bf16_way: str  # how bfloat16 weights are multiplied with float32 activations; "": not used
    prompt_states: str  # see Ops

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns logits [num_samples, vocab_size] of `batch.sample_rows`; writes keys and values to the batch's pool.

        Fills in the states of `batch.hidden`, if it is set, on every rank; they remain None if the model has no module
        below its output layer. When the call returns on rank 0, all ranks have written to their pools; on accelerators,
        this holds once rank 0's device has reached that point. On other ranks the logits cover only the rank's part of
        the vocabulary.
        """

    def take_part(self) -> None:
        """Computes this rank's experts for a step of the unit's other members, when this member has no rows.

        Only for models whose experts are spread over instances, all of which compute the layers in the same order.
        """


class PlainCausalLM:
    """Runs transformers' forward; its attention is the function that the loader registered."""

    def __init__(
        self,
        model: Any,
        caches: tuple[LayerCache, ...] = (),
        share: RankShare | None = None,
        attention: Attention = SDPA,
        logn: LogN | None = None,
        rope_limit: RopeLimit | None = None,
    ) -> None:
        """`caches`: the layers' caches, if known. `share`: set if this is one rank's share of the model.

        `rope_limit` None: requests cannot have rotary positions of their own.
        """
        self.config, self.caches = model.config, caches or caches_of(model)
        self.adapters: Adapters | None = None
        self.attention = attention.name
        self.kernels = f"transformers' modules, attention by {attention.name}"
        self.key_order = MODELS_ORDER
        self.key_features: torch.Tensor | None = None
        self.embedding_factor = 1.0
        self.bf16_way = self.prompt_states = ""
        self.attend = attention.write_and_attend
        self._has_latents, self._cache_argument = has_latents(self.caches), cache_argument(model)
        self._up_projections = split_up_projections(model) if self._has_latents else []
        self._reads = {layer: each.reads for layer, each in enumerate(self.caches) if each.reads is not None}
        self._states = drive(model) if has_states(self.caches) else []
        self.model = model
        self._vocab_size = model.config.vocab_size if share is None else share.plan.vocab_size
        self._group = SingleRank() if share is None else share.group
        self._batch: ForwardBatch | None = None
        self._logn = logn
        self.rope_limit = rope_limit or NO_POSITIONS
        held = (getattr(module, "form", None) for module in model.modules())
        self.rounds_activations = any(isinstance(form, WeightForm) and form.rounds_activations for form in held)
        self._by_kind = [module for module in model.modules() if isinstance(module, ModalityExperts)]
        self._rotaries = [module for module in model.modules() if isinstance(module, LengthRotary)]
        for module in _below_output_layer(model):
            module.register_forward_hook(WeakHook(self._keep_hidden))
        for module in model.modules():
            if type(module).__name__ in WITHOUT_BATCH_ARGUMENT:
                module.register_forward_pre_hook(WeakHook(self._remind), with_kwargs=True)
            if hasattr(module, PADDING_CHECK):  # this check would wait for the device in each step
                setattr(module, PADDING_CHECK, lambda *_: None)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        batch.write_and_attend, batch.reads = self.attend, self._reads
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

    def take_part(self) -> None:
        for block in self._experts:
            block.take_part()

    @cached_property
    def _experts(self) -> list[ParallelExperts]:
        """Returns the blocks of experts. Not for a fused model, because fusing removes their weights."""
        return [module for module in self.model.modules() if isinstance(module, ParallelExperts)]

    def _set_batch(self, batch: ForwardBatch | None) -> None:
        self._batch = batch
        for rotary in self._rotaries:
            rotary.batch = batch
        for state in self._states:
            state.batch = batch
        images = None if batch is None else batch.images
        for up in self._up_projections:
            up.is_absorbed = batch is not None
        for block in self._by_kind:
            block.rows = None if images is None else images.experts

    def take_deep_features(self) -> None:
        """Makes each layer add the pictures' features for that layer to the residual stream (DeepStack)."""
        for layer_idx, layer in enumerate(self.model.model.layers):
            layer.register_forward_hook(partial(WeakHook(self._deepen), layer_idx))

    def _deepen(self, layer_idx: int, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if self._batch is not None and self._batch.images is not None:
            self._batch.images.deepen(output[0], layer_idx)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Gathers the logits of all ranks, each for its part of the vocabulary, as […, vocab_size]."""
        return self._group.gather(logits)[..., : self._vocab_size]

    def _keep_hidden(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Stores the requested rows of the output layer's input, which transformers calls `last_hidden_state`."""
        if self._batch is not None and (hidden := self._batch.hidden) is not None:
            hidden.states = output[0][0, hidden.rows]

    def _remind(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs if self._batch is None else {**kwargs, "forward_batch": self._batch}


def _below_output_layer(model: Any) -> list[torch.nn.Module]:
    """Returns the modules that return `last_hidden_state`, the outermost last; OPT calls only the inner one."""
    base = model.base_model
    found = [module for module in (base.get_decoder(), base) if module is not model]
    return found if len(found) < 2 or found[0] is not found[1] else found[:1]
