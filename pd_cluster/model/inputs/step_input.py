"""The arrays of one step that every rank needs. Does not know how the tokens were chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pd_cluster.model.inputs.image_rows import ImagePart, image_parts
from pd_cluster.model.inputs.kept_tables import LEAST_BLOCKS, kept_blocks
from pd_cluster.model.inputs.virtual_token_rows import virtual_parts
from pd_cluster.types import Request, StateCopy
from pd_cluster.types.variants import lora_of

Ints = npt.NDArray[np.int64]
Drafts = Mapping[Request, Sequence[int]]  # draft tokens that follow a chunk of one token
NO_DRAFTS: Drafts = MappingProxyType({})
NUM_COLUMNS = 6  # columns of StepInput.rows
KEEP_COLUMNS = 3  # columns of StepInput.keeps
ONE_BLOCK = 0  # passed as the tokens per block of a group of states: each sequence has one block


class AdapterSlots(NamedTuple):
    """Slots of LoRA adapters and of prompt adapters, by the requests' variants; None: not supported by this engine."""

    lora: dict[str, int] | None = None
    prompt: dict[str, int] | None = None


class GroupTables(NamedTuple):
    """The sequences' blocks in one group of layers."""

    nums_blocks: Ints  # [num_seqs]
    blocks: Ints  # [sum of blocks]


NO_SLOTS = AdapterSlots()


@dataclass(frozen=True, slots=True)
class StepInput:
    """The arrays of a step that every rank needs. `rows[i]` describes sequence i; tokens are in the sequences' order.

    `rows`, [num_seqs, NUM_COLUMNS] int64: tokens to compute, tokens computed before, blocks, rows with requested
    logits, the request's maximum length in tokens, and rows with requested final hidden states. The requested rows are
    always the last rows of the sequence.
    """

    rows: Ints
    input_ids: Ints  # [num_tokens]
    blocks: Ints  # [sum of blocks]
    rope_positions: Ints | None = None  # [1 or 3, num_tokens]; None: each token's index in its sequence
    adapters: Ints | None = None  # [num_seqs]: slots (model/lora); None: no sequence has an adapter
    images: tuple[ImagePart, ...] = ()
    virtual: Ints | None = (
        None  # [num_parts, 4], see model/inputs/virtual_token_rows.py; None: no token is a virtual token
    )
    # [num_seqs]: sequences with the same leader share a block table; None: no sequences share one.
    leaders: Ints | None = None
    num_again: int = 0  # the last `num_again` sequences recompute one token each, whose keys and values are discarded
    further: tuple[GroupTables, ...] = ()  # the tables of groups 1 and up; `rows` and `blocks` have those of group 0
    # [n, KEEP_COLUMNS], sorted: the index of a sequence, its tokens before its state is copied, the copy's block.
    keeps: Ints | None = None


class _Blocks:
    """The block tables of a step's sequences in one group of layers, concatenated."""

    def __init__(self, group: int) -> None:
        self._group, self._parts, self._last = group, list[Ints](), list[int]()

    def add(self, request: Request, first: int, num_blocks: int) -> None:
        """Adds the first blocks of a request's table. `first`: the first block that the step may write."""
        if num_blocks < LEAST_BLOCKS:
            self._last += request.tables[self._group][:num_blocks]
            return
        if self._last:
            self._parts.append(np.array(self._last, dtype=np.int64))
            self._last = []
        self._parts.append(kept_blocks(request, self._group, first, num_blocks))

    def array(self) -> Ints:
        last = np.array(self._last, dtype=np.int64)
        return np.concatenate([*self._parts, last]) if self._parts else last


class RowCollector:
    """Collects the sequences of a step; each computes tokens from some index on.

    `further`: the tokens per block in groups 1 and up; see ONE_BLOCK.
    """

    def __init__(self, block_size: int, further: Sequence[int] = ()) -> None:
        self.requests: list[Request] = []
        self.rows: list[tuple[int, ...]] = []
        self._block_size = block_size
        self._input_ids: list[int] = []
        self._blocks = _Blocks(0)
        self._further = [(size, list[int](), _Blocks(group)) for group, size in enumerate(further, start=1)]

    def add(
        self, request: Request, start: int, token_ids: Sequence[int], num_logit_rows: int = 0, num_hidden_rows: int = 0
    ) -> None:
        stop = start + len(token_ids)
        num_blocks = -(-stop // self._block_size)
        self.requests.append(request)
        self.rows.append((len(token_ids), start, num_blocks, num_logit_rows, request.most_tokens, num_hidden_rows))
        self._input_ids += token_ids
        self._blocks.add(request, start // self._block_size, num_blocks)
        for size, nums_blocks, blocks in self._further:
            num_blocks = 1 if size == ONE_BLOCK else -(-stop // size)
            nums_blocks.append(num_blocks)
            blocks.add(request, start // (size or 1), num_blocks)

    def arrays(self) -> tuple[Ints, Ints, Ints]:
        """Returns `rows`, `input_ids` and `blocks` of a StepInput."""
        rows, input_ids = (np.array(each, dtype=np.int64) for each in (self.rows, self._input_ids))
        return rows, input_ids, self._blocks.array()

    def further(self) -> tuple[GroupTables, ...]:
        """Returns `further` of a StepInput."""
        return tuple(GroupTables(np.array(nums, dtype=np.int64), blocks.array()) for _, nums, blocks in self._further)

    def step(self) -> StepInput:
        """Returns a step of text tokens, without adapters."""
        return StepInput(*self.arrays())


def step_input(
    chunks: Sequence[tuple[Request, int]],
    block_size: int,
    slots: AdapterSlots = NO_SLOTS,
    drafts: Drafts = NO_DRAFTS,
    again: Sequence[Request] = (),
    further: Sequence[int] = (),
) -> StepInput:
    """Collects tokens [num_computed, num_computed + n) of every (request, n), n > 0, followed by all drafts.

    Each draft token is a sequence of its own, which shares the blocks of its request. It is never part of a longer
    chunk, so its results equal those of a separate step. All keys of a step are written before any are read.

    Last come the tokens before the chunks of the requests in `again`, one each. They are computed once more, without
    writing keys and values, because a draft head needs their hidden states. `further`: see RowCollector.

    A token that only the device has, after the last one that the host has, gets the input id 0.
    """
    rows = RowCollector(block_size, further)
    for request, num_tokens in chunks:
        start = request.num_computed_tokens
        stop = start + num_tokens
        token_ids = request.token_ids(start, stop) if stop <= request.num_tokens else [0]
        rows.add(request, start, token_ids, request.num_logit_rows(num_tokens), request.num_hidden_rows(num_tokens))
    leaders = [*range(len(chunks))]
    for at, (request, _) in enumerate(chunks if drafts else ()):
        for start, token_id in enumerate(drafts.get(request, ()), request.num_computed_tokens + 1):
            rows.add(request, start, [token_id], 1)
            leaders.append(at)
    for request in again:
        start = request.num_computed_tokens - 1
        rows.add(request, start, request.token_ids(start, start + 1))
        leaders.append(len(leaders))
    return StepInput(
        *rows.arrays(),
        _rope_positions(rows.requests, rows.rows),
        None if slots.lora is None else _adapters([request.order.variant for request in rows.requests], slots.lora),
        image_parts(chunks),
        None if slots.prompt is None else virtual_parts(chunks, slots.prompt),
        np.array(leaders, dtype=np.int64) if drafts else None,
        len(again),
        rows.further() if further else (),
    )


def keeps_of(chunks: Sequence[tuple[Request, int]], keeps: Sequence[StateCopy]) -> Ints | None:
    """Returns `keeps` of a StepInput with these chunks."""
    if not keeps:
        return None
    places = {request: at for at, (request, _) in enumerate(chunks)}
    return np.array(sorted((places[request], *where) for request, *where in keeps), dtype=np.int64)


def _adapters(variants: Sequence[str], slots: Mapping[str, int]) -> Ints | None:
    """Returns `adapters` of a StepInput. Unknown variants were refused in engine/step/engine_limits.py."""
    digests = [lora_of(variant) for variant in variants]
    if not any(digests):
        return None
    return np.array([slots[digest] if digest else 0 for digest in digests], dtype=np.int64)


def sample_rows_of(step: StepInput) -> Ints:
    """Returns the rows of a step with requested logits, ascending."""
    return last_rows(starts_of(step.rows[:, 0]), step.rows[:, 3])


def _rope_positions(requests: Sequence[Request], rows: Sequence[tuple[int, ...]]) -> Ints | None:
    """Returns `rope_positions` of a StepInput with these rows; None if no request has rope positions of its own."""
    own = [request.rope_positions for request in requests]
    num_rows = max((len(each.rows) for each in own if each is not None), default=0)
    if not num_rows:
        return None
    parts = []
    for each, (num_tokens, start, *_) in zip(own, rows, strict=True):
        positions = [range(start, start + num_tokens)] if each is None else each.between(start, start + num_tokens)
        parts.append(np.broadcast_to(np.array(positions, dtype=np.int64), (num_rows, num_tokens)))
    return np.concatenate(parts, axis=1)


def starts_of(lens: Ints) -> Ints:
    """Returns 0 followed by the running sums, [n + 1], for lens [n]."""
    starts = np.zeros(len(lens) + 1, dtype=np.int64)
    np.cumsum(lens, out=starts[1:])
    return starts


def last_rows(query_starts: Ints, counts: Ints) -> Ints:
    """Returns the last `counts` rows of each sequence, in the order of the sequences."""
    if counts.max() <= 1:
        return query_starts[1:][counts > 0] - 1
    ends = starts_of(counts)
    return np.arange(ends[-1]) + np.repeat(query_starts[1:] - ends[1:], counts)
