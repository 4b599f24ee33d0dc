"""The memory of the KV cache on a device, including a few blocks that no request uses.

On CPU the memory is a memfd, which another process can map through its descriptor. The memory is freed when the last
process that maps it has ended, in any way. On an accelerator the memory is allocated on the device. Knows nothing of
the blocks' holders.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import threading
import weakref
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from pd_cluster.devices.device import CPU, Device
from pd_cluster.errors import ConfigError, called
from pd_cluster.kv.block_major import BlockMajor, DeviceBlocks, HostBlocks
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.kv_vectors import encode
from pd_cluster.kv.layer_major import LayerMajor
from pd_cluster.kv.pool_memory import TORCH_DTYPES, Memory, runs
from pd_cluster.wire import KVPiece

NUM_EXTRA_BLOCKS = 3  # after the pool's blocks: one receives the writes of padding, two serve as probes of links


class KVPool:
    """`memory` has num_blocks + NUM_EXTRA_BLOCKS blocks; `num_blocks` counts those that requests can hold.

    The content of the probe block depends only on `probe_seed` and never changes; peers' probes land in another block.
    The pool can be used in `with`.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: Device = CPU) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        # Maps a layer of the model to its index in the layout; None if the group has all layers.
        self._places = {layer_idx: at for at, layer_idx in enumerate(layout.layers)} if layout.layers else None
        self.fd = -1  # the memory's descriptor, on CPU
        self._map: mmap.mmap | None = None  # the memory's mapping, on CPU
        self.memory: Memory
        if device.is_accelerator:
            try:
                self.memory = self._allocated()
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"{_described(layout, num_blocks)} does not fit {device.torch_name}: {error}; use fewer blocks"
                ) from None
        else:
            try:
                self.memory = self._mapped()
            except (OSError, OverflowError) as error:
                raise ConfigError(
                    f"{_described(layout, num_blocks)} cannot be mapped: {error}; use fewer blocks"
                ) from None
        self.probe_lock = threading.Lock()  # protects the block in which the probes of several links land
        self.probe_seed = secrets.randbits(62)
        try:
            self.put_block(self.probe_block, probe_content(layout, self.probe_seed))
        except BaseException:
            self.close()
            raise

    def _allocated(self) -> Memory:
        """Allocates the memory on an accelerator."""
        dtype, name = TORCH_DTYPES[self.layout.dtype], self.device.torch_name
        way = memory_class_of(self.device)
        shapes = way.shapes(self.layout, self.num_blocks + NUM_EXTRA_BLOCKS)
        return way(self.layout, [torch.zeros(shape, dtype=dtype, device=name) for shape in shapes])

    def _mapped(self) -> Memory:
        num_blocks = self.num_blocks + NUM_EXTRA_BLOCKS
        nbytes = self.layout.block_nbytes * num_blocks
        self.fd = os.memfd_create("pd-cluster-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._descriptor = weakref.finalize(self, os.close, self.fd)  # closes the descriptor if `close` is not called
        self._descriptor.atexit = False
        try:
            os.ftruncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map = mmap.mmap(self.fd, nbytes)
            return view_blocks(self._map, self.layout, num_blocks)
        except BaseException:
            self.close()
            raise

    @property
    def data(self) -> torch.Tensor:
        """Returns all blocks of a block-major pool. See BlockMajor.data."""
        assert isinstance(self.memory, BlockMajor)
        return self.memory.data

    def data_ptr(self) -> int:
        """Returns the address of block 0 of a block-major pool."""
        assert isinstance(self.memory, BlockMajor)
        return self.memory.bytes.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.layout.block_nbytes * self.num_blocks

    @property
    def probe_block(self) -> int:
        return self.num_blocks + 1

    @property
    def landing_probe_block(self) -> int:
        return self.num_blocks + 2

    def has_layer(self, layer_idx: int) -> bool:
        """Whether this pool's group has this layer of the model."""
        return self._places is None or layer_idx in self._places

    def planes(self, layer_idx: int) -> list[torch.Tensor]:
        """Returns a model layer's planes, each [num_blocks + extra, block_size, heads, width], strided."""
        return self.memory.planes(layer_idx if self._places is None else self._places[layer_idx])

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and values of a layer of the model, which are its first two planes, strided.

        Each is [num_blocks + extra, block_size, local_kv_heads, head_dim]. In a pool of codes the last dimension is the
        stored width in bytes; see kv/kv_vectors.py.
        """
        keys, values, *_ = self.planes(layer_idx)
        return keys, values

    def block(self, block: int) -> torch.Tensor:
        """Returns a copy of one block on the host, [1, block_numel]."""
        layers = range(self.layout.num_layers)
        parts = [plane[block].reshape(-1) for layer in layers for plane in self.memory.planes(layer)]
        return torch.cat(parts).cpu().view(shape_of(self.layout, 1))

    def put_block(self, block: int, content: torch.Tensor) -> None:
        """Writes the content of a block, in the form that `block` returns."""
        numbers = content.to(self.memory.device).view(torch.uint8).view(-1)
        piece = KVPiece(0, self.layout.block_size, 0, self.layout.num_layers, [block])
        self.memory.scatter(numbers, piece, [block])

    def clear(self, blocks: list[int], first_layer: int = 0) -> None:
        """Fills these blocks with zeros in the layers from `first_layer` on, including the scales of codes."""
        for layer in range(first_layer, self.layout.num_layers):
            for plane in self.memory.planes(layer):
                for first, count in runs(blocks):
                    plane[first : first + count] = 0

    def check_blocks(self, table: npt.NDArray[np.int64], wanted: int) -> None:
        """Checks a table before kernels use it. `wanted`: its required length. Raises ValueError."""
        least, most = int(table.min()), int(table.max())
        if len(table) != wanted or least < 0 or most > self.num_blocks:  # `num_blocks` is the padding block
            raise ValueError(
                f"block tables hold {len(table)} blocks from {least} to {most}, "
                f"expected {wanted} from 0 to {self.num_blocks}"
            )

    def flat(self) -> torch.Tensor:
        """Returns the same memory as bytes: [num_blocks + extra, block_nbytes] uint8."""
        assert isinstance(self.memory, BlockMajor)
        return self.memory.bytes

    def vacate(self) -> None:
        """Returns to the system the memory of all blocks that requests can hold.

        These blocks then read as zeros. CPU only. The extra blocks keep their contents, because links are probed with
        them. Other processes' mappings stay valid.
        """
        assert self._map is not None
        if nbytes := self.nbytes // mmap.PAGESIZE * mmap.PAGESIZE:
            self._map.madvise(mmap.MADV_REMOVE, 0, nbytes)

    def close(self) -> None:
        """Returns the memory to the system.

        Further calls do nothing; later uses of `memory` raise AttributeError. The pages are freed at once. A tensor
        that still views them reads zeros and keeps the mapping, so other processes' links must be closed first.
        """
        if hasattr(self, "memory"):
            del self.memory
        if self._map is not None:
            with contextlib.suppress(OSError):  # then the pages are freed with the last view
                self._map.madvise(mmap.MADV_REMOVE)
            self._map = None  # not closed, because torch's views may refer to the mapping
        if self.fd >= 0:
            self._descriptor()
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def memory_class_of(device: Device) -> type[HostBlocks | DeviceBlocks | LayerMajor]:
    """Returns the class of pool memory for this device."""
    if not device.is_accelerator:
        return HostBlocks
    return LayerMajor if device.traits.wants_layers_apart else DeviceBlocks


def _described(layout: KVLayout, num_blocks: int) -> str:
    return f"the KV pool's {num_blocks * layout.block_nbytes / 2**30:.1f} GiB for {called('num_blocks')} {num_blocks}"


def is_block(block: int, num_blocks_in_all: int) -> bool:
    """Whether a peer may read this block of a pool: a block that requests can hold, or the probe block.

    `num_blocks_in_all` includes the extra blocks.
    """
    num_blocks = num_blocks_in_all - NUM_EXTRA_BLOCKS
    return 0 <= block < num_blocks or block == num_blocks + 1


def probe_content(layout: KVLayout, seed: int) -> torch.Tensor:
    """Returns the content of one block, [1, block_numel]. Its values are exact in every plain dtype."""
    generator, found = torch.Generator().manual_seed(seed), []
    for first, stop, planes in layout.alike:
        num_vectors = [layout.block_size * layout.local_heads(plane) for plane in planes]
        numels = [count * plane.width for count, plane in zip(num_vectors, planes, strict=True)]
        numbers = torch.randint(-127, 128, (stop - first, sum(numels)), generator=generator) / 64
        parts = zip(torch.split(numbers, numels, dim=1), num_vectors, strict=True)
        vectors = [part.reshape(stop - first, count, -1) for part, count in parts]
        found.append(torch.cat([encode(part, layout.dtype).flatten(1) for part in vectors], dim=1).view(1, -1))
    return torch.cat(found, dim=1)


def view_blocks(buffer: mmap.mmap, layout: KVLayout, num_blocks: int) -> HostBlocks:
    """Returns a mapping of a pool's memory as blocks."""
    numbers = torch.frombuffer(buffer, dtype=TORCH_DTYPES[layout.dtype])
    return HostBlocks(layout, [numbers.view(shape_of(layout, num_blocks))])


def shape_of(layout: KVLayout, num_blocks: int) -> tuple[int, ...]:
    """Returns [num_blocks, block_numel], the shape of consecutive blocks."""
    (shape,) = HostBlocks.shapes(layout, num_blocks)
    return shape
