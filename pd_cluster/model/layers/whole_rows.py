"""A rank's share of a layer that rounds its inputs to codes, where each rank has only a part of a row.

A row's codes depend on the whole row. So the ranks join their parts, and each computes some of the outputs from all
inputs; the sum that follows puts the outputs together. No bit differs from those of one rank. Knows nothing of codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pd_cluster.native.packed_products import Linear


class JoinsRows(Protocol):
    """The part of `Group` (model/parallel) that is needed here."""

    rank: int
    size: int

    def gather_to_all(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class WholeRows:
    """`outputs`: those of this rank, [start, stop) of `num_outputs`."""

    ranks: JoinsRows
    outputs: tuple[int, int]
    num_outputs: int

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Returns rows of all inputs, from every rank's part of them."""
        return self.ranks.gather_to_all(x)

    def placed(self, y: torch.Tensor) -> torch.Tensor:
        """Returns this rank's outputs [..., stop - start] in their place among zeros, [..., num_outputs]."""
        whole = y.new_zeros(*y.shape[:-1], self.num_outputs)
        whole[..., slice(*self.outputs)] = y
        return whole

    def around(self, linear: Linear) -> Linear:
        """Returns a layer from a part of each row to what is summed over the ranks; `linear` takes whole rows."""
        after = self.after(linear)
        return lambda x: after(self.gathered(x))

    def after(self, linear: Linear) -> Linear:
        """Returns the same for rows that are gathered already."""
        return lambda rows: self.placed(linear(rows))

    def own_shape(self, num_inputs: int) -> tuple[int, int]:
        """Returns the outputs and inputs of this rank's weight, where it has `num_inputs` of a row."""
        return self.outputs[1] - self.outputs[0], num_inputs * self.ranks.size

    def part(self, num_inputs: int) -> slice:
        """Returns which of a whole row's inputs this rank had, `num_inputs` of them."""
        first = self.ranks.rank * num_inputs
        return slice(first, first + num_inputs)
