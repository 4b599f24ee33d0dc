"""Adapters of embeddings and output layers, and whole modules that adapters replace.

A row is computed only with the values of its own adapter; rows without an adapter keep the model's results. Does not
deal with files and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import embedding

from pd_cluster.model.layers.ops import Norm, Ops
from pd_cluster.model.layers.packed_linear import Linear, make_linear
from pd_cluster.model.lora.adapted_linear import LinearAdapters, LowRank, StepRows, padded_ranks


@dataclass(slots=True)
class OutputLayerAdapters(LinearAdapters):
    """The output layer, which computes only the rows whose logits are requested."""

    wholes: dict[int, Linear] = field(default_factory=dict)

    def put_whole(self, slot: int, matrix: torch.Tensor) -> None:
        self.wholes[slot] = make_linear(matrix)

    def drop(self, slot: int) -> None:
        LinearAdapters.drop(self, slot)
        self.wholes.pop(slot, None)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y = LinearAdapters.add(self, x, y)
        if self.wholes and self.rows.are_adapted:
            flat_x, flat_y = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
            for slot, rows in self.rows.segments:
                if (whole := self.wholes.get(slot)) is not None:
                    flat_y[rows] = whole(flat_x[rows].float().contiguous()).to(y.dtype)
        return y


@dataclass(frozen=True, slots=True)
class LowRankEmbedding:
    """`a` [vocab_size, rank], and the product with B, which includes the scale."""

    a: torch.Tensor
    b: Linear


@dataclass(slots=True)
class EmbeddingAdapters:
    """The token embedding. `shape`: vocab_size and hidden_size. `factor`: the model's factor of embeddings."""

    rows: StepRows
    shape: tuple[int, int]
    factor: float = 1.0
    nums_rows: list[int] | None = None  # rows of each call, recorded during `watched`
    low: dict[int, LowRankEmbedding] = field(default_factory=dict)
    wholes: dict[int, torch.Tensor] = field(default_factory=dict)  # [vocab_size, hidden_size]

    def put(self, slot: int, pair: LowRank) -> None:
        """`pair`: A [rank, vocab_size] and B [hidden_size, rank]."""
        a, b = padded_ranks(pair.a, 0), padded_ranks(pair.b, 1)
        self.low[slot] = LowRankEmbedding(a.T.contiguous(), make_linear(b))

    def put_whole(self, slot: int, matrix: torch.Tensor) -> None:
        self.wholes[slot] = matrix

    def drop(self, slot: int) -> None:
        self.low.pop(slot, None)
        self.wholes.pop(slot, None)

    def add(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Changes x [..., num_rows, hidden_size], the embeddings of `ids` [..., num_rows], in place; returns it."""
        if self.nums_rows is not None:
            self.nums_rows.append(ids.numel())
        if not self.rows.are_adapted or not (self.low or self.wholes):
            return x
        flat_ids, flat = ids.reshape(-1), x.view(-1, x.shape[-1])
        for slot, rows in self.rows.segments:
            if (whole := self.wholes.get(slot)) is not None:
                flat[rows] = (embedding(flat_ids[rows], whole).float() * self.factor).to(x.dtype)
            if (low := self.low.get(slot)) is not None:
                added = low.b(embedding(flat_ids[rows], low.a)) * self.factor
                flat[rows] = (flat[rows].float() + added).to(x.dtype)
        return x


class AdaptedEmbedding(torch.nn.Module):
    """An embedding with adapters."""

    def __init__(self, base: Callable[[torch.Tensor], torch.Tensor], site: EmbeddingAdapters) -> None:
        super().__init__()
        self._base, self._site = base, site
        if isinstance(base, torch.nn.Module) and hasattr(base, "weight"):
            self.weight = base.weight  # some code reads the weight's dtype

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self._site.add(input_ids, self._base(input_ids))


@dataclass(slots=True)
class NormAdapters:
    """A norm over whole rows. `of`: makes a norm from a weight as it is stored in the file."""

    rows: StepRows
    norm: Norm
    of: Callable[[torch.Tensor], Norm]
    wholes: dict[int, Norm] = field(default_factory=dict)

    def put_whole(self, slot: int, weight: torch.Tensor) -> None:
        self.wholes[slot] = self.of(weight)

    def drop(self, slot: int) -> None:
        self.wholes.pop(slot, None)


class Norms:
    """The norms of a fused model, by name."""

    def __init__(self, rows: StepRows) -> None:
        self._rows = rows
        self.sites: dict[str, NormAdapters] = {}
        self._by_norm: dict[int, NormAdapters] = {}

    def beside(self, name: str, norm: Norm, of: Callable[[torch.Tensor], Norm]) -> None:
        site = NormAdapters(self._rows, norm, of)
        self.sites[name] = self._by_norm[id(norm)] = site

    def change(self, ops: Ops, norm: Norm, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Replaces those rows of `normed` [num_rows, features] whose adapter has its own norm by this norm of x."""
        if not self._rows.are_adapted:
            return normed
        site = self._by_norm.get(id(norm))
        if site is not None and site.wholes:
            for slot, rows in self._rows.segments:
                if (own := site.wholes.get(slot)) is not None:
                    normed[rows] = ops.norm(x[rows].contiguous(), own)
        return normed


Put = Callable[[int], None]  # stores one part of an adapter in the given slot
Sites = Sequence[LinearAdapters | EmbeddingAdapters | NormAdapters]
