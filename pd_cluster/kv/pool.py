"""The KV cache itself: one tensor, block-major, so that a block is one contiguous range.

On CPU the memory is a memfd: another process that is handed the descriptor can map it, and it is gone with the
last process that has it, however that ended. Knows nothing of who holds which block.
"""

from __future__ import annotations

import mmap
import os

import torch

from pd_cluster.kv.layout import KVLayout

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class KVPool:
    """`data` is [num_blocks, num_layers, 2, block_size, local_kv_heads, head_dim]; index 2 is key, value.

    `num_blocks` counts real blocks; one more at the end takes what padding writes.
    """

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        if layout.k_head_dim != layout.v_head_dim:
            raise ValueError(f"key and value head dims differ: {layout.k_head_dim}, {layout.v_head_dim}")
        self.layout = layout
        self.num_blocks = num_blocks
        nbytes = layout.block_nbytes * (num_blocks + 1)
        self.fd = os.memfd_create("pd-cluster-kv", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, nbytes)
        self._map = mmap.mmap(self.fd, nbytes)
        self.data = view_blocks(self._map, layout, num_blocks + 1)

    @property
    def nbytes(self) -> int:
        return self.layout.block_nbytes * self.num_blocks

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value of one layer, each [num_blocks + 1, block_size, local_kv_heads, head_dim] (strided)."""
        return self.data[:, layer_idx, 0], self.data[:, layer_idx, 1]

    def flat(self) -> torch.Tensor:
        """The same memory as bytes: [num_blocks + 1, block_nbytes] uint8."""
        return self.data.view(self.num_blocks + 1, -1).view(torch.uint8)

    def close(self) -> None:
        os.close(self.fd)


def view_blocks(buffer: mmap.mmap, layout: KVLayout, num_blocks: int) -> torch.Tensor:
    """Typed view of mapped memory: [num_blocks, num_layers, 2, block_size, local_kv_heads, head_dim]."""
    flat = torch.frombuffer(buffer, dtype=TORCH_DTYPES[layout.dtype])
    return flat.view(num_blocks, layout.num_layers, 2, layout.block_size, layout.local_kv_heads, layout.k_head_dim)
