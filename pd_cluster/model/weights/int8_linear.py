"""Linear layers with int8 weights and int8 activations: for CPUs, and as a reference for other devices.

Sums of integers are exact, so a row's values depend neither on other rows nor on the number of threads.
"""

from __future__ import annotations

import torch

from pd_cluster.native.packed_products import quantize_rows

MOST = 127


class Int8Linear:
    """Computes quantized(x) @ codes.T * scales + bias: codes [N, K] int8, scales [N] float32, bias [N] or None.

    Each row has its own scale, see `quantize_rows`. With `inputs`, all rows have the scale and zero point in the file.
    |sums| stay below 2^31 for up to 131,072 input features.
    """

    __slots__ = ("_bias", "_codes", "_inputs", "_scales", "_sums")

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
    ) -> None:
        self._codes, self._scales, self._bias = codes.contiguous().t(), scales, bias
        self._inputs = None if inputs is None else (float(inputs[0]), float(inputs[1]))
        self._sums = codes.sum(-1, dtype=torch.int32) if self._inputs is not None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(torch.float32)
        if self._inputs is not None and self._sums is not None:
            scale, zero = self._inputs
            codes = (rows / scale).round_().add_(zero).clamp_(-MOST - 1, MOST)
            products = _product(codes.to(torch.int8), self._codes) - self._sums * int(zero)
            out = products.to(torch.float32).mul_(self._scales * scale)
        else:
            taken, steps = quantize_rows(rows)
            out = _product(taken, self._codes).to(torch.float32).mul_(steps).mul_(self._scales)
        if self._bias is not None:
            out.add_(self._bias)
        return out.to(x.dtype).reshape(*x.shape[:-1], -1)


class Int8GroupLinear:
    """Computes quantized(x) times codes [N, K], with scales [N, G] of groups of inputs, plus bias. Sums are exact."""

    __slots__ = ("_bias", "_codes", "_scales")

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._codes, self._scales, self._bias = codes.contiguous(), scales, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        taken, steps = quantize_rows(x.reshape(-1, x.shape[-1]).to(torch.float32))
        out = torch.zeros(len(taken), len(self._codes), device=x.device)
        group = self._codes.shape[-1] // self._scales.shape[-1]
        for index in range(self._scales.shape[-1]):
            part = slice(index * group, (index + 1) * group)
            out.add_(
                _product(taken[:, part].contiguous(), self._codes[:, part].t()).to(torch.float32)
                * self._scales[:, index]
            )
        out.mul_(steps)
        if self._bias is not None:
            out.add_(self._bias)
        return out.to(x.dtype).reshape(*x.shape[:-1], -1)


def _product(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the integer product, [num_rows, out_features]; exact on a CPU."""
    if codes.device.type == "cpu":
        return torch._int_mm(codes, weight)
    return (codes.float() @ weight.float()).round_()  # CUDA's `_int_mm` does not support all shapes
