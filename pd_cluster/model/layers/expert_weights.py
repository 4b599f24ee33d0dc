"""The weights of experts, in the same forms as those of linear layers, with their parts stacked over experts.

Files store experts either fused, as `experts.gate_up_proj` with a leading dimension of experts, or separately. Here
both become one stack per product, from which `Ops.experts` makes packed layers or matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from pd_cluster.errors import ModelError
from pd_cluster.model.layers.linear_weight import PLAIN, LinearWeight, PlainWeight, Tensors, WeightForm, WeightTensors
from pd_cluster.model.layers.packed_linear import Linear, make_expert_linear
from pd_cluster.model.layers.whole_rows import WholeRows
from pd_cluster.native.expert_products import experts_at_once

PRODUCTS = ("gate_up_proj", "down_proj")  # names in transformers
UNGATED = ("up_proj", "down_proj")  # of experts without gates (Nemotron-H)
MOST_WAITING = 1 << 20  # the most outputs of first products that may wait until the ranks exchange them


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """One linear layer of every expert; each part is [num_experts, …]. `rows`: the new order of output features."""

    form: WeightForm
    parts: Tensors
    dtype: torch.dtype  # of the activations
    rows: torch.Tensor | None = None  # [out_features] int64; None: the order of the files

    @classmethod
    def of(cls, weight: torch.Tensor) -> ExpertStack:
        """Makes a stack of plain matrices without biases, [num_experts, out_features, in_features]."""
        return cls(PLAIN, {"weight": weight}, weight.dtype)

    def __len__(self) -> int:
        return len(next(iter(self.parts.values())))

    @property
    def out_features(self) -> int:
        return self.form.weight.of(self.parts, self.dtype).out_features

    def reordered(self, rows: torch.Tensor) -> ExpertStack:
        """Returns a stack with the output features of each expert in this order; copies nothing yet."""
        return replace(self, rows=rows if self.rows is None else self.rows[rows])

    def expert(self, index: int) -> LinearWeight:
        """Returns one expert's weight. Raises ModelError, like `whole`, if the form cannot be reordered."""
        return self._weight({name: part[index].contiguous() for name, part in self.parts.items()})

    def linears(self) -> list[Linear]:
        """Returns each expert's layer, packed."""
        return [_linear(self.expert(index)) for index in range(len(self))]

    def whole(self) -> LinearWeight:
        """Returns the weights of all experts as one value. Its matrix and bias have a leading dimension of experts.

        Plain weights are copied only if they are reordered.
        """
        return self._weight(self.parts)

    def _weight(self, parts: Tensors) -> LinearWeight:
        weight = self.form.weight.of(parts, self.dtype)
        return weight if self.rows is None else weight.reordered(self.rows)

    @classmethod
    def stacked(cls, form: WeightForm, experts: Sequence[Sequence[Tensors]], dtype: torch.dtype) -> ExpertStack:
        """Joins each expert's layers (gate and up) along their output features, then stacks the experts.

        Raises ModelError if gate and up have different values of a part that has no output features.
        """
        parts = {}
        for name in experts[0][0]:
            outputs = form.parts[name].outputs
            try:
                joined = [_joined([layer[name] for layer in layers], outputs, name) for layers in experts]
                parts[name] = torch.stack(joined)
            except RuntimeError as error:
                raise ModelError(f"the experts' {name} have different shapes and cannot be stacked") from error
        return cls(form, parts, dtype)


def _linear(weight: LinearWeight) -> Linear:
    return make_expert_linear(weight.weight, weight.bias) if isinstance(weight, PlainWeight) else weight.linear()


def _joined(tensors: Sequence[torch.Tensor], outputs: int | None, name: str) -> torch.Tensor:
    if outputs is not None:
        return torch.cat(list(tensors), dim=outputs)
    if not all(torch.equal(each, tensors[0]) for each in tensors):
        raise ModelError(f"an expert's gate and up have different {name}, but their joint product needs the same")
    return tensors[0]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The two products: `gate_up` maps hidden_size to 2 * features, `down` maps features to hidden_size.

    `Ops.experts` expects gates before ups; some architectures interleave them. Experts without gates have only ups.
    `rows`: set if `down` reads whole rows, joined from all ranks, and has only this rank's outputs.
    """

    gate_up: ExpertStack
    down: ExpertStack
    rows: WholeRows | None = None


class ExpertWatch(Protocol):
    """Receives the rows that each expert of a block computes, before it computes them."""

    def begin_block(self, num_rows: int) -> bool:
        """Starts a block; returns True if its experts must be computed one by one."""

    def choose(self, rows: torch.Tensor) -> None: ...


class ExpertLayers:
    """The two products of every expert in a block.

    `shape`: hidden_size, and the number of features between the products. `order`: the order of the first product's
    outputs, see ExpertStack. `rows`: the second product takes whole rows; see ExpertWeights.
    """

    def __init__(self, weights: ExpertWeights, activation: int | None = None) -> None:
        """`activation`: its number in the C kernels, which then compute all experts at once; None: no C kernels."""
        self.rows = weights.rows
        self.gate_ups, self.downs = weights.gate_up.linears(), weights.down.linears()
        hidden_size = weights.down.out_features
        if self.rows is not None:
            self.downs, hidden_size = [self.rows.after(down) for down in self.downs], self.rows.num_outputs
        self.shape = hidden_size, weights.gate_up.out_features // 2
        self.order = weights.gate_up.rows
        self.watch: ExpertWatch | None = None
        self._at_once = None if activation is None else experts_at_once(self.gate_ups, self.downs, activation)

    def through(
        self,
        gate: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """See `apply_experts`. The C kernels return the same bits."""
        one_by_one = self.watch is not None and self.watch.begin_block(len(x))
        if self._at_once is not None and not one_by_one:
            return self._at_once(x, chosen, weights)
        experts = EachExpert(self.gate_ups.__getitem__, self.downs.__getitem__, len(self.downs), gate)
        return apply_experts(experts, x, chosen, weights, self.watch, self.rows)


class UnpackedExperts(torch.nn.Module):
    """Experts of a transformers model whose weights are in a form that transformers does not support.

    `inner`: transformers' module without its weights.
    """

    def __init__(self, inner: Any, gate_up: WeightTensors, down: WeightTensors, rows: WholeRows | None = None) -> None:
        super().__init__()
        self.is_gated = products_of(inner) != UNGATED
        for name in [name for name, _ in inner.named_parameters(recurse=False)]:
            delattr(inner, name)
        self.inner, self.config = inner, inner.config
        self.gate_up, self.down, self.rows = gate_up, down, rows

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = (self.inner._apply_gate if self.is_gated else self.inner.act_fn)(gate_up)
        return gated

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Computes like PackedExperts. Only for the proof at load; experts are packed before the model serves."""
        held = experts_of(self)

        def gate_up(index: int) -> Linear:
            return held.gate_up.expert(index).linear()

        def down(index: int) -> Linear:
            layer = held.down.expert(index).linear()
            return layer if held.rows is None else held.rows.after(layer)

        experts = EachExpert(gate_up, down, len(held.down), self.gate)
        return apply_experts(experts, x, chosen, weights, rows=held.rows)


def are_experts(module: Any) -> bool:
    """Whether this is an experts module of transformers: it has fused weights and a method for the activation."""
    if not all(hasattr(module, name) for name in ("is_transposed", "has_bias", "_apply_gate", "gate_up_proj")):
        return False
    return module.gate_up_proj.dim() == 3 and not getattr(module, "has_post_expert_norm", False)


def products_of(module: Any) -> tuple[str, str] | None:
    """Returns the names of both products of an experts module; None for other modules."""
    if are_experts(module):
        return PRODUCTS
    own = [getattr(module, name, None) for name in UNGATED]
    return UNGATED if all(isinstance(each, torch.nn.Parameter) and each.dim() == 3 for each in own) else None


def experts_of(module: Any) -> ExpertWeights:
    """Returns the weights of a transformers experts module in the form of its files, without copying."""
    if isinstance(module, UnpackedExperts):
        gate_up, down = (ExpertStack(each.form, each.tensors, each.dtype) for each in (module.gate_up, module.down))
        return ExpertWeights(gate_up, down, module.rows)
    found = []
    for name in products_of(module) or PRODUCTS:
        weight = getattr(module, name).detach()
        parts = {"weight": weight.transpose(1, 2) if getattr(module, "is_transposed", False) else weight}
        if getattr(module, "has_bias", False):
            parts["bias"] = getattr(module, f"{name}_bias").detach()
        found.append(ExpertStack(PLAIN, parts, weight.dtype))
    return ExpertWeights(found[0], found[1])


class EachExpert(NamedTuple):
    """An expert's two products by its index, and the gate between them."""

    gate_up: Callable[[int], Linear]
    down: Callable[[int], Linear]
    num_experts: int
    gate: Callable[[torch.Tensor], torch.Tensor]


def apply_experts(
    experts: EachExpert,
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    watch: ExpertWatch | None = None,
    rows: WholeRows | None = None,
) -> torch.Tensor:
    """Passes each row through the experts that its router chose, in order of the experts' indexes.

    Takes x [num_rows, hidden_size]; chosen, weights [num_rows, top_k]. Ignores indexes past the last expert.
    `watch` receives each expert's rows. `rows`: the second product takes whole rows.
    The ranks, which all have the same `chosen`, then join the rows of many experts at once.
    """
    gate_up, down, num_experts, gate = experts
    result = torch.zeros_like(x)
    waiting: list[_PendingExpert] = []
    for index in torch.unique(chosen).tolist():
        if index >= num_experts:
            continue
        places = (chosen == index).nonzero(as_tuple=True)
        if watch is not None:
            watch.choose(places[0])
        waiting.append(_PendingExpert(index, places, gate(gate_up(index)(x[places[0]]))))
        if rows is None or sum(each.inner.numel() for each in waiting) >= MOST_WAITING:
            _add_experts(result, waiting, down, weights, watch, rows)
    if waiting:
        _add_experts(result, waiting, down, weights, watch, rows)
    return result


@dataclass(frozen=True, slots=True)
class _PendingExpert:
    """An expert between its two products: the rows that chose it, and for each its column in `chosen`."""

    index: int
    places: tuple[torch.Tensor, ...]
    inner: torch.Tensor  # [num_chosen, features]


def _add_experts(
    result: torch.Tensor,
    waiting: list[_PendingExpert],
    down: Callable[[int], Linear],
    weights: torch.Tensor,
    watch: ExpertWatch | None,
    whole: WholeRows | None,
) -> None:
    """Adds the weighted outputs of the experts in `waiting` to `result`, and empties `waiting`."""
    inners = [each.inner for each in waiting]
    if whole is not None:
        inners = list(torch.split(whole.gathered(torch.cat(inners)), [len(inner) for inner in inners]))
    for each, inner in zip(waiting, inners, strict=True):
        rows, rank = each.places
        if watch is not None and whole is not None:  # `choose` was last called for another expert
            watch.choose(rows)
        result.index_add_(0, rows, down(each.index)(inner).mul_(weights[rows, rank, None]))
    waiting.clear()
