"""Rope scaling that depends on a request's length (dynamic NTK and longrope), for each request separately.

transformers chooses the scaling for a whole forward pass, by its largest position. Here each request gets the
frequencies for its own length, so that its results depend neither on other requests nor on its own progress.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.errors import ModelError
from pd_cluster.model.inputs.forward_batch import ForwardBatch, on_device
from pd_cluster.model.inputs.step_input import Ints
from pd_cluster.model.layers.rope.rope_limit import RopeLimit
from pd_cluster.numerics import RopeScaling

USE_LOGN = "use_logn_attn"  # LMDeploy's name for this override
MAX_LENGTHS = 256  # lengths with cached frequencies
TABLES = ("wpe", "embed_positions")  # modules with a learned vector for each position

Turns = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [1, num_tokens, head_dim]; DeepSeek-V2: one complex tensor


class LengthRotary(torch.nn.Module):
    """Replaces a model's rotary embedding. `batch`: the current step; None outside of steps."""

    def __init__(self, rotary: Any, rope: RopeScaling) -> None:
        super().__init__()
        self.rotary = rotary
        self.batch: ForwardBatch | None = None
        self.uses_transformers_rule = False  # True in passes that serve as a reference
        self._rope = rope
        self._short: torch.Tensor = rotary.original_inv_freq
        self._turn: Callable[..., Turns] = inspect.unwrap(type(rotary).forward)  # without transformers' own choice
        self._known: OrderedDict[int, torch.Tensor] = OrderedDict()

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Turns:
        """Takes `position_ids` [1, num_tokens]. Outside of a step, all belong to a single short request."""
        if self.uses_transformers_rule:
            self.rotary.inv_freq = self._short.to(x.device, copy=True)  # a copy, because some code writes to it
            self.rotary.max_seq_len_cached = self.rotary.original_max_seq_len
            found: Turns = self.rotary(x, position_ids)
            return found
        if self.batch is None:
            return self._turned(x, position_ids, 0)
        lens = self._lengths(self.batch)
        distinct = np.unique(lens)
        if len(distinct) == 1:
            return self._turned(x, position_ids, int(distinct[0]))
        rows = np.repeat(lens, self.batch.query_lens)
        turned: list[torch.Tensor] = []
        for length in distinct.tolist():
            own = on_device({"rows": np.flatnonzero(rows == length)}, self.batch.pool.device)["rows"]
            found = self._turned(x, position_ids[:, own], length)
            parts: Sequence[torch.Tensor] = (found,) if isinstance(found, torch.Tensor) else found
            if not turned:
                turned = [part.new_empty(1, position_ids.shape[1], part.shape[-1]) for part in parts]
            for whole, part in zip(turned, parts, strict=True):
                whole[:, own] = part
        return turned[0] if len(turned) == 1 else (turned[0], turned[1])  # type: ignore[return-value]

    def _lengths(self, batch: ForwardBatch) -> Ints:
        """Returns the length [num_seqs] that determines each request's frequencies."""
        most = batch.most_tokens if batch.most_tokens is not None else batch.host_context_lens
        return np.array([self._rope.length(each) for each in most.tolist()], dtype=np.int64)

    @torch.no_grad()
    def _turned(self, x: torch.Tensor, position_ids: torch.Tensor, length: int) -> Turns:
        self.rotary.inv_freq = self._frequencies(length, x.device)
        return self._turn(self.rotary, x, position_ids)

    def _frequencies(self, length: int, device: torch.device) -> torch.Tensor:
        """Returns the frequencies for a length, [head_dim / 2] float32."""
        found = self._known.get(length)
        if found is None or found.device != device:
            found = self._short
            if length:
                found, _ = ROPE_INIT_FUNCTIONS[self.rotary.rope_type](self.rotary.config, device, seq_len=length)
            found = self._known[length] = found.to(device)
            if len(self._known) > MAX_LENGTHS:
                self._known.popitem(last=False)
        return found


class LogN:
    """Log-n attention: beyond the trained positions, queries grow with the logarithm of the position.

    The factor of position p (from 0) is log(p + 1) / log(trained), but at least 1.
    """

    def __init__(self, trained: int) -> None:
        self._trained = trained

    def factors(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Returns [num_tokens] float32; None if all factors are 1."""
        if int(batch.host_context_lens.max()) <= self._trained:
            return None
        positions = batch.rope_positions[0].to(torch.float64) + 1
        return (positions.log() / math.log(self._trained)).clamp_(min=1.0).float()


def rope_limit_of(model: torch.nn.Module, checkpoint: Checkpoint, has_logn: bool) -> RopeLimit:
    """Returns the rotary positions, or rows of a position table, that requests may choose for their tokens.

    transformers' rotary embeddings and position tables do not check positions. `model` is loaded, but not fused yet.
    Raises ModelError for a rope type that the model cannot scale.
    """
    name, why_not = f"model_type {checkpoint.model_type}", ""
    rotaries = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    has_table = any(path.rpartition(".")[2] in TABLES for path, _ in model.named_modules())
    if checkpoint.is_unproven:
        why_not = f"{name} is unproven, and no check covers positions from requests"
    elif checkpoint.rope.kind:
        why_not = f"rope_type {checkpoint.rope.kind} derives its frequencies from a request's number of tokens"
    elif has_logn:
        why_not = f"{USE_LOGN} derives its factors from a request's number of tokens"
    elif not rotaries and not has_table:
        why_not = f"{name} has neither a rotary embedding nor a table of positions"
    if checkpoint.stretch is not None and not any(checkpoint.stretch.kind in _kinds(each) for each in rotaries):
        raise ModelError(
            f"rope_type {checkpoint.stretch.kind}: {name} has no rotary embedding of that kind; remove rope_type"
        )
    num_rows = 3 if rotaries and all(hasattr(module, "mrope_section") for module in rotaries) else 1
    return RopeLimit(num_rows, checkpoint.max_position_embeddings, why_not)


def _kinds(rotary: Any) -> tuple[str, ...]:
    """Returns the rope types of a rotary embedding; it may have one for each kind of layer."""
    found = getattr(rotary, "rope_type", "")
    return tuple(found.values()) if isinstance(found, dict) else (str(found),)


def install_length_rotary(model: torch.nn.Module, rope: RopeScaling) -> None:
    """Replaces the rotary embeddings that depend on the length. Raises ModelError if the model has none to replace."""
    if not rope.kind:
        return
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if hasattr(child, "original_inv_freq") and hasattr(child, "rope_type")
    ]
    for parent, name, child in places:
        if child.rope_type != rope.kind:
            raise ModelError(
                f"rope_type {rope.kind}: this architecture has rope_type {child.rope_type} and cannot be served "
                f"with another"
            )
        setattr(parent, name, LengthRotary(child, rope))
    if not places:
        raise ModelError(f"rope_type {rope.kind}: this architecture has no rotary embedding of that kind")
