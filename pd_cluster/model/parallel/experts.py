"""Which experts a rank has, and how it computes them for rows of other instances. Knows no layers and no files.

A rank has whole experts. Those of one instance add up what theirs return in the sum that ends the layer anyway. The
instances of a unit exchange rows: each rank gets those of all members, computes its experts, and returns what they
make of them to the rows' owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pd_cluster.errors import ModelError, called
from pd_cluster.settings.engine import ExpertPlacement


class ExpertExchange(Protocol):
    """One rank's end of the exchange among the members of a unit that have its tensor-parallel index.

    All ends call `gather` and then `combine` once for each layer with experts, with any number of rows, 0 included.
    """

    def gather(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the same of all members, one behind the other.

        x [num_rows, hidden_size] in the dtype of activations; chosen int64 and weights float32, [num_rows, top_k].
        """

    def combine(self, partials: torch.Tensor) -> torch.Tensor:
        """Returns this member's rows, [num_rows, hidden_size]: the sum of all members' partials, in their order.

        `partials`: what this rank's experts make of the rows that `gather` returned.
        """


class ExpertUnit(ExpertExchange, Protocol):
    """An exchange whose ends have to meet first."""

    def form(self) -> None:
        """Returns once all members are there: weights are loaded, and nothing is computed yet. Raises InstanceLost."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertShare:
    """This rank's experts. `rank` among the `size` ranks that have a share; `exchange` None: there is no unit."""

    rank: int
    size: int
    placement: ExpertPlacement = "linear"
    exchange: ExpertExchange | None = None

    def own(self, num_experts: int) -> list[int]:
        """Returns the numbers of this rank's experts, ascending. Raises ModelError if they cannot be spread evenly."""
        if num_experts % self.size:
            raise ModelError(
                f"{called('enable_expert_parallel')}: {num_experts} experts cannot be spread evenly over {self.size} "
                f"ranks; use a divisor"
            )
        num_own = num_experts // self.size
        if self.placement == "round_robin":
            return list(range(self.rank, num_experts, self.size))
        return list(range(self.rank * num_own, (self.rank + 1) * num_own))

    def local_numbers(self, num_experts: int) -> torch.Tensor:
        """Returns [num_experts] int64: each expert's number among this rank's; others' are past the end of those."""
        own = self.own(num_experts)
        found = torch.full((num_experts,), len(own), dtype=torch.int64)
        found[own] = torch.arange(len(own))
        return found
