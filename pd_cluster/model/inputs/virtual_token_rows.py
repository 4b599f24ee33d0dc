"""The tokens of a step that are virtual tokens of a prompt adapter. Does not read adapter folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.kv_vectors import encode, write_kv
from pd_cluster.types import Request

Ints = npt.NDArray[np.int64]
NUM_COLUMNS = 4  # columns of `virtual_parts`


def virtual_parts(chunks: Sequence[tuple[Request, int]], slots: Mapping[str, int]) -> Ints | None:
    """Returns the virtual tokens that a step computes; None if there are none.

    [num_parts, NUM_COLUMNS]: the adapter's slot, the first virtual token, its row in the step, and the number of rows.
    """
    found: list[tuple[int, int, int, int]] = []
    row = 0
    for request, num_tokens in chunks:
        start = request.num_computed_tokens
        count = min(request.num_virtual_tokens - start, num_tokens)
        if count > 0:
            found.append((slots[request.order.variant], start, row, count))
        row += num_tokens
    return np.array(found, dtype=np.int64) if found else None


@dataclass(frozen=True, slots=True)
class VirtualTokens:
    """An adapter's values for its virtual tokens, in float32.

    `embeddings` [num_tokens, hidden_size], or `kv` [num_layers, 2, num_tokens, num_kv_heads, head_dim].
    """

    embeddings: torch.Tensor | None = None
    kv: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class VirtualRows:
    """A step's rows of virtual tokens; each part belongs to one adapter."""

    parts: Ints
    adapters: Sequence[VirtualTokens]  # the adapter of each part

    def embed(self, x: torch.Tensor) -> None:
        """Replaces the embeddings of these rows in x, [num_tokens, hidden_size], in place."""
        for (_, first, row, count), adapter in zip(self.parts.tolist(), self.adapters, strict=True):
            if adapter.embeddings is not None:
                x[row : row + count] = adapter.embeddings[first : first + count].to(x.dtype)

    def written(self, layer_idx: int, pool: KVPool, slots: torch.Tensor) -> None:
        """Overwrites the keys and values that a layer has written for these rows; `slots` [num_tokens]: the slots of
        the step's rows.
        """
        for (_, first, row, count), adapter in zip(self.parts.tolist(), self.adapters, strict=True):
            if adapter.kv is not None:
                keys, values = (
                    encode(each[first : first + count], pool.layout.dtype) for each in adapter.kv[layer_idx]
                )
                write_kv(keys, values, *pool.layer(layer_idx), slots[row : row + count])
