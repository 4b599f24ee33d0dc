"""The pools of `kv`, and the order in which transfers use their blocks."""

from __future__ import annotations

from collections import deque

import torch

from benchmarks.kv.spec import RUN_BLOCKS
from pd_cluster.devices.device import CPU, Device
from pd_cluster.engine.trip.links import LAYOUT
from pd_cluster.errors import LinkError
from pd_cluster.kv.pool import KVPool


def make_pool(num_blocks: int, of_numbers: bool, device: Device = CPU) -> KVPool:
    """Makes a pool with every page mapped. `of_numbers`: block b is filled with the number b."""
    pool = KVPool(LAYOUT, num_blocks, device)
    blocks = pool.flat()[:num_blocks].view(torch.int16)
    for block in range(num_blocks):
        blocks[block] = block if of_numbers else -1
    return pool


class FreeBlocks:
    """Hands out blocks in consecutive runs, the runs in a seeded order, first released first."""

    def __init__(self, num_blocks: int, seed: int, run: int = RUN_BLOCKS) -> None:
        order = torch.randperm(num_blocks // run, generator=torch.Generator().manual_seed(seed)).tolist()
        self._free = deque(at * run + i for at in order for i in range(run))

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise LinkError(f"{count} blocks are wanted and {len(self._free)} are free")
        return [self._free.popleft() for _ in range(count)]

    def release(self, blocks: list[int]) -> None:
        self._free.extend(blocks)
