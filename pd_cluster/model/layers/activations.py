"""Activation functions whose result for a value does not depend on the value's position in a tensor.

On CPUs torch's own sigmoid, silu and tanh-gelu compute full vectors differently from the remainder of each thread's
part. So a row's bits would depend on the other rows and on the number of threads. torch's exp, tanh, sums, products and
quotients have no such difference. On accelerators torch's own functions are used.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    if x.device.type != "cpu":
        return torch.sigmoid(x)
    return _logistic(_wide(x)).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    if x.device.type != "cpu":
        return functional.silu(x)
    wide = _wide(x)
    return _logistic(wide).mul_(wide).to(x.dtype)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    if x.device.type != "cpu":
        return functional.gelu(x, approximate="tanh")
    wide = _wide(x)
    inner = torch.square(wide).mul_(0.044715).add_(1.0).mul_(wide).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(wide).mul_(0.5).to(x.dtype)


def _logistic(x: torch.Tensor) -> torch.Tensor:
    return torch.neg(x).exp_().add_(1.0).reciprocal_()


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Converts 16-bit x to float32, so that the result is rounded only once, at the end."""
    return x.float() if x.dtype.itemsize < 4 else x


class Elementwise(torch.nn.Module):
    """A module that applies one of these functions, and replaces a module of transformers or torch."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._function = REPLACEMENTS[type(module).__name__]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x)


# By class name of the replaced module.
REPLACEMENTS = {"SiLU": silu, "SiLUActivation": silu, "GELUTanh": gelu_tanh, "Sigmoid": sigmoid}
