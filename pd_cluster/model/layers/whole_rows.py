"""A rank's share of a layer that rounds its inputs to codes, when each rank has only a part of each row.

A row's codes depend on the whole row. So the ranks join their parts of the rows, and each rank computes some of the
outputs from all inputs; the sum over ranks that follows combines the outputs. The result has the same bits as on one
rank. Does not compute codes itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pd_cluster.native.packed_products import Linear


class JoinedRows(Protocol):
    """The methods of `Group` (model/parallel) that this file needs."""

    rank: int
    size: int

    def gather_to_all(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class WholeRows:
    """`outputs`: this rank computes outputs [start, stop) of `num_outputs`."""

    ranks: JoinedRows
    outputs: tuple[int, int]
    num_outputs: int

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Returns whole rows, joined from the parts of all ranks."""
        return self.ranks.gather_to_all(x)

    def placed(self, y: torch.Tensor) -> torch.Tensor:
        """Returns [..., num_outputs]: this rank's outputs y [..., stop - start] at their positions, zeros elsewhere."""
        whole = y.new_zeros(*y.shape[:-1], self.num_outputs)
        whole[..., slice(*self.outputs)] = y
        return whole

    def around(self, linear: Linear) -> Linear:
        """Returns a layer that takes a part of each row and returns this rank's summand; `linear` takes whole rows."""
        after = self.after(linear)
        return lambda x: after(self.gathered(x))

    def after(self, linear: Linear) -> Linear:
        """Does the same as `around`, for rows that are already joined."""
        return lambda rows: self.placed(linear(rows))

    def own_shape(self, num_inputs: int) -> tuple[int, int]:
        """Returns the outputs and inputs of this rank's weight if the rank has `num_inputs` inputs of each row."""
        return self.outputs[1] - self.outputs[0], num_inputs * self.ranks.size

    def part(self, num_inputs: int) -> slice:
        """Returns the slice of whole rows that is this rank's part, `num_inputs` wide."""
        first = self.ranks.rank * num_inputs
        return slice(first, first + num_inputs)
