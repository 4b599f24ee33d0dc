"""The tensors that one rank reads from files: slices that a plan determines, and perhaps whole experts.

Files store experts separately, as `experts.N.…`, or stacked along dimension 0. A rank's model numbers its own experts
from 0. Independent of the forms of weights.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from pd_cluster.model.layers.expert_share import ExpertShare
from pd_cluster.model.parallel.parallel_plan import STACKED, WHOLE, ParallelPlan, Piece, WeightCut

EXPERTS = re.compile(r"(?P<before>(?:^|.*\.)layers\.\d+\.(?:.*\.)?experts\.)(?:(?P<index>\d+)\.)?")
STACKED_LAYER = re.compile(rf"(?:^|\.)layers\.\d+\.(?:{'|'.join(map(re.escape, STACKED))})\.\w+$")


@dataclass(frozen=True, slots=True)
class OwnFiles:
    """A rank's experts in files with all experts. `local`: expert index -> index on this rank, ascending."""

    local: dict[int, int]

    @classmethod
    def of(cls, share: ExpertShare, num_experts: int) -> OwnFiles:
        """Makes the map; `num_experts`: per block. Raises ModelError if the ranks would have different numbers."""
        return cls({expert: at for at, expert in enumerate(share.own(num_experts))})

    def name(self, name: str) -> str:
        """Returns the name of a tensor in this rank's model; "" for an expert of another rank."""
        found = EXPERTS.match(name)
        if found is None or found["index"] is None:
            return name
        local = self.local.get(int(found["index"]))
        return "" if local is None else f"{found['before']}{local}.{name[found.end() :]}"

    def has(self, name: str) -> bool:
        """Whether a tensor belongs to one expert, or to all experts of a block."""
        return EXPERTS.match(name) is not None or STACKED_LAYER.search(name) is not None

    def pieces(self) -> tuple[Piece, ...]:
        """Returns this rank's experts as ranges of expert indexes."""
        runs = itertools.groupby(self.local, key=lambda expert: expert - self.local[expert])
        experts = [list(run) for _, run in runs]
        return tuple((run[0], run[-1] + 1) for run in experts)


@dataclass(frozen=True, slots=True)
class RankTensors:
    """Decides what a rank reads. Without a plan no tensor is cut; without `experts` the plan also cuts experts."""

    plan: ParallelPlan | None = None
    rank: int = 0
    experts: OwnFiles | None = None

    def name(self, name: str) -> str:
        """Returns the name of a tensor in this rank's model; "" if the rank does not read it."""
        return name if self.experts is None else self.experts.name(name)

    def own_experts(self, name: str) -> WeightCut | None:
        """Returns the cut of a tensor that stacks experts, if this rank has whole experts; otherwise None."""
        if self.experts is None or not self.experts.has(name):
            return None
        found = EXPERTS.match(name)
        return None if found is not None and found["index"] is not None else WeightCut(0, self.experts.pieces())

    def cuts(self, name: str) -> bool:
        """Whether the plan cuts tensors with this name; it does not cut experts that are whole."""
        return self.plan is not None and (self.experts is None or not self.experts.has(name))

    def cut(self, name: str, shape: tuple[int, ...], takes_whole_rows: bool = False) -> WeightCut:
        """Returns the plan's cut; see `ParallelPlan.cut`."""
        if self.plan is None or not self.cuts(name):
            return WHOLE
        return self.plan.cut(name, shape, self.rank, takes_whole_rows)


WHOLE_PART = RankTensors()
