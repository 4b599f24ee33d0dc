"""Decode steps as graphs: captured once for a padded number of sequences, then replayed on the same buffers.

A graph is captured when its size is first wanted, so that no start waits for it. Rows of padding have no context, and
write to the pool's block for padding. Who captures comes from outside: see `streams.capture`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pd_cluster.kv.pool import KVPool
from pd_cluster.model.batch import ForwardBatch, Ints, StepInput
from pd_cluster.model.causal_lm import CausalLM
from pd_cluster.streams import Marker, mark

log = logging.getLogger(__name__)

LEAST_BUCKET = 512  # tokens of the longest context that a graph's work is divided for; the next has four times as many
BUCKET_FACTOR = 4
SIZE_STEP = 8  # between sizes; below it they are powers of two
NUM_STAGES = 2  # of host memory: one is filled while the device reads the other

Run = Callable[[], torch.Tensor]
Capture = Callable[[Run], Callable[..., torch.Tensor]]  # what the one launches, the other launches again: `Replay`


def padded_size(num_seqs: int, most: int) -> int:
    """1, 2, 4, 8, then multiples of 8; at most `most`."""
    size = 1 << (num_seqs - 1).bit_length() if num_seqs <= SIZE_STEP else -(-num_seqs // SIZE_STEP) * SIZE_STEP
    return min(size, most)


def bucket_of(context_len: int) -> int:
    """The longest context that is served by the graph that serves this one."""
    bucket = LEAST_BUCKET
    while bucket < context_len:
        bucket *= BUCKET_FACTOR
    return bucket


class _Parts(NamedTuple):
    """A step's numbers, side by side in one piece of memory; all but the last have room for the largest step."""

    input_ids: slice
    positions: slice
    slots: slice
    context_lens: slice
    table_starts: slice
    blocks: slice

    @classmethod
    def of(cls, num_seqs: int, num_blocks: int) -> _Parts:
        """Counted in int32; the first three are int64."""
        starts = np.cumsum([0, *[2 * num_seqs] * 3, num_seqs, num_seqs + 1, num_blocks]).tolist()
        return cls(*(slice(start, stop) for start, stop in itertools.pairwise(starts)))


class _Graph(NamedTuple):
    batch: ForwardBatch  # over buffers that each step fills anew
    replay: Callable[..., torch.Tensor]


class DecodeGraphs:
    """`compute` is what the runner's is, for those steps that it can do; it returns None for the others."""

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        max_num_seqs: int,
        longest: int,
        capture: Capture,
        max_graphs: int | None = None,
        is_for_any_context: bool = False,
    ) -> None:
        """`longest`: of the contexts, in tokens. `max_graphs`: what the device has room for.

        `is_for_any_context`: its work is not divided by its length.
        """
        self._model, self._pool, self._capture = model, pool, capture
        self._most, self._longest = max_num_seqs, longest
        self._max_graphs = max_graphs
        self._least_bucket = bucket_of(longest) if is_for_any_context else LEAST_BUCKET
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._parts = _Parts.of(max_num_seqs, max_num_seqs * pool.layout.num_blocks_for(longest))
        device = pool.memory.device
        pinned = pool.device.is_accelerator
        length = self._parts.blocks.stop
        self._stages = [torch.zeros(length, dtype=torch.int32, pin_memory=pinned) for _ in range(NUM_STAGES)]
        self._copied: list[Marker] = [mark(pool.device)] * NUM_STAGES
        self._turn = 0
        self._there = torch.zeros(length, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_num_seqs + 1, device=device)
        self._query_starts = self._rows.int()

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    @property
    def _is_full(self) -> bool:
        return self._max_graphs is not None and len(self._graphs) >= self._max_graphs

    def compute(self, step: StepInput, input_ids: torch.Tensor | None = None) -> torch.Tensor | None:
        """Logits [num_seqs, vocab_size], which the next call overwrites.

        `input_ids` [num_seqs] int64, on the device, take the place of the step's own.
        """
        num_seqs = len(step.rows)
        if num_seqs > self._most or (step.rows[:, [0, 3]] != 1).any():
            return None
        context_len = int(step.rows[:, 1].max()) + 1
        if context_len > self._longest:
            return None
        size = padded_size(num_seqs, self._most)
        key = size, max(self._least_bucket, bucket_of(context_len))
        if key not in self._graphs and self._is_full:
            return None
        self._put(step, size)
        if input_ids is not None:
            self._of(self._parts.input_ids, num_seqs, torch.int64).copy_(input_ids)
        lens = _padded(step.rows[:, 1] + 1, size)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._captured(*key, lens)
        graph.batch.replay_lens = lens
        if graph.batch.before_replay is not None:
            graph.batch.before_replay()
        if graph.batch.host_values is not None:
            return graph.replay(graph.batch.host_values(lens))[:num_seqs]
        return graph.replay()[:num_seqs]

    def _captured(self, size: int, context_len: int, lens: Ints) -> _Graph:
        """`lens`: of the step that is in the buffers, with which it is captured."""
        batch = self._batch(size, context_len)
        batch.replay_lens = lens
        if len(self._graphs) + 1 == self._max_graphs:
            log.warning("decode steps of further sizes run eagerly: the device holds %d graphs", self._max_graphs)
        return _Graph(batch, self._capture(lambda: self._model(batch)))

    def _put(self, step: StepInput, size: int) -> None:
        """The step's numbers, and those of rows of padding, to the device in one copy."""
        num_seqs, block_size = len(step.rows), self._pool.layout.block_size
        _, starts, nums_blocks, *_ = step.rows.T
        table_starts = np.zeros(size + 1, dtype=np.int64)
        np.cumsum(nums_blocks, out=table_starts[1 : num_seqs + 1])
        table_starts[num_seqs + 1 :] = table_starts[num_seqs]
        self._pool.check_blocks(step.blocks, int(table_starts[-1]))
        slots = (
            self._pool.num_blocks * block_size + np.arange(size) % block_size
        )  # each its own: some kernels want that
        slots[:num_seqs] = step.blocks[table_starts[:num_seqs] + starts // block_size] * block_size
        slots[:num_seqs] += starts % block_size
        self._copied[self._turn].wait()
        stage = self._stages[self._turn]
        host: npt.NDArray[np.int32] = stage.numpy()
        parts = self._parts
        for part, numbers in (
            (parts.input_ids, _padded(step.input_ids, size)),
            (parts.positions, _padded(starts, size)),
            (parts.slots, slots),
        ):
            host[part][: 2 * size] = numbers.view(np.int32)
        host[parts.context_lens][:size] = _padded(starts + 1, size)
        host[parts.table_starts][: size + 1] = table_starts
        host[parts.blocks][: len(step.blocks)] = step.blocks
        stop = parts.blocks.start + len(step.blocks)
        self._there[:stop].copy_(stage[:stop], non_blocking=True)
        self._copied[self._turn] = mark(self._pool.device)
        self._turn = (self._turn + 1) % NUM_STAGES

    def _batch(self, size: int, context_len: int) -> ForwardBatch:
        """Over the buffers, as long as they live; its work is divided for contexts of that length."""
        parts = self._parts
        return ForwardBatch(
            input_ids=self._of(parts.input_ids, size, torch.int64)[None],
            positions=self._of(parts.positions, size, torch.int64)[None],
            slot_mapping=self._of(parts.slots, size, torch.int64),
            sample_rows=self._rows[:size],
            query_starts=self._query_starts[: size + 1],
            context_lens=self._of(parts.context_lens, size),
            block_table=self._there[parts.blocks],
            table_starts=self._of(parts.table_starts, size + 1),
            query_lens=np.ones(size, dtype=np.int64),
            host_context_lens=np.full(size, context_len),
            pool=self._pool,
        )

    def _of(self, part: slice, length: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return self._there[part].view(dtype)[:length]


def _padded(numbers: Ints, size: int) -> Ints:
    """[size] int64: zeros behind."""
    found = np.zeros(size, dtype=np.int64)
    found[: len(numbers)] = numbers
    return found
