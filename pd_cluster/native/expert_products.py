"""Computes the experts of a block in one call of the C kernels, for experts with packed products (packed_products.py).

Results are bitwise equal to separate calls per expert. One call is faster, because threads share the work of all
experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from pd_cluster.native.packed_products import Linear, PackedProduct

_Pointer, _Int = ctypes.c_void_p, ctypes.c_int64


class ExpertsCall(ctypes.Structure):
    """Experts in expert_products.h."""

    _fields_ = (
        *((name, _Int) for name in ("num_rows", "top_k", "num_experts", "num_threads", "activation")),
        *((name, _Pointer) for name in ("gate_ups", "downs", "chosen", "weights", "x", "out", "starts", "scratch")),
    )


class ExpertProducts:
    """Sums the chosen experts' outputs times the row's weights, in the order of the experts."""

    __slots__ = ("_addresses", "_call", "_kept", "_library", "hidden_size")

    def __init__(self, gate_ups: Sequence[PackedProduct], downs: Sequence[PackedProduct], activation: int) -> None:
        self._library, self._kept = gate_ups[0].library, (*gate_ups, *downs)
        self._library.pd_experts.argtypes = self._library.pd_experts_nbytes.argtypes = [_Pointer]
        self._library.pd_experts.restype, self._library.pd_experts_nbytes.restype = None, _Int
        self.hidden_size = downs[0].out_features
        self._addresses = torch.tensor(
            [[ctypes.addressof(each.call) for each in layers] for layers in (gate_ups, downs)]
        )
        self._call = ExpertsCall(num_experts=len(downs), activation=activation)
        self._call.gate_ups, self._call.downs = (each.data_ptr() for each in self._addresses)

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Takes x [num_rows, hidden_size] float32; chosen int64 and weights float32, both [num_rows, top_k]."""
        assert x.dtype == weights.dtype == torch.float32
        assert chosen.dtype == torch.int64
        assert chosen.shape == weights.shape
        assert x.shape == (len(chosen), self.hidden_size)
        x, chosen, weights = x.contiguous(), chosen.contiguous(), weights.contiguous()
        out, starts = torch.zeros_like(x), torch.empty(self._call.num_experts + 1, dtype=torch.int64)
        call = ExpertsCall.from_buffer_copy(self._call)  # other threads may compute with these experts
        call.num_rows, call.top_k = chosen.shape
        call.num_threads = torch.get_num_threads()
        call.chosen, call.weights, call.x = chosen.data_ptr(), weights.data_ptr(), x.data_ptr()
        call.out, call.starts = out.data_ptr(), starts.data_ptr()
        address = ctypes.addressof(call)
        scratch = torch.empty(self._library.pd_experts_nbytes(address), dtype=torch.uint8)
        call.scratch = scratch.data_ptr()
        self._library.pd_experts(address)
        return out


def experts_at_once(gate_ups: Sequence[Linear], downs: Sequence[Linear], activation: int) -> ExpertProducts | None:
    """Returns the experts' kernel; None if any of the layers is not packed. `activation`: see row_kernels.h."""
    firsts = [each for each in gate_ups if isinstance(each, PackedProduct)]
    seconds = [each for each in downs if isinstance(each, PackedProduct)]
    if not firsts or (len(firsts), len(seconds)) != (len(gate_ups), len(downs)):
        return None
    return ExpertProducts(firsts, seconds, activation)
