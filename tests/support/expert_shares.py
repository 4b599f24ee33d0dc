"""Shares of a block's experts: a share's weights, the rows that use none of them, and members of a unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pd_cluster.model.layers.expert_share import ExpertShare
from pd_cluster.model.layers.expert_weights import ExpertStack, ExpertWeights
from pd_cluster.model.layers.gated_mlp import ExpertRouter


def weights_of(weights: ExpertWeights, share: ExpertShare) -> ExpertWeights:
    """Returns a copy of the weights of this share's experts."""
    own = share.own(len(weights.down))

    def some(stack: ExpertStack) -> ExpertStack:
        return replace(stack, parts={name: part[own] for name, part in stack.parts.items()})

    return ExpertWeights(some(weights.gate_up), some(weights.down))


def rows_without(router: ExpertRouter, share: ExpertShare, x: torch.Tensor) -> torch.Tensor:
    """Returns which rows use only other ranks' experts: [num_rows] bool."""
    _, chosen = router.routing.weigh(router.linear()(x))
    own = torch.tensor(share.own(len(router.weight)), device=x.device)
    return ~torch.isin(chosen, own).any(1)


@dataclass(slots=True)
class _End:
    """One member's end of the exchange. `told`: all members' rows. `partials`: all members' results for these rows."""

    rank: int
    told: dict[int, tuple[torch.Tensor, ...]]
    partials: dict[int, torch.Tensor]

    def gather(self, *own: torch.Tensor) -> Any:
        assert own[1].dtype == torch.int64
        assert own[2].dtype == torch.float32
        self.told[self.rank] = own
        return tuple(torch.cat(parts) for parts in zip(*(self.told[rank] for rank in sorted(self.told)), strict=True))

    def combine(self, partials: torch.Tensor) -> torch.Tensor:
        self.partials[self.rank] = partials
        start = sum(len(self.told[rank][0]) for rank in self.told if rank < self.rank)
        own = slice(start, start + len(self.told[self.rank][0]))
        parts = [
            self.partials[rank][own] for rank in sorted(self.partials) if len(self.partials[rank]) == len(partials)
        ]
        return torch.stack(parts).sum(0)


class Members:
    """Runs a unit's members in one thread, in three rounds of calls: for rows, partial results and sums."""

    def __init__(self, make: Callable[[ExpertShare], Any], size: int) -> None:
        self._told: dict[int, tuple[torch.Tensor, ...]] = {}
        self._partials: dict[int, torch.Tensor] = {}
        ends = [_End(rank, self._told, self._partials) for rank in range(size)]
        self._members = [make(ExpertShare(end.rank, size, exchange=end)) for end in ends]

    def step(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns each member's result for its rows. A member without rows takes part as well."""
        self._told.clear()
        self._partials.clear()
        for _ in ("rows", "partial results", "sums"):
            found = [self._call(member, x) for member, x in zip(self._members, rows, strict=True)]
        return found

    def _call(self, member: Any, x: torch.Tensor) -> torch.Tensor:
        if len(x):
            result: torch.Tensor = member(x)
            return result
        member.take_part()
        return x
