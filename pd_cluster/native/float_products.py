"""Multiplies a few float32 rows in C with weights packed by oneDNN; bitwise equal to oneDNN, but faster.

For processors with AVX-512. oneDNN guarantees neither its packing nor its order of additions, so results must be
compared before use.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch.nn.functional import pad

from pd_cluster.native import build

MOST_ROWS = 96  # float_products.h
LINE, LINE_INPUTS = 64, 16
SPAN, NARROW_SPAN = 1024, 512  # the inputs that oneDNN adds at a time; NARROW_SPAN if a weight has at most SPAN inputs
_Pointer, _Int = ctypes.c_void_p, ctypes.c_int64


class _FloatsCall(ctypes.Structure):
    """Floats in float_products.h."""

    _fields_ = (
        *((name, _Int) for name in ("num_rows", "inputs", "outputs", "num_threads", "span")),
        *((name, _Pointer) for name in ("x", "words", "bias", "out")),
    )


@functools.cache
def _function() -> ctypes._NamedFuncPointer | None:
    if not build.are_wanted():
        return None
    try:
        function = getattr(build.load(), "pd_floats", None)
    except build.KernelsUnavailable:  # the model's loader has logged why
        return None
    if function is not None:
        function.argtypes, function.restype = [_Pointer], None
    return function


def can_run() -> bool:
    """Whether this processor has AVX-512, and the kernels use it."""
    return _function() is not None


class FloatProducts:
    """Maps x [..., K] float32 to x @ weight.T + bias, weight [N, K], bias [N], for 1 to MOST_ROWS rows."""

    __slots__ = ("_call", "_kept", "_run")

    def __init__(
        self,
        run: ctypes._NamedFuncPointer,
        packed: torch.Tensor,
        shape: tuple[int, int],
        bias: torch.Tensor | None,
    ) -> None:
        outputs, inputs = shape
        padded = None if bias is None else pad(bias.detach().float(), (0, -outputs % LINE)).contiguous()
        self._run, self._kept = run, (packed, padded)
        self._call = _FloatsCall(inputs=inputs, outputs=outputs, span=NARROW_SPAN if inputs <= SPAN else SPAN)
        self._call.words = torch.ops.mkldnn.data_ptr(packed)
        self._call.bias = None if padded is None else padded.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        call = _FloatsCall.from_buffer_copy(self._call)  # other threads may compute with this layer
        x = x.contiguous()
        out = torch.empty(*x.shape[:-1], call.outputs)
        call.num_rows, call.num_threads = x.numel() // call.inputs, torch.get_num_threads()
        call.x, call.out = x.data_ptr(), out.data_ptr()
        self._run(ctypes.addressof(call))
        return out


def few_rows(packed: torch.Tensor, shape: tuple[int, int], bias: torch.Tensor | None) -> FloatProducts | None:
    """Makes a layer from a weight [N, K] packed by oneDNN. Compare its results with oneDNN's before use.

    Returns None without kernels or AVX-512, or if the packed size implies another packing.
    """
    function = _function()
    nbytes = -(-shape[0] // LINE) * LINE * -(-shape[1] // LINE_INPUTS) * LINE_INPUTS * 4
    if function is None or torch.ops.mkldnn._nbytes(packed) != nbytes:
        return None
    return FloatProducts(function, packed, shape, bias)
