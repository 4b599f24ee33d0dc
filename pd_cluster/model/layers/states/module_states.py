"""transformers' own recurrent modules with a pool of states; each sequence of a step is computed separately.

The modules cannot tell where a sequence ends in a step's flat rows. So StateRows cuts the rows into segments, and the
module computes each segment from the state in the segment's block. Segments of one token from different sequences are
computed together, as rows of a batch. These modules are the reference for fused layers, and serve models that have no
fused layers. They promise equal tokens, not equal bits, since chunks and single tokens are summed differently.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.inputs.state_rows import NO_BLOCK, Segment, StateRows
from pd_cluster.model.layers.states.state_planes import StateParts, parts_of, state_modules

CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")  # names in different versions of transformers


class ModulesState(NamedTuple):
    """States in the shapes that transformers' modules use."""

    convolved: torch.Tensor  # [num_seqs, num_channels, kernel_size]: the last inputs; the oldest is not read
    recurrent: torch.Tensor | None  # [num_seqs, num_heads, num_rows, num_columns] float32


class SequenceCache:
    """Replaces transformers' cache in one call of a recurrent module, for rows [num_seqs, num_tokens, …].

    Has the methods that such modules call. There is always a previous state: zeros at the start of a sequence.
    """

    def __init__(self, state: ModulesState) -> None:
        self.convolved, self.recurrent = state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return True

    def is_recording_past(self, layer_idx: int | None = None) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return self.convolved

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.recurrent

    def update_conv_state(self, inputs: torch.Tensor, layer_idx: int, *_: object, **__: object) -> torch.Tensor:
        """Returns the stored inputs followed by the new ones, [num_seqs, num_channels, kernel_size + num_tokens]."""
        whole = torch.cat((self.convolved.to(inputs.dtype), inputs), dim=-1)
        self.convolved = whole[..., -self.convolved.shape[-1] :]
        return whole

    def update_recurrent_state(self, state: torch.Tensor, layer_idx: int, *_: object, **__: object) -> torch.Tensor:
        self.recurrent = state
        return state


class RecurrentForward:
    """Replaces a recurrent module's forward. With `batch` None it calls the original: transformers without a pool."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.parts: StateParts = parts_of(module)
        self.batch: ForwardBatch | None = None
        self._module = weakref.ref(module)  # weak, because the module refers to this object
        self._forward: Any = type(module).forward
        named = inspect.signature(self._forward).parameters
        self._cache_argument = next(name for name in CACHE_ARGUMENTS if name in named)
        limits = getattr(module, "time_step_limit", None)
        self._least_step = 0.0 if limits is None else float(limits[0])

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        module = self._module()
        assert module is not None
        if self.batch is None:
            output: torch.Tensor = self._forward(module, *args, **kwargs)
            return output
        rows = self.batch.states
        assert rows is not None
        hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]  # [1, num_tokens, hidden_size]
        layer_idx = module.layer_idx
        assert isinstance(layer_idx, int)
        planes = rows.pool.planes(layer_idx)
        output = torch.empty_like(hidden)
        for segments in _together(rows):
            self._compute(module, hidden, output, planes, segments)
        self.batch.state_written(layer_idx)
        return output

    def _compute(
        self,
        module: torch.nn.Module,
        hidden: torch.Tensor,
        output: torch.Tensor,
        planes: Sequence[torch.Tensor],
        segments: Sequence[Segment],
    ) -> None:
        """Computes one segment, or several of one token each; reads and writes their states in the pool."""
        if len(segments) == 1:
            at: Any = slice(segments[0].first, segments[0].stop)
            inputs = hidden[:, at]
        else:
            at = torch.tensor([each.first for each in segments], device=hidden.device)
            inputs = hidden[0, at][:, None]
        blocks = torch.tensor([each.block for each in segments], device=hidden.device)
        cache = SequenceCache(load(planes, blocks, self.parts, hidden.dtype))
        with _no_shorter_steps(module, self._least_step):
            computed = self._forward(module, inputs, **{self._cache_argument: cache})
        output[0, at] = computed.flatten(0, 1)
        store(planes, blocks, self.parts, ModulesState(cache.convolved, cache.recurrent))
        for each in segments:
            if each.keep != NO_BLOCK:
                for plane in planes:
                    plane[each.keep] = plane[each.block]


def drive(model: torch.nn.Module) -> list[RecurrentForward]:
    """Replaces the forward of each recurrent module by a RecurrentForward; returns these in layer order.

    Modules whose forward is already replaced keep theirs.
    """
    found = []
    for module in state_modules(model).values():
        if not isinstance(module.forward, RecurrentForward):
            module.forward = RecurrentForward(module)
        found.append(module.forward)
    return found


def _together(rows: StateRows) -> Iterator[Sequence[Segment]]:
    """Yields the segments to compute in one call: all single tokens of different sequences, or one other segment."""
    num_of = Counter(each.block for each in rows.segments)
    single: list[Segment] = []
    for each in rows.segments:
        if each.stop - each.first == 1 and num_of[each.block] == 1:
            single.append(each)
        else:
            yield [each]
    if single:
        yield single


def load(planes: Sequence[torch.Tensor], blocks: torch.Tensor, parts: StateParts, dtype: torch.dtype) -> ModulesState:
    """Reads the states in these blocks. `planes`: the layer's planes, as described by `parts.planes`, each
    [num_blocks, 1, num_heads, width]. `dtype`: the dtype of the modules' inputs.
    """
    recurrent, num_seqs = None, len(blocks)
    found = [plane.index_select(0, blocks)[:, 0] for plane in planes]  # each [num_seqs, num_heads, width]
    if parts.recurrent is not None:
        recurrent = found.pop(0).view(num_seqs, *parts.recurrent)
    convolved = [
        kept.view(num_seqs, part.num_heads, parts.num_kept, part.channels).transpose(2, 3).flatten(1, 2)
        for kept, part in zip(found, parts.convolved, strict=True)
    ]  # each [num_seqs, num_channels, num_kept]
    oldest = convolved[0].new_zeros(num_seqs, parts.num_channels, 1)
    return ModulesState(torch.cat((oldest, torch.cat(convolved, dim=1)), dim=2).to(dtype), recurrent)


def store(planes: Sequence[torch.Tensor], blocks: torch.Tensor, parts: StateParts, state: ModulesState) -> None:
    """Writes states to these blocks; the inverse of `load`."""
    planes, num_seqs = list(planes), len(blocks)
    if parts.recurrent is not None:
        assert state.recurrent is not None
        plane = planes.pop(0)
        plane[blocks] = state.recurrent.reshape(num_seqs, 1, plane.shape[2], -1).to(plane.dtype)
    kept = state.convolved[..., 1:].to(planes[0].dtype)
    by_part = torch.split(kept, [part.num_channels for part in parts.convolved], dim=1)
    for plane, part, own in zip(planes, parts.convolved, by_part, strict=True):
        by_head = own.reshape(num_seqs, part.num_heads, part.channels, parts.num_kept).transpose(2, 3)
        plane[blocks] = by_head.reshape(num_seqs, 1, part.num_heads, -1)


@contextmanager
def _no_shorter_steps(module: torch.nn.Module, least: float) -> Iterator[None]:
    """Applies the lower bound of Mamba-2's time step to single tokens, too; transformers applies it only to chunks.

    The time step is softplus(dt + bias), and dt are the last outputs of `in_proj`, one per head. So dt is bounded.
    """
    if least <= 0:
        yield
        return
    bias, projection = module.dt_bias, module.in_proj
    assert isinstance(bias, torch.Tensor)
    assert isinstance(projection, torch.nn.Module)
    least_dt = least + math.log(-math.expm1(-least)) - bias.float()  # softplus's inverse, [num_heads]

    def bound(_: torch.nn.Module, __: Any, projected: torch.Tensor) -> torch.Tensor:
        at = projected.shape[-1] - len(least_dt)
        return torch.cat((projected[..., :at], projected[..., at:].maximum(least_dt.to(projected.dtype))), dim=-1)

    handle = projection.register_forward_hook(bound)
    try:
        yield
    finally:
        handle.remove()
