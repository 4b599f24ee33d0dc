"""The KV cache itself: one tensor, block-major, so that a block is one contiguous range; on NPUs one a layer.

On CPU the memory is a memfd: another process that is handed the descriptor can map it, and it is gone with the
last process that has it, however that ended. On an accelerator it is one allocation of the device's. Knows nothing of
who holds which block.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading

import numpy as np
import numpy.typing as npt
import torch

from pd_cluster.device import CPU, Device
from pd_cluster.errors import ConfigError
from pd_cluster.kv.layered import LayerMajor
from pd_cluster.kv.layout import KVLayout

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


Memory = torch.Tensor | LayerMajor  # the latter on NPUs
NUM_EXTRA_BLOCKS = 3  # behind the pool's own: one takes what padding writes, two prove links


class KVPool:
    """`data` is [num_blocks + extra, num_layers, 2, block_size, local_kv_heads, head_dim]; index 2 is key, value.

    `memory` is `data`, or what takes its place where pools lie by layers. `num_blocks` counts those that requests can
    hold. The probe block has a content that follows from `probe_seed`,
    and never another: the probes of others land in a block of their own.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: Device = CPU) -> None:
        if layout.k_head_dim != layout.v_head_dim:
            raise ValueError(f"key and value head dims differ: {layout.k_head_dim}, {layout.v_head_dim}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        self.fd = -1  # of the memory, on CPU
        self.memory: Memory
        if device.is_accelerator:
            try:
                self.memory = self._allocated()
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"{_described(layout, num_blocks)} does not fit {device.torch_name}: {error}; give it less"
                ) from None
        else:
            try:
                self.memory = self._mapped()
            except (OSError, OverflowError) as error:
                raise ConfigError(f"{_described(layout, num_blocks)} cannot be had: {error}; give it less") from None
        self.probe_lock = threading.Lock()  # of the block where several links' probes land
        self.probe_seed = secrets.randbits(62)
        self.put_block(self.probe_block, probe_content(layout, self.probe_seed)[0])

    def _allocated(self) -> Memory:
        """On an accelerator."""
        num_blocks, dtype = self.num_blocks + NUM_EXTRA_BLOCKS, TORCH_DTYPES[self.layout.dtype]
        if self.device.kind == "npu":
            return LayerMajor.zeros(self.layout, num_blocks, dtype, self.device.torch_name)
        return torch.zeros(shape_of(self.layout, num_blocks), dtype=dtype, device=self.device.torch_name)

    def _mapped(self) -> torch.Tensor:
        num_blocks = self.num_blocks + NUM_EXTRA_BLOCKS
        nbytes = self.layout.block_nbytes * num_blocks
        self.fd = os.memfd_create("pd-cluster-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return view_blocks(mmap.mmap(self.fd, nbytes), self.layout, num_blocks)

    @property
    def data(self) -> torch.Tensor:
        """Of a block-major pool."""
        assert isinstance(self.memory, torch.Tensor)
        return self.memory

    @property
    def nbytes(self) -> int:
        return self.layout.block_nbytes * self.num_blocks

    @property
    def probe_block(self) -> int:
        return self.num_blocks + 1

    @property
    def landing_probe_block(self) -> int:
        return self.num_blocks + 2

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value of one layer, each [num_blocks + extra, block_size, local_kv_heads, head_dim] (strided)."""
        if isinstance(self.memory, LayerMajor):
            keys, values = self.memory.layers[layer_idx]
            return keys, values
        return self.memory[:, layer_idx, 0], self.memory[:, layer_idx, 1]

    def block(self, block: int) -> torch.Tensor:
        """One block on the host, [num_layers, 2, block_size, local_kv_heads, head_dim]."""
        if isinstance(self.memory, LayerMajor):
            return torch.stack([layer[:, block] for layer in self.memory.layers]).cpu()
        return self.memory[block].cpu()

    def put_block(self, block: int, content: torch.Tensor | float) -> None:
        """What `block` gives, from the host; or one number."""
        if not isinstance(self.memory, LayerMajor):
            self.memory[block] = content.to(self.memory.device) if isinstance(content, torch.Tensor) else content
            return
        for i, layer in enumerate(self.memory.layers):
            layer[:, block] = content[i].to(layer.device) if isinstance(content, torch.Tensor) else content

    def check_blocks(self, table: npt.NDArray[np.int64], wanted: int) -> None:
        """Kernels trust what passes here; `wanted` is how long it must be. Raises ValueError."""
        least, most = int(table.min()), int(table.max())
        if len(table) != wanted or least < 0 or most > self.num_blocks:  # that one is for padding
            raise ValueError(
                f"block tables hold {len(table)} blocks from {least} to {most}, "
                f"wanted {wanted} from 0 to {self.num_blocks}"
            )

    def flat(self) -> torch.Tensor:
        """The same memory as bytes: [num_blocks + extra, block_nbytes] uint8."""
        return flat(self.data)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def flat(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks as bytes: [num_blocks, block_nbytes] uint8."""
    return blocks.view(len(blocks), -1).view(torch.uint8)


def _described(layout: KVLayout, num_blocks: int) -> str:
    return f"the KV pool's {num_blocks * layout.block_nbytes / 2**30:.1f} GiB for --num-blocks {num_blocks}"


def is_block(block: int, num_blocks_in_all: int) -> bool:
    """Whether a peer may name this block of a pool of so many, extra ones included: not the one for padding."""
    num_blocks = num_blocks_in_all - NUM_EXTRA_BLOCKS
    return 0 <= block < num_blocks or block == num_blocks + 1


def probe_content(layout: KVLayout, seed: int) -> torch.Tensor:
    """[1, num_layers, 2, block_size, local_kv_heads, head_dim]: numbers that are the same in every dtype."""
    shape = (1, layout.num_layers, 2, layout.block_size, layout.local_kv_heads, layout.k_head_dim)
    numbers = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed))
    return (numbers / 64).to(TORCH_DTYPES[layout.dtype])


def view_blocks(buffer: mmap.mmap, layout: KVLayout, num_blocks: int) -> torch.Tensor:
    """Typed view of mapped memory: [num_blocks, num_layers, 2, block_size, local_kv_heads, head_dim]."""
    return torch.frombuffer(buffer, dtype=TORCH_DTYPES[layout.dtype]).view(shape_of(layout, num_blocks))


def shape_of(layout: KVLayout, num_blocks: int) -> tuple[int, int, int, int, int, int]:
    return num_blocks, layout.num_layers, 2, layout.block_size, layout.local_kv_heads, layout.k_head_dim
