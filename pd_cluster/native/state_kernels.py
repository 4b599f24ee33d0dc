"""Computes recurrent layers in C, between their projections: a short convolution, a recurrence, and the norm after it.

The tokens of a sequence are computed one by one, with the planes of its state, so the bits of results depend neither
on the boundaries of steps nor on other rows. Knows nothing of models; all values are float32.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pd_cluster.native import build
from pd_cluster.native.recurrence_values import GATES, Convolution, GatedDelta, GatedNorm, Mamba2, StateInputs

ROWS_AT_ONCE = 128  # rows per phase, whose results stay in the cache for the next phase
KERNELS = range(2, 9)  # convolution.h, gated_delta.h, mamba2.h
MOST_WIDTH = 256  # maximum width of keys, and of B and C
_Pointer, _Int, _Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Sequences(ctypes.Structure):
    """Sequences in state_segments.h."""

    _fields_ = (
        *((name, _Int) for name in ("num_segments", "num_sequences")),
        *((name, _Pointer) for name in ("segments", "starts")),
    )


class _StatePlane(ctypes.Structure):
    """StatePlane in state_segments.h."""

    _fields_ = (("data", _Pointer), ("stride", _Int))


class _GatedNorm(ctypes.Structure):
    """GatedNorm in state_segments.h."""

    _fields_ = (
        *((name, _Int) for name in ("gate_kind", "gate_stride")),
        *((name, _Pointer) for name in ("gate", "weight")),
        ("weight_stride", _Int),
        ("eps", _Float),
    )


class _ConvPart(ctypes.Structure):
    """ConvPart in convolution.h."""

    _fields_ = (*((name, _Int) for name in ("num_heads", "channels", "first_channel")), ("kept", _StatePlane))


class _Convolution(ctypes.Structure):
    """Convolution in convolution.h."""

    _fields_ = (
        *((name, _Int) for name in ("num_parts", "kernel", "num_channels", "is_gated")),
        *((name, _Pointer) for name in ("parts", "weight", "bias", "x")),
        ("x_stride", _Int),
    )


class _Delta(ctypes.Structure):
    """Delta in gated_delta.h."""

    _fields_ = (
        *((name, _Int) for name in ("num_heads", "num_key_heads", "key_width", "value_width", "has_channel_decays")),
        ("state", _StatePlane),
        ("qkv", _Pointer),
        ("qkv_stride", _Int),
        *((name, _Pointer) for name in ("decays", "betas")),
        *((name, _Int) for name in ("decays_stride", "betas_stride")),
        *((name, _Pointer) for name in ("decay_bias", "rates", "out")),
        ("norm", _GatedNorm),
    )


class _Mamba(ctypes.Structure):
    """Mamba in mamba2.h."""

    _fields_ = (
        *((name, _Int) for name in ("num_heads", "num_groups", "head_width", "state_size")),
        ("state", _StatePlane),
        ("xbc", _Pointer),
        ("xbc_stride", _Int),
        ("steps", _Pointer),
        ("steps_stride", _Int),
        *((name, _Pointer) for name in ("step_bias", "rates", "skips")),
        *((name, _Float) for name in ("least_step", "most_step")),
        ("out", _Pointer),
        ("norm", _GatedNorm),
    )


class _StateLayer(ctypes.Structure):
    """StateLayer in recurrent_layers.h."""

    _fields_ = (
        *((name, _Int) for name in ("num_rows", "num_threads", "rows_at_once")),
        ("sequences", _Sequences),
        *((name, _Pointer) for name in ("convolution", "delta", "mamba", "convolved", "counters")),
    )


@functools.cache
def _function(flags: tuple[str, ...]) -> ctypes._NamedFuncPointer:
    function: ctypes._NamedFuncPointer = build.load(flags).pd_states
    function.argtypes, function.restype = [_Pointer], None
    return function


def can_run() -> bool:
    """Whether the kernels are enabled and available."""
    try:
        return build.are_wanted() and _function(build.FLAGS) is not None
    except build.KernelsUnavailable:  # the model's loader logs why
        return False


class StateKernel:
    """One recurrent layer. Raises KernelsUnavailable."""

    def __init__(
        self, convolution: Convolution, recurrence: GatedDelta | Mamba2 | None, flags: tuple[str, ...] = build.FLAGS
    ) -> None:
        self._function = _function(flags)
        num_channels, kernel = convolution.weight.shape
        assert kernel in KERNELS
        self._kept: list[torch.Tensor] = []
        self._parts = (_ConvPart * len(convolution.parts))()
        first = 0
        for part, (num_heads, channels) in zip(self._parts, convolution.parts, strict=True):
            part.num_heads, part.channels, part.first_channel = num_heads, channels, first
            first += num_heads * channels
        assert first == num_channels
        self._convolution = _Convolution(len(self._parts), kernel, num_channels, convolution.has_silu)
        self._convolution.weight = self._keep(convolution.weight.t())  # [kernel, num_channels]
        self._convolution.bias = None if convolution.bias is None else self._keep(convolution.bias)
        self._call: _Delta | _Mamba | None = None
        self.num_channels = self.num_features = num_channels
        self._num_decays = self._state_numel = 0
        if isinstance(recurrence, GatedDelta):
            self._call, self.num_features = self._delta(recurrence), recurrence.num_heads * recurrence.value_width
            self._num_decays, self._state_numel = (
                recurrence.decay_bias.numel(),
                self.num_features * recurrence.key_width,
            )
        elif recurrence is not None:
            self._call, self._num_decays = self._mamba(recurrence), recurrence.num_heads
            self.num_features = recurrence.num_heads * recurrence.head_width
            self._state_numel = self.num_features * recurrence.state_size

    def _delta(self, delta: GatedDelta) -> _Delta:
        assert delta.key_width <= MOST_WIDTH
        by_channel = delta.decay_bias.numel() != delta.num_heads
        assert delta.decay_bias.numel() == delta.num_heads * (delta.key_width if by_channel else 1)
        call = _Delta(delta.num_heads, delta.num_key_heads, delta.key_width, delta.value_width, by_channel)
        call.decay_bias, call.rates = self._keep(delta.decay_bias), self._keep(delta.rates)
        self._fill_norm(call.norm, delta.norm, delta.value_width)
        return call

    def _mamba(self, mamba: Mamba2) -> _Mamba:
        assert mamba.state_size <= MOST_WIDTH
        call = _Mamba(mamba.num_heads, mamba.num_groups, mamba.head_width, mamba.state_size)
        call.step_bias, call.rates, call.skips = map(self._keep, (mamba.step_bias, mamba.rates, mamba.skips))
        call.least_step, call.most_step = mamba.step_limits
        self._fill_norm(call.norm, mamba.norm, 0)
        return call

    def _keep(self, tensor: torch.Tensor) -> int:
        kept = tensor.detach().float().flatten().clone()  # a copy, so that the loaded weights can be freed
        self._kept.append(kept)
        return kept.data_ptr()

    def _fill_norm(self, call: _GatedNorm, norm: GatedNorm, width: int) -> None:
        """`width`: the width of a head. It shows whether each head has its own weights in the norm."""
        call.gate_kind, call.eps = GATES.index(norm.gate), norm.eps
        if norm.weight is not None:
            call.weight = self._keep(norm.weight)
            call.weight_stride = 0 if norm.weight.numel() == width else width

    def __call__(
        self, inputs: StateInputs, planes: Sequence[torch.Tensor], table: npt.NDArray[np.int32]
    ) -> torch.Tensor:
        """Returns [num_rows, num_features]. Leaves the states after the last rows in `planes`.

        `planes`: the plane of the recurrent state, if there is one, then the planes of the convolution's parts, each
        [num_blocks, …] float32 with strided blocks. `table` [num_segments, 4]: see model/inputs/state_rows.py.
        """
        num_rows = len(inputs.convolved)
        assert table.dtype == np.int32
        assert table.flags.c_contiguous
        first = 0 if self._call is None else 1
        convolution = _Convolution.from_buffer_copy(self._convolution)  # other threads may compute with this layer
        parts = type(self._parts).from_buffer_copy(self._parts)
        for part, plane in zip(parts, planes[first:], strict=True):
            _point_to(part.kept, plane, part.num_heads * part.channels * (convolution.kernel - 1))
        convolution.parts = ctypes.addressof(parts)
        convolution.x, convolution.x_stride = _rows(inputs.convolved, num_rows, self.num_channels)
        rows_at_once = num_rows if self._call is None else min(num_rows, ROWS_AT_ONCE)
        starts, counters = (
            np.empty(len(table) + 1, dtype=np.int32),
            np.zeros(2 * -(-num_rows // ROWS_AT_ONCE) + 3, dtype=np.int64),
        )
        out = convolved = torch.empty(rows_at_once, self.num_channels)
        layer = _StateLayer(num_rows, torch.get_num_threads(), rows_at_once)
        layer.sequences = _Sequences(len(table), 0, table.ctypes.data, starts.ctypes.data)
        layer.convolved, layer.counters = convolved.data_ptr(), counters.ctypes.data
        layer.convolution = ctypes.addressof(convolution)
        if self._call is not None:
            call = type(self._call).from_buffer_copy(self._call)
            out = torch.empty(num_rows, self.num_features)
            self._fill(call, inputs, out)
            _point_to(call.state, planes[0], self._state_numel)
            setattr(layer, "delta" if isinstance(call, _Delta) else "mamba", ctypes.addressof(call))
        self._function(ctypes.addressof(layer))
        return out

    def _fill(self, call: _Delta | _Mamba, inputs: StateInputs, out: torch.Tensor) -> None:
        """Sets the addresses of a step's rows, except for the convolution's results."""
        num_rows = len(out)
        assert inputs.decays is not None
        decays, stride = _rows(inputs.decays, num_rows, self._num_decays)
        if isinstance(call, _Delta):
            assert inputs.betas is not None
            call.decays, call.decays_stride = decays, stride
            call.betas, call.betas_stride = _rows(inputs.betas, num_rows, call.num_heads)
        else:
            call.steps, call.steps_stride = decays, stride
        if call.norm.gate_kind:
            assert inputs.gate is not None
            call.norm.gate, call.norm.gate_stride = _rows(inputs.gate, num_rows, self.num_features)
        call.out = out.data_ptr()


def _rows(x: torch.Tensor, num_rows: int, width: int) -> tuple[int, int]:
    """Returns the address of the rows, and their stride in floats."""
    assert x.dtype == torch.float32
    assert x.shape == (num_rows, width)
    assert x.stride(1) == 1 or width == 1
    return x.data_ptr(), x.stride(0)


def _point_to(call: _StatePlane, plane: torch.Tensor, numel: int) -> None:
    assert plane.dtype == torch.float32
    assert plane[0].numel() == numel
    assert plane[0].is_contiguous()
    call.data, call.stride = plane.data_ptr(), plane.stride(0)
