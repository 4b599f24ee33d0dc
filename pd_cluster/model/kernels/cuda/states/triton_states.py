"""One recurrent layer in Triton, between its projections: see states_kernels.py. No launch waits for the device.

Launch sizes depend on the layer's shape and on the step's numbers of sequences and rows; a program's results do not.
Sums and states are float32; inputs may have 16 bits, and results have their dtype. Another library's chunk kernels may
compute the recurrence of long sequences (chunk_choice.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import triton

from pd_cluster.devices.device import Device
from pd_cluster.model.inputs.forward_batch import on_device
from pd_cluster.model.inputs.state_rows import StateRows
from pd_cluster.model.kernels.cuda.elementwise_kernels import DTYPES
from pd_cluster.model.kernels.cuda.states import states_convolution as convolutions
from pd_cluster.model.kernels.cuda.states import states_kernels as kernels
from pd_cluster.model.kernels.cuda.states.chunk_passes import ChunkPass, Table, divided
from pd_cluster.model.layers.states.recurrent_kernels import StateShape
from pd_cluster.native.recurrence_values import GATES, Convolution, GatedDelta, GatedNorm, Mamba2, StateInputs

KERNELS = range(2, 17)  # kernel sizes of a convolution
MOST_WIDTH = 256  # the largest width of a key, or of B and C
MOST_PARTS = 3  # the most parts of a convolution
CONV_ROWS, CONV_CHANNELS = 4, 256  # a program's tile of a convolution
STATE_NUMBERS = 2048  # state values per program, whose only warp keeps them in registers
MOST_NORMED = 32768  # the most features of a norm


def takes(shape: StateShape) -> bool:
    """Whether the kernels support a layer of this shape."""
    return shape.kernel_size in KERNELS and shape.width <= MOST_WIDTH and shape.num_parts <= MOST_PARTS


class ChunkKernel(Protocol):
    """Another library's kernel for long sequences."""

    def __call__(
        self,
        inputs: StateInputs,
        convolved: torch.Tensor,
        state: torch.Tensor,
        passes: Sequence[ChunkPass],
        out: torch.Tensor,
    ) -> None:
        """Writes the passes' rows of `out` [num_rows, num_features], before the norm, and their blocks of `state`.

        `convolved` [num_rows, num_channels] float32: the convolution's results.
        """


class StateSlots(NamedTuple):
    """Some sequences of a step and their states, on the device: see states_kernels.py."""

    segments: torch.Tensor
    starts: torch.Tensor
    row_places: torch.Tensor

    @classmethod
    def of(cls, table: Table, device: Device) -> StateSlots:
        is_first = np.append(True, table[1:, 2] != table[:-1, 2])[: len(table)]
        (begins,) = np.nonzero(is_first)
        starts = np.append(begins, len(table)).astype(np.int32)
        lens = table[starts[1:] - 1, 1] - table[begins, 0]
        places = np.repeat(table[begins][:, [0, 2]], lens, axis=0)
        arrays = {"segments": table, "starts": starts, "row_places": np.ascontiguousarray(places)}
        return cls(**on_device(arrays, device))

    @property
    def num_sequences(self) -> int:
        return len(self.starts) - 1


class StepSlots(NamedTuple):
    """The sequences of a step: `every` has all, `short` those that are advanced token by token, `passes` the others."""

    every: StateSlots
    short: StateSlots
    passes: list[ChunkPass]
    in_chunks: bool

    @classmethod
    def of(cls, rows: StateRows, in_chunks: bool) -> StepSlots:
        """Returns a step's slots, which its first layer makes. `in_chunks`: other kernels compute long sequences."""
        known = rows.kernel_state
        if not isinstance(known, cls) or known.in_chunks != in_chunks:
            device = rows.pool.device
            every = StateSlots.of(rows.table, device)
            table, passes = divided(rows.table) if in_chunks else (rows.table, [])
            short = StateSlots.of(table, device) if passes else every
            known = cls(every, short, [ChunkPass.of(runs, device) for runs in passes], in_chunks)
            rows.kernel_state = known
        return known


class TritonStates:
    """A `RecurrentKernel`, with float32 copies of the weights."""

    def __init__(
        self, convolution: Convolution, recurrence: GatedDelta | Mamba2 | None, chunks: ChunkKernel | None = None
    ) -> None:
        """`chunks`: computes the recurrence of long sequences."""
        num_channels, kernel_size = convolution.weight.shape
        self.num_features, self._chunks = num_channels, chunks
        self._recurrence, self._num_kept = recurrence, kernel_size - 1
        self._weight, self._bias = _own(convolution.weight.t()), _own(convolution.bias)
        parts = convolution.parts
        assert sum(part.num_heads * part.channels for part in parts) == num_channels
        tiles = np.cumsum([triton.cdiv(part.num_heads * part.channels, CONV_CHANNELS) for part in parts]).tolist()
        tiles += [tiles[-1]] * (MOST_PARTS - len(parts))  # tiles of missing parts are never reached
        parts = (*parts, *[parts[-1]] * (MOST_PARTS - len(parts)))
        self._num_tiles = tiles[-1]
        self._parts: dict[str, Any] = {"TILES_1": tiles[0], "TILES_2": tiles[1], "NUM_KEPT": self._num_kept}
        for at, (num_heads, channels) in enumerate(parts, start=1):
            self._parts |= {f"HEADS_{at}": num_heads, f"WIDTH_{at}": channels}
        self._has_silu = convolution.has_silu
        if isinstance(recurrence, GatedDelta):
            self.num_features = recurrence.num_heads * recurrence.value_width
            self._norm_groups = recurrence.num_heads
            self._numbers = [_own(each) for each in (recurrence.decay_bias, recurrence.rates)]
        elif recurrence is not None:
            self.num_features = recurrence.num_heads * recurrence.head_width
            self._norm_groups = recurrence.num_groups
            self._numbers = [_own(each) for each in (recurrence.step_bias, recurrence.rates, recurrence.skips)]
        self._norm = GatedNorm() if recurrence is None else recurrence.norm
        self._norm_weight = _own(self._norm.weight)

    def __call__(self, inputs: StateInputs, planes: Sequence[torch.Tensor], rows: StateRows) -> torch.Tensor:
        """See `RecurrentKernel`. Block ids are not checked here: they were when the batch was built."""
        x = inputs.convolved
        assert len(x) == rows.table[-1, 1]
        for given in inputs:
            assert given is None or (given.dtype in DTYPES and given.stride(1) == 1 and len(given) == len(x))
        for plane in planes:
            assert plane.dtype == torch.float32
            assert plane[0].is_contiguous()
        slots = StepSlots.of(rows, self._chunks is not None)
        if self._recurrence is None:
            return self._convolved(x, planes, slots.every, x.dtype)
        convolved = self._convolved(x, planes[1:], slots.every, torch.float32)
        is_bare = self._norm_weight is None and self._norm.gate == "none"
        found = x.new_empty(len(x), self.num_features, dtype=x.dtype if is_bare else torch.float32)
        assert planes[0][0].numel() == self.num_features * columns_of(self._recurrence)
        if slots.short.num_sequences:
            self.scan(inputs, convolved, planes[0], slots.short, found)
        if self._chunks is not None:
            self._chunks(inputs, convolved, planes[0], slots.passes, found)
        return found if is_bare else self._normed(found, inputs.gate, x.dtype)

    def scan(
        self, inputs: StateInputs, convolved: torch.Tensor, state: torch.Tensor, slots: StateSlots, out: torch.Tensor
    ) -> None:
        """Computes the recurrence of these sequences token by token; see ChunkKernel."""
        if isinstance(self._recurrence, GatedDelta):
            self._delta(self._recurrence, inputs, convolved, state, slots, out)
        elif self._recurrence is not None:
            self._mamba(self._recurrence, inputs, convolved, state, slots, out)

    def _convolved(
        self, x: torch.Tensor, planes: Sequence[torch.Tensor], places: StateSlots, dtype: torch.dtype
    ) -> torch.Tensor:
        assert x.shape[1] == self._weight.shape[1]
        out = x.new_empty(x.shape, dtype=dtype)
        planes = (*planes, *[planes[-1]] * (MOST_PARTS - len(planes)))
        strides = [plane.stride(0) for plane in planes]
        convolutions.convolve_rows[(triton.cdiv(len(x), CONV_ROWS), self._num_tiles)](
            *(x, out, self._weight, self._weight if self._bias is None else self._bias, *planes),
            *(places.row_places, len(x), x.stride(0), *strides),
            NUM_CHANNELS=x.shape[1],
            HAS_BIAS=self._bias is not None,
            HAS_SILU=self._has_silu,
            ROWS=CONV_ROWS,
            BLOCK=CONV_CHANNELS,
            enable_fp_fusion=False,
            **self._parts,
        )
        convolutions.keep_inputs[(places.num_sequences, self._num_tiles)](
            *(x, *planes, places.segments, places.starts, x.stride(0), *strides),
            KEPT=triton.next_power_of_2(self._num_kept),
            BLOCK=CONV_CHANNELS,
            **self._parts,
        )
        return out

    def _delta(
        self,
        delta: GatedDelta,
        inputs: StateInputs,
        qkv: torch.Tensor,
        state: torch.Tensor,
        places: StateSlots,
        out: torch.Tensor,
    ) -> None:
        decays, betas, (bias, rates) = inputs.decays, inputs.betas, self._numbers
        assert decays is not None
        assert betas is not None
        assert decays.shape[1] == bias.numel()
        keys = triton.next_power_of_2(delta.key_width)
        columns = min(STATE_NUMBERS // keys, triton.next_power_of_2(delta.value_width))
        tiles = triton.cdiv(delta.value_width, columns)
        kernels.delta_rule[(places.num_sequences, delta.num_heads, tiles)](
            *(qkv, decays, betas, bias, rates, out, state, places.segments, places.starts),
            *(decays.stride(0), betas.stride(0), state.stride(0)),
            NUM_HEADS=delta.num_heads,
            NUM_KEY_HEADS=delta.num_key_heads,
            KEY_WIDTH=delta.key_width,
            VALUE_WIDTH=delta.value_width,
            HAS_CHANNEL_DECAYS=bias.numel() != delta.num_heads,
            SCALE=delta.key_width**-0.5,
            KEYS=keys,
            COLUMNS=columns,
            num_warps=1,
            enable_fp_fusion=False,
        )

    def _mamba(
        self,
        mamba: Mamba2,
        inputs: StateInputs,
        xbc: torch.Tensor,
        state: torch.Tensor,
        places: StateSlots,
        out: torch.Tensor,
    ) -> None:
        steps = inputs.decays
        assert steps is not None
        assert steps.shape[1] == mamba.num_heads
        size = triton.next_power_of_2(mamba.state_size)
        tile = min(STATE_NUMBERS // size, triton.next_power_of_2(mamba.head_width))
        least, most = mamba.step_limits
        kernels.mamba_scan[(places.num_sequences, mamba.num_heads, triton.cdiv(mamba.head_width, tile))](
            *(xbc, steps, *self._numbers, out, state, places.segments, places.starts, steps.stride(0), state.stride(0)),
            NUM_HEADS=mamba.num_heads,
            NUM_GROUPS=mamba.num_groups,
            HEAD_WIDTH=mamba.head_width,
            STATE_SIZE=mamba.state_size,
            LEAST_STEP=least,
            MOST_STEP=most,
            ROWS=tile,
            SIZE=size,
            num_warps=1,
            enable_fp_fusion=False,
        )

    def _normed(self, x: torch.Tensor, gate: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        out, width = x.new_empty(x.shape, dtype=dtype), x.shape[1] // self._norm_groups
        weight, kind = self._norm_weight, GATES.index(self._norm.gate)
        assert kind == 0 or (gate is not None and gate.shape == x.shape)
        block = triton.next_power_of_2(width)
        kernels.gated_norm[(len(x), self._norm_groups)](
            *(x, x if gate is None else gate, x if weight is None else weight, out),
            *(0 if gate is None else gate.stride(0), self._norm.eps),
            NUM_GROUPS=self._norm_groups,
            WIDTH=width,
            HAS_WEIGHT=weight is not None,
            WEIGHT_STRIDE=0 if weight is not None and weight.numel() == width else width,
            GATE=kind,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            enable_fp_fusion=False,
        )
        return out


def columns_of(recurrence: GatedDelta | Mamba2) -> int:
    """Returns the number of state values per feature."""
    return recurrence.key_width if isinstance(recurrence, GatedDelta) else recurrence.state_size


def _own(tensor: torch.Tensor | None) -> Any:
    """Returns a contiguous float32 copy of a tensor; None for None."""
    return None if tensor is None else tensor.detach().float().contiguous().clone()
