"""The tensors of one quantized linear layer: readers take them one by one, and each tensor is checked."""

from __future__ import annotations

import math

import torch

from pd_cluster.errors import ModelError
from pd_cluster.model.layers.linear_weight import Tensors

Parts = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn
# Scales of activations and of the KV cache. Both keep the model's precision here, so their scales can be ignored.
MORE_PRECISE = (
    *("input_scale", "input_global_scale", "output_scale", "q_scale", "k_scale", "v_scale", "kv_scale"),
    *("kv_cache_scale", "kv_cache_offset"),
)


class LayerTensors:
    """The tensors of one layer, which a reader takes one by one; `finish` refuses tensors that were not taken."""

    def __init__(self, place: str, tensors: Tensors) -> None:
        self.place = place
        self._left = dict(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str) -> torch.Tensor:
        """Takes a tensor. Raises ModelError if it is missing."""
        if name not in self._left:
            beside = ", ".join(sorted(self._left))
            raise ModelError(
                f"{self.place}: {name} is missing, although the file has {beside}; copy the folder again or recreate it"
            )
        return self._left.pop(name)

    def dtype(self, name: str) -> torch.dtype | None:
        found = self._left.get(name)
        return None if found is None else found.dtype

    def get(self, name: str) -> torch.Tensor | None:
        return self._left.pop(name, None)

    def scales(self, name: str) -> torch.Tensor:
        """Takes scales or offsets as float32. Raises ModelError unless they are finite floats."""
        found = self.take(name)
        if not found.is_floating_point():
            raise self.wrong(f"{name} of {found.dtype}")
        return self.finite(name, found.to(torch.float32))

    def finite(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """Returns `numbers`. Raises ModelError if they contain NaN or infinity."""
        wrong = numbers[~numbers.isfinite()]
        if len(wrong):
            raise self.wrong(f"{name} has {float(wrong[0])} in {len(wrong)} of {numbers.numel()} values")
        return numbers

    def wrong(self, what: str) -> ModelError:
        return ModelError(
            f"{self.place}: {what}; the file does not match its description: copy it again or recreate it"
        )

    def finish(self) -> None:
        for name in MORE_PRECISE:
            self._left.pop(name, None)
        if self._left:
            left = sorted(self._left)[0]
            raise ModelError(f"{self.place}: {left} is unknown and would be ignored; recreate the folder")


def grouped(
    layer: LayerTensors, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, of: torch.Tensor
) -> Parts:
    """`of` [K]: for each input feature its group, an index into scales and zeros [..., N, G]."""
    num_inputs = codes.shape[-1]
    if len(of) != num_inputs or int(of.max()) >= scales.shape[-1] or int(of.min()) < 0:
        raise layer.wrong(f"{num_inputs} input features, but {scales.shape[-1]} groups of scales")
    if scales.shape[:-1] != codes.shape[:-1]:
        raise layer.wrong(f"{codes.shape[-2]} output features, but scales for {scales.shape[-2]}")
    starts = (of[1:] != of[:-1]).nonzero().flatten() + 1
    size = math.gcd(num_inputs, *starts.tolist())
    chosen = of[::size].to(torch.int64)
    if codes.dtype == FP8 and bool((codes.view(torch.uint8) & 0x7F == 0x7F).any()):
        raise layer.wrong("a weight contains NaN")
    return {
        "codes": codes,
        "code_scales": scales[..., chosen],
        "code_zeros": zeros.to(torch.float32)[..., chosen],
    }


def runs(layer: LayerTensors, num_inputs: int, num_groups: int, size: int = -1) -> torch.Tensor:
    """Returns the group of each input feature. Groups have `size` features, the last perhaps fewer, if that gives
    `num_groups`; otherwise all groups are equal.
    """
    if size > 0 and -(-num_inputs // size) == num_groups:
        return torch.arange(num_inputs) // size
    if num_groups < 1 or num_inputs % num_groups:
        raise layer.wrong(f"{num_inputs} input features cannot have {num_groups} groups of scales")
    return torch.arange(num_inputs) // (num_inputs // num_groups)


def inputs_of(layer: LayerTensors, step: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """Returns the scale and zero point of activations, [2] float32."""
    zero = torch.zeros(()) if zero is None else zero.to(torch.float32).reshape(())
    step = layer.finite("input_scale", step.to(torch.float32)).reshape(())
    if not float(step) > 0:
        raise layer.wrong(f"input_scale {float(step)}")
    return torch.stack((step, layer.finite("input_offset", zero)))
