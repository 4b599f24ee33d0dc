"""Adapters of experts, each of which sees some of a step's rows. Knows nothing of files and ranks."""

from __future__ import annotations

import torch

from pd_cluster.model.layers.expert_weights import ExpertLayers
from pd_cluster.model.lora.adapted_linear import AdaptedLinear, ModuleFeatures, Site, StepRows

GATES, UPS, BOTH, DOWNS = "gate_proj", "up_proj", "gate_up_proj", "down_proj"  # transformers' names


class RoutedRows(StepRows):
    """The rows that the expert under way computes."""

    def __init__(self, step: StepRows) -> None:
        super().__init__()
        self._step = step
        self.nums_rows: list[int] | None = None  # of each call of the block, while it is watched

    def begin_block(self, num_rows: int) -> bool:
        """All experts together compute so many rows. Returns whether adapters are beside some of them."""
        if self.nums_rows is not None:
            self.nums_rows.append(num_rows)
        return self._step.are_adapted and not self._step.is_elsewhere

    def choose(self, rows: torch.Tensor) -> None:
        """`rows` [num_chosen] int64, of the step's."""
        if self._step.is_elsewhere:
            return  # there experts take no adapters
        if self._step.are_adapted:
            self.take(self._step, rows)
        elif self.are_adapted:
            self._set(None)


def beside_experts(rows: RoutedRows, layers: ExpertLayers) -> dict[str, tuple[Site, ModuleFeatures]]:
    """Puts adapters beside the experts' layers; returns these by names that begin with the expert's number."""
    hidden_size, features = layers.shape
    both, downs = slice(0, 2 * features), slice(0, hidden_size)
    own = None if layers.rows is None else layers.rows.part(features)  # of the rows that the second product takes
    places: dict[str, tuple[Site, ModuleFeatures]] = {}
    for index, (gate_up, down) in enumerate(zip(layers.gate_ups, layers.downs, strict=True)):
        first, second = Site(rows), Site(rows)
        places[f"{index}.{BOTH}"] = first, ModuleFeatures(hidden_size, both, layers.order)
        if layers.order is None:
            places[f"{index}.{GATES}"] = first, ModuleFeatures(hidden_size, slice(0, features))
            places[f"{index}.{UPS}"] = first, ModuleFeatures(hidden_size, slice(features, 2 * features))
        places[f"{index}.{DOWNS}"] = second, ModuleFeatures(features, downs)
        layers.gate_ups[index], layers.downs[index] = AdaptedLinear(gate_up, first), AdaptedLinear(down, second, own)
    layers.watch = rows
    return places
