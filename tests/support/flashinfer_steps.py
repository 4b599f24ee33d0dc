"""Steps over a pool, and layers without weights, for tests of FlashInfer and of its fake."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.layers.attention.sdpa import Scoring
from pd_cluster.types import Request, RequestSpec, Sampling


def chunks_of(
    sequences: list[tuple[int, int]], num_blocks: int, block_size: int, seed: int = 1
) -> list[tuple[Request, int]]:
    """Makes chunks of sequences (query_len, context_len) whose blocks are scattered over the pool."""
    free = random.Random(seed).sample(range(num_blocks), num_blocks)
    chunks = []
    for i, (query_len, context_len) in enumerate(sequences):
        table = [free.pop() for _ in range(-(-context_len // block_size))]
        order, prefix = RequestSpec([0] * context_len, Sampling()), context_len - query_len
        chunks.append((Request(str(i), order, num_computed_tokens=prefix, tables=[table]), query_len))
    return chunks


class Layers:
    """Layers whose queries and keys are functions of tokens and positions; one layer per scoring, as in Gemma 2."""

    def __init__(
        self, attend: Callable[..., torch.Tensor], heads: Sequence[int], head_dim: int, scorings: Sequence[Scoring],
        **made: Any,
    ) -> None:  # fmt: skip
        """`heads`: the numbers of query, key and value heads. `made`: their dtype and device."""
        self.config, self.kernels, self._attend = None, "", attend
        self._heads, self._head_dim, self._scorings, self._made = list(heads), head_dim, scorings, made

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        at = batch.input_ids[0] * 31 + batch.rope_positions[0]  # [num_tokens]
        result = torch.zeros(len(at), self._heads[0] * self._head_dim, device=at.device)
        for layer_idx, scoring in enumerate(self._scorings):
            grid = torch.arange(sum(self._heads) * self._head_dim, device=at.device) * (layer_idx + 1) + 1
            numbers = torch.sin(at[:, None] * grid * 0.37).to(**self._made).view(len(at), -1, self._head_dim)
            query, keys, values = numbers.split(self._heads, dim=1)
            result += self._attend(layer_idx, query.transpose(0, 1), keys, values, batch, scoring).flatten(1)
        return result
