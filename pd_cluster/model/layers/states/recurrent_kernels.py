"""Kernels take the states of a recurrent layer through the rows of a step: one interface, implemented here in C.

kernels/cuda/states/triton_states.py has the same in Triton. Where neither can compute a layer, transformers' modules do
(model/layers/states/module_states.py).
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
    """The sizes that limit kernels. `width`: of a key, or of B and C; 0: there is a convolution alone."""

    kernel_size: int
    num_parts: int  # of the convolution
    width: int


class RecurrentKernel(Protocol):
    """Computes one layer between its projections: its convolution, its recurrence, the norm behind it."""

    @property
    def num_features(self) -> int:
        """Counts the features of what it returns."""

    def __call__(self, inputs: StateInputs, planes: Sequence[torch.Tensor], rows: StateRows) -> torch.Tensor:
        """Returns [num_rows, num_features]; the states behind the last rows are in `planes` afterwards.

        `planes`: the recurrent state's, if there is one, then those of the convolution's parts, each [num_blocks, …]
        float32, blocks being strided.
        """


@dataclass(frozen=True, slots=True)
class NativeStates:
    """The kernels in C, for float32 on CPUs."""

    kernel: StateKernel

    @classmethod
    def of(
        cls, convolution: Convolution, recurrence: GatedDelta | Mamba2 | None, flags: tuple[str, ...] = build.FLAGS
    ) -> NativeStates:
        """Raises KernelsUnavailable."""
        return cls(StateKernel(convolution, recurrence, flags))

    @staticmethod
    def takes(shape: StateShape, device: torch.device) -> bool:
        """Whether they compute such a layer, with weights on this device."""
        is_there = device.type == "cpu" and state_kernels.can_run()
        return is_there and shape.kernel_size in state_kernels.KERNELS and shape.width <= state_kernels.MOST_WIDTH

    @property
    def num_features(self) -> int:
        return self.kernel.num_features

    def __call__(self, inputs: StateInputs, planes: Sequence[torch.Tensor], rows: StateRows) -> torch.Tensor:
        return self.kernel(inputs, planes, rows.table)
