"""Packs the products of models whose layers stay transformers' own: linear layers, routers, experts.

It makes them faster on CPU, and a row's numbers independent of the rows beside it (model/linear.py). Modules are
recognised by what they are made of; others stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from pd_cluster.model.linear import Linear, PackedLinear, packs

APART = 16  # float32 numbers in a vector register, at most


def pack_modules(model: torch.nn.Module) -> int:
    """Puts packed modules in the places of those that can be packed. How many."""
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()  # a module that has two names, under both
        if child is not None
    ]
    packed: dict[int, torch.nn.Module | None] = {}
    for parent, name, child in places:
        if id(child) not in packed:
            packed[id(child)] = _packed(child)
        if (replacement := packed[id(child)]) is not None:
            setattr(parent, name, replacement)
    return sum(each is not None for each in packed.values())


def _packed(module: torch.nn.Module) -> torch.nn.Module | None:
    kind = type(module).__name__
    weight: Any = getattr(module, "weight", None)
    if type(module) is torch.nn.Linear and packs(weight):
        return PackedModule(weight, module.bias)
    if kind == "Conv1D" and weight is not None and packs(weight):  # GPT-2's, of transformers.pytorch_utils
        return PackedModule(weight.T.contiguous(), getattr(module, "bias", None))
    if kind.endswith("Router") and weight is not None and weight.dim() == 2 and packs(weight):
        return PackedRouter(module)
    if _are_experts(module) and packs(module.down_proj):  # type: ignore[arg-type]
        return PackedExperts(module)
    return None


def _are_experts(module: Any) -> bool:
    """As transformers marks them: weights of all experts in one tensor, and a method for what lies between the two."""
    if not all(hasattr(module, name) for name in ("is_transposed", "has_bias", "_apply_gate", "gate_up_proj")):
        return False
    return module.gate_up_proj.dim() == 3 and not getattr(module, "has_post_expert_norm", False)


class PackedModule(torch.nn.Module):
    """A linear layer that does nothing but the product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._linear: Linear
        self.out_features, self.in_features = weight.shape
        # For those who ask for its dtype. Who computes with it gets no numbers, and the model is refused.
        self.weight = torch.full((), torch.nan).expand(weight.shape)
        if self.out_features == 1:
            self._linear = rows_apart(weight, bias)
        else:
            self._linear = PackedLinear(weight, None if bias is None else bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x)


def rows_apart(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A packed linear of few outputs, whose rows begin a multiple of APART numbers apart.

    torch's functions compute numbers that lie together several at a time, and the last few of them in another way, with
    other bits: which these are must not depend on the rows before.
    """
    num_outputs = weight.shape[0]
    padding = -num_outputs % APART
    weight = torch.cat((weight.detach(), weight.new_zeros(padding, weight.shape[1])))
    bias = None if bias is None else torch.cat((bias.detach(), bias.new_zeros(padding)))
    packed = PackedLinear(weight, bias)
    return lambda x: packed(x)[..., :num_outputs]


class PackedRouter(torch.nn.Module):
    """Transformers' own router, but for its product."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.router = router
        self._product = _Product(router.weight, rows_apart(router.weight))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._product:
            return self.router(*args, **kwargs)


class _Product(TorchFunctionMode):
    """Computes `linear(x, weight, bias)` of one weight by `packed`."""

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
        return function(*args, **(kwargs or {}))


class PackedExperts(torch.nn.Module):
    """Each row goes through the experts that its router chose, in the order of their numbers."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self._gate = experts._apply_gate
        self._experts = [self._expert(experts, i) for i in range(experts.gate_up_proj.shape[0])]
        del experts.gate_up_proj, experts.down_proj

    def _expert(self, experts: Any, index: int) -> tuple[Linear, Linear]:
        """Of weights [in, out] where they are transposed, else [out, in]."""
        found = []
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(experts, name)[index].detach()
            bias = getattr(experts, f"{name}_bias")[index].detach().clone() if experts.has_bias else None
            found.append(PackedLinear(weight.T.contiguous() if experts.is_transposed else weight, bias))
        return found[0], found[1]

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [num_rows, hidden_size]; chosen, weights [num_rows, top_k]. A number beyond the experts is none of them."""
        result = torch.zeros_like(x)
        for index in torch.unique(chosen).tolist():
            if index >= len(self._experts):
                continue
            gate_up, down = self._experts[index]
            rows, rank = (chosen == index).nonzero(as_tuple=True)
            added = down(self._gate(gate_up(x[rows])))
            result.index_add_(0, rows, added.mul_(weights[rows, rank, None]))
        return result
