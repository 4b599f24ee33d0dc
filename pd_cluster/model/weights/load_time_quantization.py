"""Quantizes weights as they are read, without calibration data; each output feature, or each group of its inputs, has
its own scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from pd_cluster.errors import ModelError
from pd_cluster.model.weights.layer_tensors import FP8, Parts

MOST_IN_GROUP = 128  # input features that share a four-bit scale
LARGEST_FP8 = 448.0


def _steps(groups: torch.Tensor, most: float) -> torch.Tensor:
    """Returns scales [N, G] that map the largest magnitude in each group of weights [N, G, group] to `most`."""
    steps = groups.abs().amax(-1) / most
    return torch.where(steps > 0, steps, 1.0)


def _int8(weight: torch.Tensor) -> Parts:
    steps = _steps(weight.unsqueeze(1), 127)
    return {"int8_codes": (weight / steps).round().to(torch.int8), "int8_scales": steps[:, 0]}


def _int8_wo(weight: torch.Tensor) -> Parts:
    parts = _int8(weight)
    scales = parts["int8_scales"].unsqueeze(1)
    return {"codes": parts["int8_codes"], "code_scales": scales, "code_zeros": torch.zeros_like(scales)}


def _int4_wo(weight: torch.Tensor) -> Parts:
    """Codes are -8 to 7; the largest magnitude is 7.5 times the scale."""
    groups = weight.reshape(len(weight), -1, math.gcd(weight.shape[1], MOST_IN_GROUP))
    steps = _steps(groups, 7.5)
    codes = (groups / steps.unsqueeze(-1)).round().clamp(-8, 7).to(torch.int8)
    return {"codes": codes.flatten(1), "code_scales": steps, "code_zeros": torch.zeros_like(steps)}


def _w4a8(weight: torch.Tensor) -> Parts:
    parts = _int4_wo(weight)
    return {"w4a8_codes": parts["codes"], "w4a8_scales": parts["code_scales"]}


def _fp8(weight: torch.Tensor) -> Parts:
    steps = _steps(weight.unsqueeze(1), LARGEST_FP8)
    codes = (weight / steps).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8)
    return {"codes": codes, "code_scales": steps, "code_zeros": torch.zeros_like(steps)}


SCHEMES: dict[str, Callable[[torch.Tensor], Parts]] = {
    "int8": _int8,
    "int8_wo": _int8_wo,
    "int4_wo": _int4_wo,
    "w4a8": _w4a8,
    "fp8": _fp8,
}


def encoded(weight: torch.Tensor, scheme: str, place: str = "a layer") -> Parts:
    """Returns the parts of a form for a weight [N, K]. Raises ModelError that names `place` for NaN and infinity."""
    weight = weight.to(torch.float32)
    if not torch.stack(weight.aminmax()).isfinite().all():
        raise ModelError(f"{place}: weight contains NaN or infinity; copy the folder again or recreate it")
    return {name: part.contiguous() for name, part in SCHEMES[scheme](weight).items()}
