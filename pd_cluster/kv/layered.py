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
        found = [layer.index_select(1, ids) for layer in self.layers[first_layer:stop_layer]]
        return torch.stack([each.transpose(0, 1) for each in found], dim=1)

    def scatter(self, ids: torch.Tensor, blocks: torch.Tensor, first_layer: int = 0) -> None:
        """Writes what `gather` gives, [num_ids, num_layers, …], in the pool's precision."""
        for i in range(blocks.shape[1]):
            values = blocks[:, i].transpose(0, 1).to(self.dtype)
            self.layers[first_layer + i].index_copy_(1, ids, values)

    def put_tokens(
        self, block: torch.Tensor, offset: torch.Tensor, heads: slice, vectors: torch.Tensor, first_layer: int
    ) -> None:
        """Writes vectors [num_layers, 2, num_tokens, heads, dim] to the slots that block and offset name."""
        for i, values in enumerate(vectors):
            self.layers[first_layer + i][:, :, :, heads][:, block, offset] = values.to(self.dtype)

    def copy_from(self, source: LayerMajor, ids: torch.Tensor, into: torch.Tensor, layers: slice = ALL) -> None:
        """`self[into] = source[ids]`, layer by layer, without a detour through blocks."""
        for there, here in zip(self.layers[layers], source.layers[layers], strict=True):
            there.index_copy_(1, into, here.index_select(1, ids))


def layer_shape(layout: KVLayout, num_blocks: int) -> tuple[int, int, int, int, int]:
    return 2, num_blocks, layout.block_size, layout.local_kv_heads, layout.k_head_dim
