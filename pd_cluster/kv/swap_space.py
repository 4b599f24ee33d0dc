"""Host memory for the blocks of preempted requests, and the copying of blocks. Knows nothing of requests."""

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
    """Describes swap space of that many bytes, and the bytes that were pinned on the host for it."""
    return f"swap space: {nbytes / GIB:.2f} GiB of blocks, {pinned / GIB:.2f} GiB of host memory pinned for them"


class SwapSpace:
    """`num_blocks` blocks in host memory next to a pool; unused blocks take no memory."""

    def __init__(self, pool: KVPool, num_blocks: int, num_kept: int = 0) -> None:
        """`num_kept`: further blocks after the `num_blocks`, for the host's cache (kv/host_tier.py)."""
        self.num_blocks = num_blocks
        self.num_kept = num_kept
        self._pool = pool
        # Pinned only if a device copies: pinning allocates all the memory at once.
        num_blocks += num_kept
        pinned = pool.device.is_accelerator and num_blocks > 0
        before = pinned_nbytes(pool.device) if pinned else None
        self._host = torch.empty(num_blocks, pool.layout.block_nbytes, dtype=torch.uint8, pin_memory=pinned)
        if before is not None:
            taken = (pinned_nbytes(pool.device) or 0) - before
            log.info(swap_text(self._host.nbytes, taken))

    def bytes_of(self, block: int) -> memoryview:
        """Returns the memory of a block in host memory."""
        return self._host[block].numpy().data

    def vacate(self) -> None:
        """Returns the memory to the system, on CPU, while no block is in use; the content is then undefined."""
        give_pages_back(self._host.data_ptr(), self._host.nbytes)

    def move(self, moves: Sequence[tuple[Move, int, int]]) -> None:
        """Copies or clears blocks (kind, source, target) as if in sequence: in the pool, to the host or from it.

        Successive moves of one kind are one call, unless a move needs the result of an earlier move or overwrites its
        source.
        """
        for kind, group in itertools.groupby(moves, key=lambda move: move[0]):
            pairs: list[tuple[int, int]] = []
            targets: set[int] = set()
            used: set[int] = set()  # the targets' blocks so far
            for _, source, target in group:
                if target in used or (kind == "copy" and source in targets):
                    self._pool.memory.move(kind, pairs, self._host)
                    pairs, targets, used = [], set(), set()
                pairs.append((source, target))
                targets.add(target)
                used |= {source, target} if kind == "copy" else {target}
            self._pool.memory.move(kind, pairs, self._host)
