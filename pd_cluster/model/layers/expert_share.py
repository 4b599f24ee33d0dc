"""The experts of a rank, and how it computes them for rows of other instances. Independent of layers and files.

A rank has whole experts. The ranks of one instance add up their experts' outputs in the all-reduce at the end of the
layer. The instances of a unit exchange rows: each rank receives the rows of all members, computes its experts for them,
and returns the results to the members that own the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from pd_cluster.errors import ModelError, called
from pd_cluster.settings.engine_config import ExpertPlacement

# (rows [num_rows, hidden_size], experts and weights [num_rows, top_k]) -> [num_rows, hidden_size]
Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ExpertExchange(Protocol):
    """One rank's part of the exchange between the members of a unit: ranks with the same tensor-parallel index.

    All of them call `gather` and then `combine` once per layer with experts, with any number of rows, including 0.
    """

    def gather(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns each of these tensors for all members, concatenated in member order.

        x [num_rows, hidden_size] has the dtype of activations; chosen is int64, weights float32, both [num_rows,
        top_k].
        """

    def combine(self, partials: torch.Tensor) -> torch.Tensor:
        """Returns this member's rows, [num_rows, hidden_size]: the sum of all members' partials, in member order.

        `partials`: the outputs of this rank's experts for the rows that `gather` returned.
        """


class ExpertUnit(ExpertExchange, Protocol):
    """An exchange whose members must connect first.

    `rows`: the number of rows of each member in the next step; None: the same for every member, as in the proof at
    load.
    """

    rows: Sequence[int] | None

    def form(self) -> None:
        """Returns when all members have loaded their weights; nothing may be computed before. Raises InstanceLost."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertShare:
    """The experts of rank `rank` among the `size` that share all experts. `exchange` None: no unit of instances."""

    rank: int
    size: int
    placement: ExpertPlacement = "linear"
    exchange: ExpertUnit | None = None

    def own(self, num_experts: int) -> list[int]:
        """Returns the indexes of this rank's experts, ascending. Raises ModelError if they cannot be spread evenly."""
        if num_experts % self.size:
            flag = called("enable_expert_parallel" if self.exchange is None else "data_parallel_size")
            raise ModelError(
                f"{flag}: {num_experts} experts cannot be spread evenly over {self.size} ranks; use a divisor"
            )
        num_own = num_experts // self.size
        if self.placement == "round_robin":
            return list(range(self.rank, num_experts, self.size))
        return list(range(self.rank * num_own, (self.rank + 1) * num_own))

    def local_numbers(self, num_experts: int) -> torch.Tensor:
        """Returns [num_experts] int64: for each expert its index among this rank's experts, or, if another rank has it,
        an index past the end.
        """
        own = self.own(num_experts)
        found = torch.full((num_experts,), len(own), dtype=torch.int64)
        found[own] = torch.arange(len(own))
        return found


class RankExperts:
    """One block's experts on this rank, addressed by the expert indexes that the block's router chooses."""

    def __init__(self, share: ExpertShare, num_experts: int, dtype: torch.dtype = torch.int64) -> None:
        """`num_experts`: how many experts the router chooses from. `dtype`: of the indexes that `compute` takes."""
        self._local, self._exchange = share.local_numbers(num_experts).to(dtype), share.exchange
        self._no_rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def through(self, compute: Compute, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the experts' outputs for x [num_rows, hidden_size].

        `compute` takes rows, indexes among this rank's experts, and weights; it ignores indexes past the end. With an
        exchange, each member computes its experts for the rows of all members, then gets the sums for its own rows.
        """
        if self._exchange is None:
            return compute(x, self._numbers(chosen), weights)
        chosen = chosen.long()
        if self._no_rows is None:
            self._no_rows = x[:0].clone(), chosen[:0].clone(), weights[:0].clone()
        rows, chosen, given = self._exchange.gather(x, chosen, weights.float())
        own = compute(rows, self._numbers(chosen), given.to(weights.dtype)) if len(rows) else rows
        return self._exchange.combine(own)

    def take_part(self, compute: Compute) -> None:
        """Computes only rows of the unit's other members.

        A call of `through` must come first, as in the proof at load: it provides the shapes.
        """
        assert self._no_rows is not None
        self.through(compute, *self._no_rows)

    def _numbers(self, chosen: torch.Tensor) -> torch.Tensor:
        if self._local.device != chosen.device:
            self._local = self._local.to(chosen.device)
        # Indexing by tensors may make the host wait for an NPU; index_select does not.
        return self._local.index_select(0, chosen.flatten()).view(chosen.shape)


@runtime_checkable
class UnitExperts(Protocol):
    """A block of experts that is spread over a unit."""

    def take_part(self) -> None:
        """Computes this rank's experts for rows of the unit's other members, when it has no rows of its own."""


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """A model's blocks of experts, in layer order, if this rank shares the experts with other ranks."""

    share: ExpertShare
    blocks: list[UnitExperts] = field(default_factory=list)

    @property
    def are_exchanged(self) -> bool:
        return self.share.exchange is not None

    def note(self, block: object) -> None:
        """Records the next block if it takes part in an exchange."""
        if self.are_exchanged:
            assert isinstance(block, UnitExperts)  # `Ops` without an exchange have raised an error before
            self.blocks.append(block)
