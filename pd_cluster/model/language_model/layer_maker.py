"""Removes the linear layers and norms of a transformers module, and makes layers with adapters from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from pd_cluster.model.language_model.architecture_quirks import Quirks
from pd_cluster.model.layers.expert_share import ExpertBlocks
from pd_cluster.model.layers.gated_mlp import Activation, GatedMLP
from pd_cluster.model.layers.linear_weight import between_ranks, joined
from pd_cluster.model.layers.ops import Norm, Ops
from pd_cluster.model.layers.packed_linear import Linear
from pd_cluster.model.lora.lora_targets import LoraTargets

# Names of the linear layers in gated MLPs: gate and up, which may already be joined, and the layer that follows.
GATE_UP = (("gate_up_proj",), ("gate_proj", "up_proj"), ("input_linear",), ("w1", "w3"))
DOWN = ("down_proj", "output_linear", "w2")


@dataclass(frozen=True, slots=True)
class LayerMaker:
    """Makes the linear layers of one decoder layer, with adapters if these are enabled."""

    ops: Ops
    adapters: LoraTargets | None
    path: str
    experts: ExpertBlocks | None = None  # records blocks of experts that this rank shares with others

    def of(self, name: str) -> LayerMaker:
        return replace(self, path=f"{self.path}.{name}")

    def joined(self, module: Any, *choices: tuple[str, ...], rows: torch.Tensor | None = None) -> Linear:
        """Removes the module's linear layers, named by the first matching choice; returns them joined into one."""
        names = next(names for names in choices if hasattr(module, names[0]))
        modules = {name: getattr(module, name) for name in names}
        found = self.ops.linear(joined(*modules.values(), rows=rows))
        if len(names) == 1:  # joined layers have whole rows on every rank
            found = between_ranks(modules[names[0]], found)
        if self.adapters is not None:
            features = {name: (each.out_features, each.in_features) for name, each in modules.items()}
            found = self.adapters.beside(found, self.path, features, rows)
        for name in names:
            delattr(module, name)
        return found

    def norm(self, module: Any, name: str, quirks: Quirks) -> Norm:
        """Removes a norm from the module; returns it. The norm must be over whole rows."""
        found = getattr(module, name)
        norm = norm_of(found, quirks)
        if self.adapters is not None:
            eps, dtype = norm.eps, found.weight.dtype
            self.adapters.norms.beside(
                f"{self.path}.{name}", norm, lambda weight: Norm(norm_weight(weight.to(dtype), quirks), eps)
            )
        return norm

    def gated_mlp(self, mlp: Any, activation: Activation) -> GatedMLP:
        name = next(name for name in DOWN if hasattr(mlp, name))
        intermediate_size: int = getattr(mlp, name).in_features
        gate_up = self.joined(mlp, *GATE_UP)
        down = self.joined(mlp, (name,))
        if self.adapters is None:
            return GatedMLP(gate_up, down, self.ops, activation, intermediate_size)
        rows = self.adapters.rows
        return GatedMLP(gate_up, down, self.ops, activation, intermediate_size, lambda: rows.are_adapted)


def norm_of(module: Any, quirks: Quirks, order: torch.Tensor | None = None) -> Norm:
    """`order`: the order of a head's features, if the norm is over heads."""
    weight = norm_weight(module.weight.detach().clone(), quirks)
    if order is not None:
        weight = weight[order.to(weight.device)]
    return Norm(weight, module.eps if hasattr(module, "eps") else module.variance_epsilon)


def norm_weight(weight: torch.Tensor, quirks: Quirks) -> torch.Tensor:
    """Returns the factor by which a norm multiplies, from the stored weight."""
    if quirks.adds_one:
        return 1.0 + weight.float()  # in 16 bits, adding 1 would round away the weight
    return weight.float() if quirks.scales_in_float32 else weight
