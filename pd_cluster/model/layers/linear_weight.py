"""The weight of a linear layer as a value: read in some form, cut to a rank's share, joined with others, computed with.

A form is a set of named tensors. The parallel plan cuts the features of a layer; a form maps these features to
dimensions of its tensors. So another form (packed words, scales, zeros) is a row in known_forms.py and a class with
the methods of `LinearWeight`; plan, loader, fused layers and experts (expert_weight.py) know none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from pd_cluster.model.layers.packed_linear import Linear, PlainLinear, make_linear
from pd_cluster.model.layers.whole_rows import WholeRows

Tensors = Mapping[str, torch.Tensor]  # by the names of their parts


@dataclass(frozen=True, slots=True)
class WeightPart:
    """One tensor of a linear layer: its dimension of output features and of input features, None if it has none.

    A dimension may hold fewer elements than there are features: words, or groups that share a scale. It is cut in whole
    elements. `is_added`: the part is added once to the product, so only one of the ranks that sum their products may
    have it.
    """

    outputs: int | None
    inputs: int | None
    is_added: bool = False


class LinearWeight(Protocol):
    """The complete weight of a linear layer. `rows` are output features."""

    @classmethod
    def of(cls, parts: Tensors, dtype: torch.dtype) -> Self:
        """Returns the weight of these parts, for activations of `dtype`. Further leading dimensions may be stacks."""

    @property
    def out_features(self) -> int: ...

    @property
    def bias(self) -> torch.Tensor | None:
        """[..., out_features], added to the product."""

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Returns the layer whose output is the concatenation of theirs."""

    def reordered(self, rows: torch.Tensor) -> Self:
        """Returns the layer with these output features in this order; `rows` [num_rows] int64.

        Raises ModelError, naming the form, if it keeps several output features together.
        """

    def linear(self) -> Linear:
        """Returns the layer. The caller drops its own reference to the weight."""

    def reference(self) -> Linear:
        """Returns a slower layer by other products, for the proof at load."""

    def matrix(self) -> torch.Tensor:
        """Returns the weight as numbers, [..., out_features, in_features]; without a copy where it is stored so."""


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
        """Joins weights; a missing bias among others is zero."""
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
    """`parts`: the tensors of a layer in safetensors files, by the last part of their names.

    Layers have all of them but those that are added. `rounds_activations`: to codes, some of which fall to the other
    side by the last bits of what came before.
    """

    parts: Mapping[str, WeightPart]
    weight: type[LinearWeight]
    rounds_activations: bool = False


PLAIN = WeightForm(
    {"weight": WeightPart(outputs=0, inputs=1), "bias": WeightPart(outputs=0, inputs=None, is_added=True)},
    PlainWeight,
)


class WeightTensors(torch.nn.Module):
    """A weight's tensors as buffers, which move to a device with their model and keep their dtypes."""

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


class HeldLinear(torch.nn.Module):
    """A linear layer of transformers' model whose weight has a form that transformers does not know.

    `rows`: it takes whole rows, and this is one rank's share; see `between_ranks`.
    """

    def __init__(self, parts: WeightTensors, shape: Sequence[int], rows: WholeRows | None = None) -> None:
        super().__init__()
        self.parts, self.rows = parts, rows
        self.out_features, self.in_features = shape
        self.weight = no_weight(shape, parts.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Only for the proof at load: layers are packed before they serve.
        return between_ranks(self, self.parts.value.reference())(x)


def no_weight(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor for code that reads a weight's dtype; it has a number's memory.

    Computing with it yields NaN, and the model is refused.
    """
    return torch.full((), torch.nan, dtype=dtype).expand(*shape)


def weight_of(module: torch.nn.Module) -> LinearWeight:
    """Returns the weight of a loaded linear layer, in the form of its files."""
    if isinstance(module, HeldLinear):
        return module.parts.value
    plain: Any = module
    return PlainWeight(plain.weight.detach(), None if plain.bias is None else plain.bias.detach())


def between_ranks(module: torch.nn.Module, linear: Linear) -> Linear:
    """Returns the layer in a module's place, of the layer made of its weight: ranks may have to join its inputs."""
    rows = module.rows if isinstance(module, HeldLinear) else None
    return linear if rows is None else rows.around(linear)


def joined(*modules: torch.nn.Module, rows: torch.Tensor | None = None) -> LinearWeight:
    """Returns the weight of a layer whose output is the concatenation of theirs; `rows`: its features in this order.

    If their forms differ, they are joined as numbers. Raises ModelError if a form cannot be reordered.
    """
    first, *others = (weight_of(module) for module in modules)
    if any(type(other) is not type(first) for other in others):
        numbers = [PlainWeight(each.matrix(), each.bias) for each in (first, *others)]
        whole: LinearWeight = PlainWeight.join(numbers)
    else:
        whole = first.join([first, *others])
    return whole if rows is None else whole.reordered(rows)
