"""A pool's memory by layers: a tensor of its own for each, for operators that want every layer contiguous.

What NPUs' attention reads. Offers what packing and copying need of any pool; kv/pool.py says which devices have it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pd_cluster.kv.layout import KVLayout

ALL = slice(None)


class LayerMajor:
    """`layers[i]` is [2, num_blocks, block_size, local_kv_heads, head_dim]; index 0 is keys, 1 values."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self.layers = list(layers)

    @classmethod
    def zeros(cls, layout: KVLayout, num_blocks: int, dtype: torch.dtype, device: str) -> LayerMajor:
        shape = layer_shape(layout, num_blocks)
        return cls([torch.zeros(shape, dtype=dtype, device=device) for _ in range(layout.num_layers)])

    def __len__(self) -> int:
        """Blocks."""
        return self.layers[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.layers[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].dtype

    def gather(self, ids: torch.Tensor, first_layer: int = 0, stop_layer: int | None = None) -> torch.Tensor:
        """A copy of some blocks as block-major pools have them: [num_ids, num_layers, 2, block_size, heads, dim]."""
        found = [half.index_select(0, ids) for half in self._halves(slice(first_layer, stop_layer))]
        return torch.stack(found, dim=1).view(len(ids), -1, 2, *found[0].shape[1:])

    def scatter(self, ids: torch.Tensor, blocks: torch.Tensor, first_layer: int = 0) -> None:
        """Writes what `gather` gives, [num_ids, num_layers, …], in the pool's precision."""
        halves = self._halves(slice(first_layer, first_layer + blocks.shape[1]))
        for half, values in zip(halves, blocks.to(self.dtype).flatten(1, 2).unbind(1), strict=True):
            half.index_copy_(0, ids, values)

    def put_tokens(
        self, block: torch.Tensor, offset: torch.Tensor, heads: slice, vectors: torch.Tensor, first_layer: int
    ) -> None:
        """Writes vectors [num_layers, 2, num_tokens, heads, dim] to the slots that block and offset name."""
        _, _, block_size, num_heads, head_dim = self.layers[0].shape
        wanted = torch.arange(*heads.indices(num_heads), device=self.device)
        rows = ((block * block_size + offset)[:, None] * num_heads + wanted).flatten()
        halves = self._halves(slice(first_layer, first_layer + len(vectors)))
        for half, values in zip(halves, vectors.to(self.dtype).flatten(0, 1), strict=True):
            half.view(-1, head_dim).index_copy_(0, rows, values.reshape(-1, head_dim))

    def copy_from(self, source: LayerMajor, ids: torch.Tensor, into: torch.Tensor, layers: slice = ALL) -> None:
        """`self[into] = source[ids]`, layer by layer, without a detour through blocks."""
        for there, here in zip(self._halves(layers), source._halves(layers), strict=True):
            there.index_copy_(0, into, here.index_select(0, ids))

    def _halves(self, layers: slice) -> list[torch.Tensor]:
        """Keys, then values of each of these layers, each [num_blocks, block_size, local_kv_heads, head_dim].

        What is indexed is always the first dimension of such a half, or of a view of all of it. Along another, NPUs
        write by copying the whole tensor out and back, over what a step has written meanwhile on another stream.
        """
        return [half for layer in self.layers[layers] for half in layer]


def layer_shape(layout: KVLayout, num_blocks: int) -> tuple[int, int, int, int, int]:
    return 2, num_blocks, layout.block_size, layout.local_kv_heads, layout.k_head_dim
