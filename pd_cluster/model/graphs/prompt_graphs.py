"""Runs small steps that compute prompts as graphs, together with sequences that decode.

A graph is for a padded number of tokens and of sequences. The attention's grid has the largest number of tiles that
this many tokens can need. Buffers list the tiles of each step; padding tiles belong to a sequence without tokens. At
the start, graphs are captured as far as time allows; the others are captured when their size is first used. The caller
defines how attention divides its work: see `AttentionPlanner`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pd_cluster.devices.device_streams import Marker, mark
from pd_cluster.errors import first_line
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.graphs.decode_graphs import NUM_STAGES, Capture, GraphRules, has_one_row
from pd_cluster.model.inputs.forward_batch import ForwardBatch, OnLayer, step_numbers
from pd_cluster.model.inputs.step_input import StepInput
from pd_cluster.model.language_model.causal_lm import CausalLM

log = logging.getLogger(__name__)

TOKENS = (64, 128, 256, 512)  # tokens per graph; steps have fewer, because one row is for results of padding
SEQS = (4, 16, 64)
Ids = npt.NDArray[np.int32]


class AttentionPlanner(Protocol):
    """Divides the attention's work for steps of a given size; see `PaddedPlanner`."""

    def num_tiles(self, size: GraphSize) -> int: ...

    def items(self, query_lens: Any, context_lens: Any, size: GraphSize) -> tuple[Ids, Ids]:
        """Returns a step's decoding sequences, [num_seqs], and its tiles, [num_tiles, 2], both padded."""

    def install(
        self, batch: ForwardBatch, size: GraphSize, longest: int, decode_seqs: torch.Tensor, tiles: torch.Tensor
    ) -> None:
        """Makes the attention of this batch read its work from the two buffers."""


class GraphSize(NamedTuple):
    num_tokens: int
    num_seqs: int


class _PromptParts(NamedTuple):
    """The places of a step's arrays in one buffer, with room for the largest step."""

    input_ids: slice
    rope_positions: slice
    slot_mapping: slice
    sample_rows: slice
    query_starts: slice
    context_lens: slice
    table_starts: slice
    decode_seqs: slice
    tiles: slice
    block_table: slice

    @classmethod
    def of(cls, size: GraphSize, num_tiles: int, num_blocks: int) -> _PromptParts:
        """Slices count int32 elements; an element of the first four arrays, which are int64, takes two.

        There is room for one more sequence, which has no tokens: padding refers to it.
        """
        num_tokens, num_seqs = size
        lengths = [*[2 * num_tokens] * 3, 2 * num_seqs, num_seqs + 2, num_seqs + 1, num_seqs + 2, num_seqs]
        starts = np.cumsum([0, *lengths, 2 * num_tiles, num_blocks]).tolist()
        return cls(*(slice(start, stop) for start, stop in itertools.pairwise(starts)))


class PromptGraphs:
    """`compute` returns the same as the runner's for steps that graphs support, and None for other steps."""

    def __init__(
        self, model: CausalLM, pool: KVPool, capture: Capture, rules: GraphRules, planner: AttentionPlanner
    ) -> None:
        """`rules`: its `sizes` are for decode steps and not used here. Graphs may also be captured later: each when its
        size is first used.
        """
        self._model, self._pool, self._capture, self._planner = model, pool, capture, planner
        self._rules, self._is_over = rules, False
        self._sizes = sizes_up_to(rules.max_num_seqs)
        most = self._sizes[-1]
        self.captured: dict[GraphSize, Callable[..., torch.Tensor]] = {}
        self._logits: torch.Tensor | None = None  # [most sequences, vocab_size]
        num_blocks = most.num_seqs * pool.layout.num_blocks_for(rules.longest)
        self._parts = _PromptParts.of(most, planner.num_tiles(most), num_blocks)
        length, pinned = self._parts.block_table.stop, pool.device.is_accelerator
        self._stages = [torch.zeros(length, dtype=torch.int32, pin_memory=pinned) for _ in range(NUM_STAGES)]
        self._copied: list[Marker] = [mark(pool.device)] * NUM_STAGES
        self._turn = 0
        self._there = torch.zeros(length, dtype=torch.int32, device=pool.memory.device)

    @property
    def num_captured(self) -> int:
        return len(self.captured)

    def prepare(self, has_time: Callable[[], bool]) -> None:
        """Captures graphs before they are needed: the largest first, because the others use its memory.

        The captured steps write to the pool's first blocks, which must be free.
        """
        for size in reversed(self._sizes):
            if self._is_over or not has_time():
                break
            block_size = self._pool.layout.block_size
            num_tokens = min(size.num_tokens - 1, self._rules.longest, self._pool.num_blocks * block_size)
            rows = np.array([[num_tokens, 0, -(-num_tokens // block_size), 1, num_tokens, 0]], dtype=np.int64)
            step = StepInput(rows, np.zeros(num_tokens, dtype=np.int64), np.arange(rows[0, 2]))
            self._put(step, size)
            self._add(size)
        log.info("captured %d of %d graphs of steps with prompts at the start", self.num_captured, len(self._sizes))

    def compute(
        self, step: StepInput, input_ids: torch.Tensor | None = None, on_layer: OnLayer | None = None
    ) -> torch.Tensor | None:
        """Returns logits [num_samples, vocab_size], which the next call overwrites; None: the step must run eagerly.

        `input_ids` [num_tokens] int64, on the device, replace the step's own. `on_layer` is called for all layers,
        after the replay.
        """
        size = self._size_of(step)
        if size is None or (self._is_over and size not in self.captured):
            return None
        self._put(step, size)
        if input_ids is not None:
            self._of("input_ids", len(input_ids), torch.int64).copy_(input_ids)
        replay = self.captured.get(size) or self._add(size)
        if replay is None:
            return None
        logits = replay()[: int(step.rows[:, 3].sum())]
        for layer_idx in range(self._pool.layout.num_model_layers if on_layer is not None else 0):
            assert on_layer is not None
            on_layer(layer_idx + 1)
        return logits

    def _size_of(self, step: StepInput) -> GraphSize | None:
        """Returns the smallest size that fits the step; None if no graph supports it."""
        lens, starts, _, counts, _, nums_hidden = step.rows.T
        if counts.max() > 1 or nums_hidden.any() or (lens == 1).all():
            return None
        if step.images or step.virtual is not None or step.adapters is not None or not has_one_row(step.rope_positions):
            return None
        if int((starts + lens).max()) > self._rules.longest:
            return None
        fitting = (size for size in self._sizes if size.num_tokens > lens.sum() and size.num_seqs >= len(lens))
        return next(fitting, None)

    def _add(self, size: GraphSize) -> Callable[..., torch.Tensor] | None:
        """Captures a graph for the step in the buffers; returns None if the capture fails."""
        batch = self._batch(size)
        try:
            self.captured[size] = self._capture(lambda: self._kept(self._model(batch)))
        except RuntimeError as error:
            if not self._rules.is_alone:
                raise
            self._is_over = True
            log.warning(
                "other steps with prompts run eagerly (graphs captured: %d): %s",
                *(self.num_captured, first_line(error)),
            )
        return self.captured.get(size)

    def _kept(self, logits: torch.Tensor) -> torch.Tensor:
        """Copies logits to the buffer that all graphs share; see `DecodeGraphs`."""
        if self._logits is None:  # in the run before the first capture
            self._logits = logits.new_empty(self._sizes[-1].num_seqs, logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)

    def _put(self, step: StepInput, size: GraphSize) -> None:
        """Copies the step's arrays and padding to the device, all at once."""
        num_tokens, num_seqs = size
        numbers = step_numbers(step, self._pool)
        lens, starts = step.rows[:, 0], step.rows[:, 1]
        decode_seqs, tiles = self._planner.items(lens, starts + lens, size)
        first_of_padding = self._pool.num_blocks * self._pool.layout.block_size
        self._copied[self._turn].wait()
        stage = self._stages[self._turn]
        host: Ids = stage.numpy()
        for name, length, filler in (
            ("input_ids", num_tokens, 0),
            ("rope_positions", num_tokens, 0),
            ("slot_mapping", num_tokens, first_of_padding),
            ("sample_rows", num_seqs, 0),
            ("query_starts", num_seqs + 2, int(lens.sum())),
            ("context_lens", num_seqs + 1, 0),
            ("table_starts", num_seqs + 2, len(step.blocks)),
        ):
            given = numbers[name].reshape(-1)
            if name == "rope_positions" and step.rope_positions is not None:
                given = np.ascontiguousarray(step.rope_positions[0])
            padded = np.full(length, filler, dtype=given.dtype)
            padded[: len(given)] = given
            part: slice = getattr(self._parts, name)
            host[part][: padded.nbytes // 4] = padded.view(np.int32)
        host[self._parts.decode_seqs][:num_seqs] = decode_seqs
        host[self._parts.tiles][: tiles.size] = tiles.reshape(-1)
        host[self._parts.block_table][: len(step.blocks)] = step.blocks
        stop = self._parts.block_table.start + len(step.blocks)
        self._there[:stop].copy_(stage[:stop], non_blocking=True)
        self._copied[self._turn] = mark(self._pool.device)
        self._turn = (self._turn + 1) % NUM_STAGES

    def _batch(self, size: GraphSize) -> ForwardBatch:
        """Returns a batch over the buffers."""
        num_tokens, num_seqs = size
        batch = ForwardBatch(
            input_ids=self._of("input_ids", num_tokens, torch.int64)[None],
            rope_positions=self._of("rope_positions", num_tokens, torch.int64)[None],
            slot_mapping=self._of("slot_mapping", num_tokens, torch.int64),
            sample_rows=self._of("sample_rows", num_seqs, torch.int64),
            query_starts=self._of("query_starts", num_seqs + 2),
            context_lens=self._of("context_lens", num_seqs + 1),
            block_table=self._there[self._parts.block_table],
            table_starts=self._of("table_starts", num_seqs + 2),
            query_lens=np.zeros(num_seqs + 1, dtype=np.int64),  # zeros: kernels must not use lengths on the host
            host_context_lens=np.zeros(num_seqs + 1, dtype=np.int64),
            pool=self._pool,
        )
        tiles = self._of("tiles", 2 * self._planner.num_tiles(size)).view(-1, 2)
        self._planner.install(batch, size, self._rules.longest, self._of("decode_seqs", num_seqs), tiles)
        return batch

    def _of(self, name: str, length: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        part: slice = getattr(self._parts, name)
        return self._there[part].view(dtype)[:length]


def sizes_up_to(max_num_seqs: int) -> list[GraphSize]:
    """Returns the sizes of graphs, in the order in which a step tries them."""
    seqs = sorted({min(num_seqs, max_num_seqs) for num_seqs in SEQS})
    return [GraphSize(num_tokens, num_seqs) for num_tokens in TOKENS for num_seqs in seqs]
