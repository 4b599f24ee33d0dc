"""Packs the linear layers, routers and experts of models that keep transformers' layers.

Packing makes them faster on CPU, and makes a row's values independent of the other rows (packed_linear.py). Activation
functions are replaced for the same reason. Modules are recognized by their structure; unknown ones stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from pd_cluster.model.layers.activations import REPLACEMENTS, Elementwise, sigmoid
from pd_cluster.model.layers.expert_weights import (
    ExpertLayers,
    ExpertStack,
    ExpertWeights,
    UnpackedExperts,
    are_experts,
    experts_of,
)
from pd_cluster.model.layers.linear_weight import LinearWeight, UnpackedLinear, between_ranks, no_weight, weight_of
from pd_cluster.model.layers.packed_linear import Linear, pack_floats, packs

SIGMOIDS = (torch.sigmoid, torch.Tensor.sigmoid)
APART = 16  # the most float32 values in a vector register


def packed(weight: LinearWeight) -> Linear:
    return weight.linear()


def pack_modules(model: torch.nn.Module, linear_of: Callable[[LinearWeight], Linear] = packed) -> int:
    """Replaces the modules that can be packed; returns how many.

    `linear_of` makes layers from weights in forms that transformers does not support.
    """
    on_cpu = all(each.device.type == "cpu" for each in model.parameters())
    places = [
        (parent, name, child)
        for parent in model.modules()
        if _router_weight(parent) is None  # a router may read the weights of its children
        for name, child in parent._modules.items()  # a module with two names appears under both
        if child is not None
    ]
    found: dict[int, torch.nn.Module | None] = {}
    for parent, name, child in places:
        if on_cpu and type(child).__name__ in REPLACEMENTS:
            setattr(parent, name, Elementwise(child))
            continue
        if id(child) not in found:
            found[id(child)] = _packed(child, linear_of)
        if (replacement := found[id(child)]) is not None:
            setattr(parent, name, replacement)
    return sum(each is not None for each in found.values())


def _packed(module: torch.nn.Module, linear_of: Callable[[LinearWeight], Linear]) -> torch.nn.Module | None:
    kind = type(module).__name__
    weight: Any = getattr(module, "weight", None)
    if isinstance(module, UnpackedLinear):
        return PackedModule(between_ranks(module, linear_of(weight_of(module))), weight.shape, weight.dtype)
    if isinstance(module, UnpackedExperts):
        return PackedExperts(module)
    if type(module) is torch.nn.Linear and packs(weight):
        return PackedModule.of(weight, module.bias)
    if kind == "Conv1D" and weight is not None and packs(weight):  # GPT-2, from transformers.pytorch_utils
        return PackedModule.of(weight.T.contiguous(), getattr(module, "bias", None))
    if (of_router := _router_weight(module)) is not None and packs(of_router):
        return PackedRouter(module, of_router)
    if are_experts(module) and packs(module.down_proj):  # type: ignore[arg-type]
        return PackedExperts(module)
    if hasattr(module, "identity_expert") and packs(module.down_proj):  # type: ignore[arg-type]
        return PackedZeroExperts(module)
    return None


def _router_weight(module: torch.nn.Module) -> torch.Tensor | None:
    """Returns a router's weight, which may belong to a linear layer in it; None: the module is not a router."""
    if not type(module).__name__.endswith("Router"):
        return None
    weight = getattr(module, "weight", None)
    if weight is None:
        weight = getattr(getattr(module, "classifier", None), "weight", None)
    return weight if isinstance(weight, torch.Tensor) and weight.dim() == 2 else None


class PackedModule(torch.nn.Module):
    """A linear layer that computes only the product."""

    def __init__(self, product: Linear, shape: Sequence[int], dtype: torch.dtype) -> None:
        """`shape`: out_features, in_features."""
        super().__init__()
        self._linear = product
        self.out_features, self.in_features = shape
        self.weight = no_weight(shape, dtype)

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedModule:
        if len(weight) == 1:
            return cls(rows_apart(weight, bias), weight.shape, weight.dtype)
        return cls(pack_floats(weight, bias), weight.shape, weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x)


def rows_apart(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Makes a packed linear with few outputs whose output rows start at multiples of APART values.

    torch's functions compute several adjacent values at once, and the last few values differently, with other bits.
    Because of this alignment a value's bits do not depend on the rows before it.
    """
    num_outputs = weight.shape[0]
    padding = -num_outputs % APART
    weight = torch.cat((weight.detach(), weight.new_zeros(padding, weight.shape[1])))
    bias = None if bias is None else torch.cat((bias.detach(), bias.new_zeros(padding)))
    packed = pack_floats(weight, bias)
    return lambda x: packed(x)[..., :num_outputs]


class PackedRouter(torch.nn.Module):
    """A router of transformers with a packed product."""

    def __init__(self, router: Any, weight: torch.Tensor) -> None:
        super().__init__()
        self.router = router
        self._product = _Product(weight, rows_apart(weight))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._product:
            return self.router(*args, **kwargs)


class _Product(TorchFunctionMode):
    """Computes `linear(x, weight, bias)` by `packed` if `weight` is this one, and sigmoid by a function that gives the
    same bits in every row.
    """

    def __init__(self, weight: torch.Tensor, packed: Linear) -> None:
        super().__init__()
        self._address, self._packed = weight.data_ptr(), packed

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is linear and len(args) > 1 and args[1].data_ptr() == self._address:
            x, _, *rest = args
            bias = rest[0] if rest else (kwargs or {}).get("bias")
            product = self._packed(x)
            return product if bias is None else product.add_(bias)
        if function in SIGMOIDS:
            return sigmoid(args[0])
        return function(*args, **(kwargs or {}))


class PackedExperts(torch.nn.Module):
    """Passes each row through the experts that its router chose, in order of the experts' indexes."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self._gate = experts.gate if isinstance(experts, UnpackedExperts) else experts._apply_gate
        self.layers = ExpertLayers(experts_of(experts))
        if isinstance(experts, UnpackedExperts):
            del experts.gate_up, experts.down
        else:
            del experts.gate_up_proj, experts.down_proj

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.layers.through(self._gate, x, chosen, weights)


class PackedZeroExperts(torch.nn.Module):
    """Experts; those with the highest indexes return a row unchanged (LongCat-Flash)."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self._activation, self._num_experts = experts.act_fn, len(experts.down_proj)
        gate_up = ExpertStack.of(experts.gate_up_proj.detach()[: self._num_experts])
        self.layers = ExpertLayers(ExpertWeights(gate_up, ExpertStack.of(experts.down_proj.detach())))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        kept = weights.masked_fill(chosen < self._num_experts, 0.0).sum(-1, keepdim=True)  # [num_rows, 1]
        return self.layers.through(self._gate, x, chosen, weights).addcmul_(x, kept)

    def _gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gated: torch.Tensor = self._activation(gate) * up
        return gated
