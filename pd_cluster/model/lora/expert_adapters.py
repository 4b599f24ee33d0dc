"""Adapters of experts, each of which computes some of a step's rows. Uses no files or ranks."""

from __future__ import annotations

import torch

from pd_cluster.model.layers.expert_weights import ExpertLayers
from pd_cluster.model.lora.adapted_linear import AdaptedLinear, LinearAdapters, ModuleFeatures, StepRows

GATES, UPS, BOTH, DOWNS = "gate_proj", "up_proj", "gate_up_proj", "down_proj"  # names in transformers


class RoutedRows(StepRows):
    """The rows that the current expert computes."""

    def __init__(self, step: StepRows) -> None:
        super().__init__()
        self._step = step
        self.nums_rows: list[int] | None = None  # rows of each call of the block, recorded during `watched`

    def begin_block(self, num_rows: int) -> bool:
        """Starts a block whose experts compute `num_rows` rows together; returns True if some rows have adapters."""
        if self.nums_rows is not None:
            self.nums_rows.append(num_rows)
        return self._step.are_adapted and not self._step.is_on_device

    def choose(self, rows: torch.Tensor) -> None:
        """Sets the rows of the next expert: indexes [num_chosen] int64 of the step's rows."""
        if self._step.is_on_device:
            return  # on a device experts cannot have adapters
        if self._step.are_adapted:
            self.take(self._step, rows)
        elif self.are_adapted:
            self._set(None)


def attach_experts(rows: RoutedRows, layers: ExpertLayers) -> dict[str, tuple[LinearAdapters, ModuleFeatures]]:
    """Attaches adapters to the experts' layers. Returns them by name; a name starts with the expert's index."""
    hidden_size, features = layers.shape
    both, downs = slice(0, 2 * features), slice(0, hidden_size)
    own = None if layers.rows is None else layers.rows.part(features)  # this rank's inputs of the second product
    places: dict[str, tuple[LinearAdapters, ModuleFeatures]] = {}
    for index, (gate_up, down) in enumerate(zip(layers.gate_ups, layers.downs, strict=True)):
        first, second = LinearAdapters(rows), LinearAdapters(rows)
        places[f"{index}.{BOTH}"] = first, ModuleFeatures(hidden_size, both, layers.order)
        if layers.order is None:
            places[f"{index}.{GATES}"] = first, ModuleFeatures(hidden_size, slice(0, features))
            places[f"{index}.{UPS}"] = first, ModuleFeatures(hidden_size, slice(features, 2 * features))
        places[f"{index}.{DOWNS}"] = second, ModuleFeatures(features, downs)
        layers.gate_ups[index], layers.downs[index] = AdaptedLinear(gate_up, first), AdaptedLinear(down, second, own)
    layers.watch = rows
    return places
