"""The weight of a linear layer: a value that is read in some form, sliced for a rank, joined, and used in products.

A form is a set of named tensors. The parallel plan slices the features of a layer, and the form tells which dimensions
of its tensors hold these features. So a new form (packed words, scales, zeros) needs only an entry in the table of
forms and a class with the methods of `LinearWeight`; plan, loader, fused layers and experts do not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from pd_cluster.model.layers.packed_linear import Linear, PlainLinear, make_linear
from pd_cluster.model.layers.whole_rows import WholeRows

Tensors = Mapping[str, torch.Tensor]  # name of a part -> tensor


@dataclass(frozen=True, slots=True)
class WeightPart:
    """One tensor of a linear layer, with its dimensions of output and input features; None: no such dimension.

    A dimension may have fewer elements than there are features, because an element is a word or a group that shares a
    scale. Slices contain whole elements. `is_added`: the part is added to the product once, so only one of the ranks
    that sum their products has it.
    """

    outputs: int | None
    inputs: int | None
    is_added: bool = False


class LinearWeight(Protocol):
    """The complete weight of a linear layer. `rows`: indexes of output features."""

    @classmethod
    def of(cls, parts: Tensors, dtype: torch.dtype) -> Self:
        """Makes the weight from its parts, for activations of `dtype`. Leading dimensions may be stacks."""

    @property
    def out_features(self) -> int: ...

    @property
    def bias(self) -> torch.Tensor | None:
        """[..., out_features], added to the product."""

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Returns the layer whose output is the concatenation of the outputs of `parts`."""

    def reordered(self, rows: torch.Tensor) -> Self:
        """Returns the layer with the output features `rows` [num_rows] int64, in this order.

        Raises ModelError, naming the form, if the form stores several output features together.
        """

    def linear(self) -> Linear:
        """Returns the layer that computes with the weight; the caller then drops its own reference to the weight."""

    def reference(self) -> Linear:
        """Returns a slower layer that computes the product differently, for the proof at load."""

    def matrix(self) -> torch.Tensor:
        """Returns the weight as a matrix, [..., out_features, in_features], without a copy if it is stored so."""


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """weight [..., out_features, in_features], bias [..., out_features] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @classmethod
    def of(cls, parts: Tensors, dtype: torch.dtype) -> PlainWeight:
        return cls(parts["weight"], parts.get("bias"))

    @property
    def out_features(self) -> int:
        return self.weight.shape[-2]

    @classmethod
    def join(cls, parts: Sequence[PlainWeight]) -> PlainWeight:
        """Joins weights; if only some have a bias, the others get a bias of zeros."""
        if len(parts) == 1:
            return parts[0]
        weight = torch.cat([part.weight for part in parts])
        if all(part.bias is None for part in parts):
            return cls(weight)
        biases = [part.weight.new_zeros(part.out_features) if part.bias is None else part.bias for part in parts]
        return cls(weight, torch.cat(biases))

    def reordered(self, rows: torch.Tensor) -> PlainWeight:
        rows = rows.to(self.weight.device)
        bias = None if self.bias is None else self.bias.index_select(-1, rows)
        return PlainWeight(self.weight.index_select(-2, rows), bias)

    def linear(self) -> Linear:
        return make_linear(self.weight, self.bias)

    def reference(self) -> Linear:
        return PlainLinear(self.weight, self.bias)

    def matrix(self) -> torch.Tensor:
        return self.weight


@dataclass(frozen=True, slots=True)
class WeightForm:
    """`parts`: the tensors of a layer in safetensors files, by the last component of their names.

    Every part must be present, except those with `is_added` (biases). `rounds_activations`: activations are rounded to
    codes, and the last bits of earlier results can change a code.
    """

    parts: Mapping[str, WeightPart]
    weight: type[LinearWeight]
    rounds_activations: bool = False


PLAIN = WeightForm(
    {"weight": WeightPart(outputs=0, inputs=1), "bias": WeightPart(outputs=0, inputs=None, is_added=True)},
    PlainWeight,
)


class WeightTensors(torch.nn.Module):
    """The tensors of a weight as buffers, which move to a device with their model but keep their dtypes."""

    def __init__(self, form: WeightForm, tensors: Tensors, dtype: torch.dtype) -> None:
        super().__init__()
        self.form, self.dtype, self._names = form, dtype, tuple(tensors)
        for name, tensor in tensors.items():
            self.register_buffer(f"part_{name}", tensor, persistent=False)

    @property
    def tensors(self) -> Tensors:
        return {name: self.get_buffer(f"part_{name}") for name in self._names}

    @property
    def value(self) -> LinearWeight:
        return self.form.weight.of(self.tensors, self.dtype)


class UnpackedLinear(torch.nn.Module):
    """A linear layer of a transformers model whose weight is in a form that transformers does not support.

    `rows`: set if the layer reads whole rows, joined from all ranks, and holds only this rank's outputs; see
    `between_ranks`.
    """

    def __init__(self, parts: WeightTensors, shape: Sequence[int], rows: WholeRows | None = None) -> None:
        super().__init__()
        self.parts, self.rows = parts, rows
        self.out_features, self.in_features = shape
        self.weight = no_weight(shape, parts.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Only for the proof at load: layers are packed before the model serves.
        return between_ranks(self, self.parts.value.reference())(x)


def no_weight(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a placeholder with the memory of one value, for code that reads a weight's dtype.

    A computation with it yields NaN, so that the model is refused.
    """
    return torch.full((), torch.nan, dtype=dtype).expand(*shape)


def weight_of(module: torch.nn.Module) -> LinearWeight:
    """Returns the weight of a loaded linear layer in the form of its files."""
    if isinstance(module, UnpackedLinear):
        return module.parts.value
    plain: Any = module
    return PlainWeight(plain.weight.detach(), None if plain.bias is None else plain.bias.detach())


def between_ranks(module: torch.nn.Module, linear: Linear) -> Linear:
    """Returns `linear`, made from the module's weight; if the module needs it, inputs are first gathered from all
    ranks.
    """
    rows = module.rows if isinstance(module, UnpackedLinear) else None
    return linear if rows is None else rows.around(linear)


def joined(*modules: torch.nn.Module, rows: torch.Tensor | None = None) -> LinearWeight:
    """Returns the weight of a layer whose output concatenates those of `modules`; `rows`: the order of its features.

    Weights of different forms are joined as plain matrices. Raises ModelError if a form cannot be reordered.
    """
    first, *others = (weight_of(module) for module in modules)
    if any(type(other) is not type(first) for other in others):
        numbers = [PlainWeight(each.matrix(), each.bias) for each in (first, *others)]
        whole: LinearWeight = PlainWeight.join(numbers)
    else:
        whole = first.join([first, *others])
    return whole if rows is None else whole.reordered(rows)
