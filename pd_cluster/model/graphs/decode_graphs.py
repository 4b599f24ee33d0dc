"""Runs decode steps as graphs: captured once for a padded number of sequences, then replayed on the same buffers.

At the start, graphs are captured as far as time allows; the others are captured when their size is first used. On some
devices graphs are captured only at the start, until the device refuses one, and steps of other sizes use a larger
graph. All graphs write logits to one shared buffer. Rows of padding have no context, and write to the pool's padding
block. The caller supplies the capturing function: see `streams.capture`.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pd_cluster.devices.device import is_out_of_memory
from pd_cluster.devices.device_streams import Marker, mark
from pd_cluster.errors import first_line, flag_of
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.inputs.step_input import Ints, StepInput
from pd_cluster.model.language_model.causal_lm import CausalLM, PlainCausalLM
from pd_cluster.model.lora.adapter_row_blocks import AdaptedBlocks, blocks_of, most_blocks

log = logging.getLogger(__name__)

# The smallest context length, in tokens, for which a graph's work is divided; the next is four times as large.
LEAST_BUCKET = 512
BUCKET_FACTOR = 4
SIZE_STEP = 8  # the distance between sizes, except that small sizes are powers of two
MAX_START_S = 5.0  # at the start, no other graph is captured after this time
MAX_ONLY_START_S = 120.0  # the limit in place of MAX_START_S if no graph can be captured later
NUM_STAGES = 2  # host buffers: one is filled while the device reads another

Run = Callable[[], torch.Tensor]
Capture = Callable[[Run], Callable[..., torch.Tensor]]  # returns `Replay`, which repeats the launches of Run


def sizes_of(given: Sequence[int], max_num_seqs: int) -> list[int]:
    """Returns the numbers of sequences for which graphs are captured, ascending, at most `max_num_seqs`.

    `given`: the value of `--graph-sizes`. Empty: 1, 2, 4, multiples of 8, and `max_num_seqs`. One number replaces
    `max_num_seqs` in this list. Several numbers are used as they are.
    """
    if len(given) > 1:
        return sorted({min(size, max_num_seqs) for size in given})
    most = min(max_num_seqs, given[0] if given else max_num_seqs)
    return sorted({size for size in (1, 2, 4, *range(SIZE_STEP, most, SIZE_STEP)) if size < most} | {most})


def bucket_of(context_len: int) -> int:
    """Returns the longest context length that uses the same graph as this one."""
    bucket = LEAST_BUCKET
    while bucket < context_len:
        bucket *= BUCKET_FACTOR
    return bucket


class _Parts(NamedTuple):
    """The places of a step's arrays in one buffer; all but the last have room for the largest step."""

    input_ids: slice
    rope_positions: slice
    slots: slice
    context_lens: slice
    table_starts: slice
    adapted_rows: slice
    adapted_blocks: slice
    blocks: slice

    @classmethod
    def of(cls, num_seqs: int, num_blocks: int, num_adapted_blocks: int = 0) -> _Parts:
        """Slices count int32 elements; an element of the first three arrays, which are int64, takes two."""
        adapted = [num_seqs, 3 * num_adapted_blocks] if num_adapted_blocks else [0, 0]
        starts = np.cumsum([0, *[2 * num_seqs] * 3, num_seqs, num_seqs + 1, *adapted, num_blocks]).tolist()
        return cls(*(slice(start, stop) for start, stop in itertools.pairwise(starts)))


class _Graph(NamedTuple):
    batch: ForwardBatch  # over buffers that are filled again for each step
    replay: Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class GraphRules:
    """For which steps graphs are captured, and when."""

    max_num_seqs: int
    longest: int  # longest context, in tokens
    sizes: Sequence[int] = ()  # see `sizes_of`
    is_for_any_context: bool = False  # one graph serves all context lengths
    is_alone: bool = True  # no other rank captures the same graphs, so this rank may skip some
    # Only `prepare` captures graphs, and a step uses the next larger size that was captured.
    only_at_start: bool = False


class DecodeGraphs:
    """`compute` returns the same as the runner's for steps that graphs support, and None for other steps."""

    def __init__(self, model: CausalLM, pool: KVPool, capture: Capture, rules: GraphRules, max_loras: int = 0) -> None:
        """`max_loras`: above 0, the graphs are for steps with 1 to `max_loras` adapters; 0: for steps without adapters.

        With transformers' modules, a capture that fails for another reason than memory is the last that is tried.
        """
        self._model, self._pool, self._capture, self._rules = model, pool, capture, rules
        self._sizes, longest = sizes_of(rules.sizes, rules.max_num_seqs), rules.longest
        max_num_seqs = self._sizes[-1]
        self._may_fail = isinstance(model, PlainCausalLM)
        self._is_over = False  # no more graphs are captured
        self._logits: torch.Tensor | None = None  # [most sequences, vocab_size]
        self._least_bucket = bucket_of(longest) if rules.is_for_any_context else LEAST_BUCKET
        self.captured: dict[tuple[int, int], _Graph] = {}
        self._max_loras = max_loras
        num_adapted = most_blocks(max_num_seqs, max_loras) if max_loras else 0
        self._parts = _Parts.of(max_num_seqs, max_num_seqs * pool.layout.num_blocks_for(longest), num_adapted)
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
        return len(self.captured)

    @property
    def _buckets(self) -> list[int]:
        """Returns the longest context length of each graph, ascending; the last graph supports any length."""
        found = [self._least_bucket]
        while found[-1] < self._rules.longest:
            found.append(found[-1] * BUCKET_FACTOR)
        return found

    def prepare(self, has_time: Callable[[], bool], agree: Callable[[bool], bool] = bool) -> None:
        """Captures graphs before they are needed, while there is time: short contexts first, and large sizes before
        small ones, so that small graphs use the memory of large ones.

        The captured steps write to the pool's first blocks, which must be free. If graphs are captured only here, the
        sizes are ordered so that they cover the range whenever time or the device ends the capture. `agree` returns
        whether all ranks that share the model have captured a graph.
        """
        sizes = spread_out(self._sizes) if self._rules.only_at_start else self._sizes[::-1]
        keys = [(size, bucket) for bucket in self._buckets for size in sizes]
        for size, bucket in keys:
            if self._is_over or not has_time():
                break
            step = _one_token_each(min(size, self._pool.num_blocks))
            self._put(step, size)
            lens = _padded(step.rows[:, 1] + 1, size)
            if self._rules.only_at_start:
                self._try(size, bucket, lens, agree)
            else:
                self._add(size, bucket, lens)
        log.info("captured %d of %d decode graphs at the start", self.num_captured, len(keys))

    def compute(self, step: StepInput, input_ids: torch.Tensor | None = None) -> torch.Tensor | None:
        """Returns logits [num_seqs, vocab_size], which the next call overwrites; None: the step must run eagerly.

        `input_ids` [num_seqs] int64, on the device, replace the step's own.
        """
        num_seqs = len(step.rows)
        if (
            num_seqs > self._sizes[-1]
            or (step.rows[:, [0, 3]] != 1).any()
            or step.rows[:, 5].any()
            or step.images
            or step.virtual is not None
            or (step.adapters is not None) != (self._max_loras > 0)
        ):
            return None
        context_len = int(step.rows[:, 1].max()) + 1
        if context_len > self._rules.longest or not has_one_row(step.rope_positions):
            return None
        bucket = max(self._least_bucket, bucket_of(context_len))
        sizes = self._sizes[bisect_left(self._sizes, num_seqs) :]
        if self._rules.only_at_start:
            sizes = [size for size in sizes if (size, bucket) in self.captured]
        if not sizes:
            return None
        size = sizes[0]
        key = size, bucket
        if key not in self.captured and self._is_over:
            return None
        self._put(step, size)
        if input_ids is not None:
            self._of(self._parts.input_ids, num_seqs, torch.int64).copy_(input_ids)
        lens = _padded(step.rows[:, 1] + 1, size)
        graph = self.captured.get(key) or self._add(*key, lens)
        if graph is None:
            return None
        graph.batch.replay_lens = lens
        if graph.batch.before_replay is not None:
            graph.batch.before_replay()
        if graph.batch.host_values is not None:
            return graph.replay(graph.batch.host_values(lens))[:num_seqs]
        return graph.replay()[:num_seqs]

    def _add(self, size: int, context_len: int, lens: Ints) -> _Graph | None:
        """Captures a graph for the step in the buffers, with lengths `lens`; returns None if that fails."""
        try:
            return self._captured(size, context_len, lens)
        except RuntimeError as error:
            is_full = is_out_of_memory(error)
            if not self._rules.is_alone or not (is_full or self._may_fail):
                raise
            self._is_over = True
            if not is_full:
                log.warning("decode steps run eagerly: their capture failed: %s", str(error).splitlines()[0])
                return None
            log.warning(
                "decode steps of other sizes run eagerly: no memory is left after %d graphs; lower %s or give fewer %s "
                "to save memory",
                *(self.num_captured, flag_of("gpu_memory_utilization"), flag_of("graph_sizes")),
            )
            return None

    def _try(self, size: int, context_len: int, lens: Ints, agree: Callable[[bool], bool]) -> None:
        """Captures a graph on all ranks or on none; after the first failure no more graphs are captured.

        Only a failed capture shows how many graphs a device can hold. One captured graph is then freed, so that there
        are streams and memory for later users, such as links.
        """
        why = "another rank has no room for more"
        try:
            self._captured(size, context_len, lens)
        except RuntimeError as error:
            why = first_line(error)
        if agree((size, context_len) in self.captured):
            return
        self._is_over = True
        self.captured.pop((size, context_len), None)
        if self.captured:
            self.captured.popitem()
        log.warning(
            "captured %d decode graphs, then stopped: %s; steps of other sizes use a larger graph or run eagerly; give "
            "fewer %s to avoid this",
            *(self.num_captured, why, flag_of("graph_sizes")),
        )

    def _captured(self, size: int, context_len: int, lens: Ints) -> _Graph:
        batch = self._batch(size, context_len)
        batch.replay_lens = lens
        replay = self._capture(lambda: self._kept(self._model(batch)))
        graph = self.captured[size, context_len] = _Graph(batch, replay)
        return graph

    def _kept(self, logits: torch.Tensor) -> torch.Tensor:
        """Copies logits to the buffer that all graphs share. Otherwise each graph would keep a buffer of its own."""
        if self._logits is None:  # in the run before the first capture, so that it is outside of the graphs' memory
            self._logits = logits.new_empty(self._sizes[-1], logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)

    def _put(self, step: StepInput, size: int) -> None:
        """Copies the step's arrays and the rows of padding to the device, all at once."""
        num_seqs, block_size = len(step.rows), self._pool.layout.block_size
        _, starts, nums_blocks, *_ = step.rows.T
        table_starts = np.zeros(size + 1, dtype=np.int64)
        np.cumsum(nums_blocks, out=table_starts[1 : num_seqs + 1])
        table_starts[num_seqs + 1 :] = table_starts[num_seqs]
        self._pool.check_blocks(step.blocks, int(table_starts[-1]))
        slots = (
            self._pool.num_blocks * block_size + np.arange(size) % block_size
        )  # all different, because some kernels require it
        slots[:num_seqs] = step.blocks[table_starts[:num_seqs] + starts // block_size] * block_size
        slots[:num_seqs] += starts % block_size
        self._copied[self._turn].wait()
        stage = self._stages[self._turn]
        host: npt.NDArray[np.int32] = stage.numpy()
        parts = self._parts
        for part, numbers in (
            (parts.input_ids, _padded(step.input_ids, size)),
            (parts.rope_positions, _padded(starts if step.rope_positions is None else step.rope_positions[0], size)),
            (parts.slots, slots),
        ):
            host[part][: 2 * size] = numbers.view(np.int32)
        host[parts.context_lens][:size] = _padded(starts + 1, size)
        host[parts.table_starts][: size + 1] = table_starts
        if self._max_loras:
            assert self._model.adapters is not None
            slots = np.zeros(0, dtype=np.int64) if step.adapters is None else step.adapters
            adapted_rows, adapted = blocks_of(slots, self._model.adapters.places.rows.places)
            host[parts.adapted_rows][: len(adapted_rows)] = adapted_rows
            host[parts.adapted_blocks] = 0
            host[parts.adapted_blocks][: adapted.size] = adapted.reshape(-1)
        host[parts.blocks][: len(step.blocks)] = step.blocks
        stop = parts.blocks.start + len(step.blocks)
        self._there[:stop].copy_(stage[:stop], non_blocking=True)
        self._copied[self._turn] = mark(self._pool.device)
        self._turn = (self._turn + 1) % NUM_STAGES

    def _batch(self, size: int, context_len: int) -> ForwardBatch:
        """Returns a batch over the buffers, with the work divided for contexts of this length. Valid while the buffers
        exist.
        """
        parts = self._parts
        return ForwardBatch(
            input_ids=self._of(parts.input_ids, size, torch.int64)[None],
            rope_positions=self._of(parts.rope_positions, size, torch.int64)[None],
            slot_mapping=self._of(parts.slots, size, torch.int64),
            sample_rows=self._rows[:size],
            query_starts=self._query_starts[: size + 1],
            context_lens=self._of(parts.context_lens, size),
            block_table=self._there[parts.blocks],
            table_starts=self._of(parts.table_starts, size + 1),
            query_lens=np.ones(size, dtype=np.int64),
            host_context_lens=np.full(size, context_len),
            pool=self._pool,
            adapted_rows=self._adapted(size) if self._max_loras else None,
        )

    def _adapted(self, size: int) -> AdaptedBlocks:
        """Returns the row blocks in the buffers, as many as a step of this size may have."""
        blocks = self._of(self._parts.adapted_blocks, 3 * most_blocks(size, self._max_loras))
        return AdaptedBlocks(self._of(self._parts.adapted_rows, size), blocks.view(-1, 3))

    def _of(self, part: slice, length: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return self._there[part].view(dtype)[:length]


def spread_out(sizes: Sequence[int]) -> list[int]:
    """Returns the ascending sizes in an order in which every prefix covers the range; the largest comes first."""
    found, gaps = [sizes[-1]], deque([(-1, len(sizes) - 1)])
    while gaps:
        below, above = gaps.popleft()
        middle = (below + above) // 2
        if middle > below:
            found.append(sizes[middle])
            gaps += [(middle, above), (below, middle)]
    return found


def has_one_row(rope_positions: Ints | None) -> bool:
    """Whether all rows are equal, as they are after a prompt; buffers have one position per token."""
    return rope_positions is None or bool((rope_positions == rope_positions[0]).all())


def _padded(numbers: Ints, size: int) -> Ints:
    """Pads with zeros to [size] int64."""
    found = np.zeros(size, dtype=np.int64)
    found[: len(numbers)] = numbers
    return found


def _one_token_each(num_seqs: int) -> StepInput:
    """Returns a step in which each sequence computes its first token, in its own block."""
    rows = np.tile(np.array([1, 0, 1, 1, 1, 0], dtype=np.int64), (num_seqs, 1))
    return StepInput(rows, np.zeros(num_seqs, dtype=np.int64), np.arange(num_seqs, dtype=np.int64))
