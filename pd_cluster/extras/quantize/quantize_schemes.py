"""The schemes of `pd-cluster quantize`: how a weight is rounded, and how compressed-tensors stores it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from pd_cluster.model.weights.bit_unpacking import WORD_BITS
from pd_cluster.model.weights.layer_tensors import FP8
from pd_cluster.model.weights.load_time_quantization import LARGEST_FP8

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights are rounded to codes. `steps` are the scales: the difference between the weights of adjacent codes.

    `bits`: the size of a code, an integer unless `is_float`. `group`: how many input features share a scale; 0: all.
    `has_activations`: activations are also rounded to 8 bits, with one scale per row.
    """

    name: str
    bits: int
    group: int = 0
    is_float: bool = False
    has_activations: bool = False

    @property
    def is_packed(self) -> bool:
        return not self.is_float and not self.has_activations

    def group_of(self, num_inputs: int) -> int:
        """Returns the size of a group: `group`, or its largest divisor that gives equal groups."""
        return math.gcd(num_inputs, self.group) if self.group else num_inputs

    def fitted(self, inputs: Iterable[int]) -> Scheme:
        """Returns the scheme with one group size for all these numbers of inputs; readers support only one size."""
        return replace(self, group=math.gcd(self.group, *inputs)) if self.group else self

    @property
    def is_w4a8(self) -> bool:
        return self.has_activations and self.bits == 4

    @property
    def uses_all_codes(self) -> bool:
        """Whether the lowest code, which has no positive counterpart, is used."""
        return self.is_packed or self.is_w4a8

    @property
    def most(self) -> float:
        """The largest magnitude of a weight, divided by its scale.

        If all codes are used, it is half a step above the highest code.
        """
        if self.is_float:
            return LARGEST_FP8
        half = float(1 << self.bits - 1)
        return half - 0.5 if self.uses_all_codes else half - 1

    def steps(self, groups: torch.Tensor) -> torch.Tensor:
        """Returns the scales [...] of weights [..., group]."""
        steps = groups.abs().amax(-1) / self.most
        return torch.where(steps > 0, steps, 1.0)

    def rounded(self, weight: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Returns codes, as float32. `steps` has a shape that broadcasts to the weight's."""
        if self.is_float:
            return (weight / steps).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8).to(torch.float32)
        half = 1 << self.bits - 1
        return (weight / steps).round().clamp(-half if self.uses_all_codes else 1 - half, half - 1)

    def stored(self, codes: torch.Tensor, steps: torch.Tensor) -> Tensors:
        """Returns a layer's tensors for codes [N, K] and scales [N, G], both float32."""
        if self.is_float:
            return {"weight": codes.to(FP8), "weight_scale": steps}
        if self.has_activations:
            return {"weight": codes.to(torch.int8), "weight_scale": steps}
        words = packed(codes.to(torch.int64) + (1 << self.bits - 1), self.bits)
        return {"weight_packed": words, "weight_scale": steps, "weight_shape": torch.tensor(codes.shape)}

    def config(self, ignored: list[str]) -> dict[str, Any]:
        """Returns config.json's quantization_config. `ignored`: linear layers that stay unquantized."""
        weights = {
            "num_bits": self.bits,
            "type": "float" if self.is_float else "int",
            "symmetric": True,
            "strategy": "group" if self.group else "channel",
            "group_size": self.group or None,
            "dynamic": False,
        }
        inputs = {
            "num_bits": 8,
            "type": weights["type"],
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
        name = "float-quantized" if self.is_float else "int-quantized" if self.has_activations else "pack-quantized"
        group: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
        group["input_activations"] = inputs if self.has_activations else None
        return {
            "quant_method": "compressed-tensors",
            "format": name,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignored,
        }


SCHEMES = {
    each.name: each
    for each in (
        Scheme("w8a8", 8, has_activations=True),
        Scheme("w8a16", 8),
        Scheme("w4a16", 4, group=128),
        Scheme("w4a8", 4, group=128, has_activations=True),
        Scheme("fp8", 8, is_float=True, has_activations=True),
    )
}


def packed(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs unsigned fields [N, K] into int32 words [N, ceil(K * bits / 32)], lowest bits first."""
    per_word = WORD_BITS // bits
    padding = -fields.shape[1] % per_word
    fields = torch.nn.functional.pad(fields, (0, padding)).reshape(len(fields), -1, per_word)
    words = (fields << torch.arange(0, WORD_BITS, bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
