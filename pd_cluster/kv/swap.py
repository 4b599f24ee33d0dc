"""Host memory that the blocks of preempted requests wait in, and the copying of blocks. Knows nothing of requests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import torch

from pd_cluster.kv.layered import LayerMajor
from pd_cluster.kv.pack import ids_on
from pd_cluster.kv.pool import KVPool, flat, shape_of

Kind = Literal["copy", "out", "in"]


class SwapSpace:
    """`num_blocks` blocks in host memory beside a pool; untouched ones take no memory."""

    def __init__(self, pool: KVPool, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pool = pool
        # Pinned only where a device copies: it makes all the memory real at once.
        pinned = pool.device.is_accelerator and num_blocks > 0
        self._host = torch.empty(num_blocks, pool.layout.block_nbytes, dtype=torch.uint8, pin_memory=pinned)

    def move(self, moves: Sequence[tuple[Kind, int, int]]) -> None:
        """Copies blocks (kind, source, target) as if one after the other: within the pool, out to the host, back in.

        Neither the targets of neighbouring "out" moves nor those of "in" moves repeat, so these go in one go.
        """
        if isinstance(self._pool.memory, LayerMajor):
            self._move_layered(self._pool.memory, moves)
            return
        blocks = self._pool.flat()
        for kind, group in itertools.groupby(moves, key=lambda move: move[0]):
            pairs = [(source, target) for _, source, target in group]
            if kind == "copy":
                for source, target in pairs:
                    blocks[target].copy_(blocks[source])
                continue
            if blocks.device != self._host.device:
                self._cross(kind, pairs, blocks)
                continue
            sources, targets = (torch.tensor(ids) for ids in zip(*pairs, strict=True))
            if kind == "out":
                self._host.index_copy_(0, targets, blocks.index_select(0, sources))
            else:
                blocks.index_copy_(0, targets, self._host.index_select(0, sources))

    def _cross(self, kind: Kind, pairs: list[tuple[int, int]], blocks: torch.Tensor) -> None:
        """Between device and host, a block at a time: each is one large contiguous copy, in the stream's order."""
        for source, target in pairs:
            if kind == "out":
                self._host[target].copy_(blocks[source], non_blocking=True)
            else:
                blocks[target].copy_(self._host[source], non_blocking=True)

    def _move_layered(self, memory: LayerMajor, moves: Sequence[tuple[Kind, int, int]]) -> None:
        for kind, source, target in moves:
            here, there = (ids_on(memory.device, torch.tensor([block])) for block in (source, target))
            if kind == "copy":
                memory.copy_from(memory, here, there)
            elif kind == "out":
                self._host[target].copy_(flat(memory.gather(here))[0], non_blocking=True)
            else:
                block = self._host[source].to(memory.device, non_blocking=True).view(memory.dtype)
                memory.scatter(there, block.view(shape_of(self._pool.layout, 1)))
