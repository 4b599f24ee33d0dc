"""Kernels that advance the states of a recurrent layer over the rows of a step: their interface, and the C kernels.

kernels/cuda/states/triton_states.py implements the interface in Triton. Layers that neither supports run as
transformers' modules (model/layers/states/module_states.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from pd_cluster.model.inputs.state_rows import StateRows
from pd_cluster.native import build, state_kernels
from pd_cluster.native.recurrence_values import Convolution, GatedDelta, Mamba2, StateInputs
from pd_cluster.native.state_kernels import StateKernel


class StateShape(NamedTuple):
    """The sizes that kernels limit. `width`: the width of a key, or of B and C; 0: the layer is only a convolution."""

    kernel_size: int
    num_parts: int  # parts of the convolution
    width: int


class RecurrentKernel(Protocol):
    """Computes what is between a layer's projections: the convolution, the recurrence, and the norm after it."""

    @property
    def num_features(self) -> int:
        """Returns the number of output features."""

    def __call__(self, inputs: StateInputs, planes: Sequence[torch.Tensor], rows: StateRows) -> torch.Tensor:
        """Returns [num_rows, num_features]; afterwards `planes` hold the states after the last rows.

        `planes`: the plane of the recurrent state, if there is one, then one plane per part of the convolution. Each is
        [num_blocks, …] float32; the blocks are strided.
        """


@dataclass(frozen=True, slots=True)
class NativeStates:
    """The C kernels, for float32 on CPUs."""

    kernel: StateKernel

    @classmethod
    def of(
        cls, convolution: Convolution, recurrence: GatedDelta | Mamba2 | None, flags: tuple[str, ...] = build.FLAGS
    ) -> NativeStates:
        """Compiles the kernels. Raises KernelsUnavailable."""
        return cls(StateKernel(convolution, recurrence, flags))

    @staticmethod
    def takes(shape: StateShape, device: torch.device) -> bool:
        """Whether the kernels support such a layer with weights on this device."""
        is_there = device.type == "cpu" and state_kernels.can_run()
        return is_there and shape.kernel_size in state_kernels.KERNELS and shape.width <= state_kernels.MOST_WIDTH

    @property
    def num_features(self) -> int:
        return self.kernel.num_features

    def __call__(self, inputs: StateInputs, planes: Sequence[torch.Tensor], rows: StateRows) -> torch.Tensor:
        return self.kernel(inputs, planes, rows.table)
