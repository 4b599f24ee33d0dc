"""Host memory for the blocks of preempted requests; copies blocks to and from it. Knows nothing of requests."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import torch

from pd_cluster.devices.device import pinned_nbytes
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.pool_memory import Move
from pd_cluster.native.malloc_settings import give_pages_back

log = logging.getLogger(__name__)
GIB = 1 << 30


def swap_text(nbytes: int, pinned: int) -> str:
    """Describes swap space of `nbytes` bytes for which `pinned` bytes were pinned on the host."""
    return f"swap space: {nbytes / GIB:.2f} GiB of blocks, {pinned / GIB:.2f} GiB of host memory pinned for them"


class SwapSpace:
    """`num_blocks` blocks in host memory that belong to a pool. Unused blocks take no memory unless they are pinned."""

    def __init__(self, pool: KVPool, num_blocks: int, num_kept: int = 0) -> None:
        """`num_kept`: further blocks after the first `num_blocks`, for the cache in host memory (kv/host_tier.py)."""
        self.num_blocks = num_blocks
        self.num_kept = num_kept
        self._pool = pool
        # The memory is pinned only if a device copies, because pinning allocates all of it at once.
        num_blocks += num_kept
        pinned = pool.device.is_accelerator and num_blocks > 0
        before = pinned_nbytes(pool.device) if pinned else None
        self._host = torch.empty(num_blocks, pool.layout.block_nbytes, dtype=torch.uint8, pin_memory=pinned)
        if before is not None:
            taken = (pinned_nbytes(pool.device) or 0) - before
            log.info(swap_text(self._host.nbytes, taken))

    def bytes_of(self, block: int) -> memoryview:
        """Returns the bytes of a block in host memory."""
        return self._host[block].numpy().data

    def vacate(self) -> None:
        """Returns the memory to the system. CPU only; no block may be in use. Afterwards the content is undefined."""
        give_pages_back(self._host.data_ptr(), self._host.nbytes)

    def move(self, moves: Sequence[tuple[Move, int, int]]) -> None:
        """Copies or clears blocks (kind, source, target), in the pool, to or from the host, as if one after another.

        Successive moves of one kind take one call, unless a move needs the result of an earlier one or overwrites its
        source.
        """
        for kind, group in itertools.groupby(moves, key=lambda move: move[0]):
            pairs: list[tuple[int, int]] = []
            targets: set[int] = set()
            used: set[int] = set()  # blocks that no further move of the call may write
            for _, source, target in group:
                if target in used or (kind == "copy" and source in targets):
                    self._pool.memory.move(kind, pairs, self._host)
                    pairs, targets, used = [], set(), set()
                pairs.append((source, target))
                targets.add(target)
                used |= {source, target} if kind == "copy" else {target}
            self._pool.memory.move(kind, pairs, self._host)
