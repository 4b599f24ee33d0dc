"""Makes the pools of `kv`, decides the order of their blocks, and measures this machine's limits with them.

The limits are one thread's copy between two mappings, and plain gloo between two processes.
"""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from benchmarks.kv.kv_messages import HOST, RUN_BLOCKS, Answer, Gloo, Move, OpenGloo
from pd_cluster.devices.device import CPU, Device
from pd_cluster.engine.link_probe.probe_links import LAYOUT
from pd_cluster.errors import LinkError
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.pool_memory import paired_runs

DEADLINE_S = 30.0
NUM_UNDER_WAY = 2


def make_pool(num_blocks: int, of_numbers: bool, device: Device = CPU) -> KVPool:
    """Makes a pool and maps all its pages. `of_numbers`: whether block b is filled with the number b."""
    pool = KVPool(LAYOUT, num_blocks, device)
    blocks = pool.flat()[:num_blocks].view(torch.int16)
    for block in range(num_blocks):
        blocks[block] = block if of_numbers else -1
    return pool


class FreeBlocks:
    """Returns blocks in consecutive runs. The runs have a seeded order; blocks released first are used first."""

    def __init__(self, num_blocks: int, seed: int, run: int = RUN_BLOCKS) -> None:
        order = torch.randperm(num_blocks // run, generator=torch.Generator().manual_seed(seed)).tolist()
        self._free = deque(at * run + i for at in order for i in range(run))

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise LinkError(f"{count} blocks are wanted and {len(self._free)} are free")
        return [self._free.popleft() for _ in range(count)]

    def release(self, blocks: list[int]) -> None:
        self._free.extend(blocks)


def memcpy(source: KVPool, target: KVPool, free: tuple[FreeBlocks, FreeBlocks], move: Move) -> Answer:
    """Copies the blocks that `move` would transfer, in the same runs."""
    torch.set_num_threads(1)
    took_s = 0.0
    for _ in range(move.count):
        tables = free[0].take(move.num_blocks), free[1].take(move.num_blocks)
        runs = paired_runs(*tables)
        start_s = time.monotonic()
        for first, start, count in runs:
            target.data[start : start + count].copy_(source.data[first : first + count])
        took_s += time.monotonic() - start_s
        for each, table in zip(free, tables, strict=True):
            each.release(table)
    return Answer(took_s=took_s)


class GlooPeer:
    """Two ranks without links. Rank 0 sends from its pool; rank 1 receives into as many buffers as are in use."""

    def __init__(self, pool: KVPool, rank: int) -> None:
        self._bytes = pool.flat()[: pool.num_blocks].view(-1)
        self._rank = rank
        self._store: TCPStore | None = None
        self._group: Any = None

    def open(self, command: OpenGloo) -> Answer:
        timeout = timedelta(seconds=DEADLINE_S)
        if self._rank == 0 and not command.port:
            self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timeout)
            return Answer(port=self._store.port)
        store = self._store or TCPStore(HOST, command.port, is_master=False, timeout=timeout)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = timeout
        self._group = ProcessGroupGloo(PrefixStore("bench", store), self._rank, 2, options)
        return Answer()

    def move(self, command: Gloo) -> Answer:
        """Begins with a small message in each direction. The time ends when the last block is acknowledged."""
        size, count = command.payload_nbytes, command.nbytes // command.payload_nbytes
        if self._rank == 0:
            most = len(self._bytes) // size
            buffers = [self._bytes[at % most * size : (at % most + 1) * size] for at in range(count)]
        else:
            made = [torch.zeros(size, dtype=torch.uint8) for _ in range(NUM_UNDER_WAY)]
            buffers = [made[at % NUM_UNDER_WAY] for at in range(count)]
        self._meet()
        start_s = time.monotonic()
        under_way: deque[Any] = deque()
        for tag, buffer in enumerate(buffers):
            if len(under_way) == NUM_UNDER_WAY:
                under_way.popleft().wait(timedelta(seconds=DEADLINE_S))
            begin = self._group.send if self._rank == 0 else self._group.recv
            under_way.append(begin([buffer], 1 - self._rank, tag))
        for work in under_way:
            work.wait(timedelta(seconds=DEADLINE_S))
        self._meet()
        return Answer(took_s=time.monotonic() - start_s)

    def _meet(self) -> None:
        note = torch.zeros(1, dtype=torch.uint8)
        for sender in (1, 0):
            begin = self._group.send if self._rank == sender else self._group.recv
            begin([note], 1 - self._rank, 1 << 20).wait(timedelta(seconds=DEADLINE_S))
