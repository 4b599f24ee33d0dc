"""Which experts a rank has, and how it computes them for rows of other instances. Knows no layers and no files.

A rank has whole experts. Those of one instance add up what theirs return in the sum that ends the layer anyway. The
instances of a unit exchange rows: each rank gets those of all members, computes its experts, and returns what they
make of them to the rows' owner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from pd_cluster.errors import ConfigError, ModelError, called
from pd_cluster.settings.engine import ExpertPlacement

# (rows [num_rows, hidden_size], experts and weights [num_rows, top_k]) -> [num_rows, hidden_size]
Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


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


class OwnExperts:
    """One block's experts that this rank has, by the numbers that the block's router chooses."""

    def __init__(self, share: ExpertShare, num_experts: int) -> None:
        """`num_experts`: those that the router knows."""
        self._local, self._exchange = share.local_numbers(num_experts), share.exchange

    def through(self, compute: Compute, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of what the experts make of each row, x [num_rows, hidden_size].

        `compute` takes rows, numbers of this rank's experts and weights; it ignores numbers past their end. With an
        exchange, it computes the rows of all members, and the parts of all members are added up.
        """
        if self._exchange is None:
            return compute(x, self._numbers(chosen), weights)
        rows, chosen, weights = self._exchange.gather(x, chosen, weights)
        return self._exchange.combine(compute(rows, self._numbers(chosen), weights))

    def take_part(self, compute: Compute, no_rows: torch.Tensor, top_k: int) -> None:
        """Computes rows of other members only. `no_rows`: [0, hidden_size] in the dtype of activations."""
        chosen = torch.empty(0, top_k, dtype=torch.int64, device=no_rows.device)
        self.through(compute, no_rows, chosen, torch.empty(0, top_k, device=no_rows.device))

    def _numbers(self, chosen: torch.Tensor) -> torch.Tensor:
        if self._local.device != chosen.device:
            self._local = self._local.to(chosen.device)
        return self._local[chosen]


def no_expert_parallelism(kernels: str) -> ConfigError:
    """Returns the error of kernels that compute all experts of a block, by their name."""
    flags = f"{called('enable_expert_parallel')}, {called('data_parallel_size')}"
    return ConfigError(f"{flags}: {kernels} kernels compute all experts of a block on every rank; leave them out")
