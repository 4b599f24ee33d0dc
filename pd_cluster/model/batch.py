"""One step's input to the model, as tensors. Knows nothing of why these tokens were chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pd_cluster.device import Device
from pd_cluster.kv.pool import KVPool
from pd_cluster.streams import HostValues
from pd_cluster.types import Request

Ints = npt.NDArray[np.int64]

ALIGNMENT = 16  # bytes
NUM_COLUMNS = 5  # of StepInput.rows
_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "float64": torch.float64}


@dataclass(slots=True)
class ForwardBatch:
    """All sequences of a step, flattened: sequence i owns rows [query_starts[i], query_starts[i + 1]).

    Its blocks are block_table[table_starts[i] : table_starts[i + 1]]; every one of them is a block of the pool.
    """

    input_ids: torch.Tensor  # [1, num_tokens] int64
    positions: torch.Tensor  # [1, num_tokens] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64: block * block_size + offset
    query_starts: torch.Tensor  # [num_seqs + 1] int32
    context_lens: torch.Tensor  # [num_seqs] int32: tokens in the pool once this step has written
    block_table: torch.Tensor  # [sum of blocks] int32
    table_starts: torch.Tensor  # [num_seqs + 1] int32
    sample_rows: torch.Tensor  # [num_samples] int64: rows whose logits are wanted, ascending
    query_lens: Ints  # [num_seqs], on the host
    host_context_lens: Ints  # [num_seqs], the same as `context_lens`
    pool: KVPool
    masks: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    layers_written: list[int] = field(default_factory=list)
    windows: set[int | None] = field(default_factory=set)  # that its layers attended through
    on_layer: Callable[[int], None] | None = None  # told how many layers' keys and values are in the pool
    write_and_attend: Callable[..., torch.Tensor] | None = None  # in place of attention/sdpa.py's
    kernel_state: object = None  # what the kernels keep from layer to layer
    most_tokens: Ints | None = None  # [num_seqs]: that each one's request may ever have; None: as `host_context_lens`
    query_factors: torch.Tensor | None = None  # [num_tokens] float32: what queries are multiplied by, after all else
    replay_lens: Ints | None = None  # a graph's batch only: the `host_context_lens` of the step that it replays
    before_replay: Callable[[], None] | None = None  # of a graph's batch: what the kernels must do on the host
    host_values: Callable[[Ints], HostValues] | None = None  # of a graph's batch: what its kernels are given, by lens

    @property
    def num_tokens(self) -> int:
        return len(self.slot_mapping)

    def layer_written(self, layer_idx: int, window: int | None) -> None:
        """This layer's keys and values are in the pool, to be seen through `window`; loading proves the order."""
        self.layers_written.append(layer_idx)
        self.windows.add(window)
        if self.on_layer is not None:
            self.on_layer(len(self.layers_written))

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)


@dataclass(frozen=True, slots=True)
class StepInput:
    """What every rank must know of a step, as numbers: sequence i computes `rows[i]` of the tokens in order.

    `rows`, [num_seqs, NUM_COLUMNS] int64: tokens to compute, tokens computed before, blocks, rows whose logits are
    wanted, and the most tokens that the request may ever have.
    """

    rows: Ints
    input_ids: Ints  # [num_tokens]
    blocks: Ints  # [sum of blocks]


def step_input(chunks: list[tuple[Request, int]], block_size: int) -> StepInput:
    """Tokens [num_computed, num_computed + n) of every (request, n), n > 0; the last `num_logit_rows` are sampled."""
    rows: list[tuple[int, int, int, int, int]] = []
    input_ids: list[int] = []
    blocks: list[int] = []
    for request, num_tokens in chunks:
        start = request.num_computed_tokens
        stop = start + num_tokens
        num_blocks = -(-stop // block_size)
        blocks += request.block_table[:num_blocks]
        input_ids += request.token_ids(start, stop)
        rows.append((num_tokens, start, num_blocks, request.num_logit_rows(num_tokens), request.most_tokens))
    return StepInput(
        np.array(rows, dtype=np.int64), np.array(input_ids, dtype=np.int64), np.array(blocks, dtype=np.int64)
    )


def step_ahead(requests: Sequence[Request], block_size: int) -> StepInput:
    """One token each, behind the one that is computed now; input ids are not known here, and 0."""
    starts = [request.num_computed_tokens + 1 for request in requests]
    nums_blocks = [start // block_size + 1 for start in starts]
    blocks = [b for request, count in zip(requests, nums_blocks, strict=True) for b in request.block_table[:count]]
    rows = [
        (1, start, count, 1, request.most_tokens)
        for request, start, count in zip(requests, starts, nums_blocks, strict=True)
    ]
    return StepInput(
        np.array(rows, dtype=np.int64), np.zeros(len(rows), dtype=np.int64), np.array(blocks, dtype=np.int64)
    )


def build_batch(chunks: list[tuple[Request, int]], pool: KVPool) -> ForwardBatch:
    """`step_input`, and what follows from it."""
    return batch_of(step_input(chunks, pool.layout.block_size), pool)


def batch_of(step: StepInput, pool: KVPool) -> ForwardBatch:
    """Raises ValueError when a block table is too short or names a block that the pool does not have."""
    block_size, input_ids, block_table = pool.layout.block_size, step.input_ids, step.blocks
    lens, starts, nums_blocks, counts, most_tokens = step.rows.T  # each [num_seqs]
    query_starts, table_starts = _starts(lens), _starts(nums_blocks)
    pool.check_blocks(block_table, int(table_starts[-1]))
    if len(lens) == len(input_ids):  # one token each
        positions, first_block = starts, table_starts[:-1]
    else:
        positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], lens)
        first_block = np.repeat(table_starts[:-1], lens)
    block, offset = positions // block_size, positions % block_size
    context_lens = starts + lens
    tensors: dict[str, Any] = on_device(
        {
            "input_ids": input_ids[None],
            "positions": np.ascontiguousarray(positions[None]),
            "slot_mapping": block_table[first_block + block] * block_size + offset,
            "sample_rows": _last_rows(query_starts, counts),
            "query_starts": query_starts.astype(np.int32),
            "context_lens": context_lens.astype(np.int32),
            "block_table": block_table.astype(np.int32),
            "table_starts": table_starts.astype(np.int32),
        },
        pool.device,
    )
    return ForwardBatch(**tensors, query_lens=lens, host_context_lens=context_lens, pool=pool, most_tokens=most_tokens)


def on_device(arrays: Mapping[str, npt.NDArray[Any]], device: Device) -> dict[str, torch.Tensor]:
    """The arrays as tensors; on an accelerator all of them in one copy, which the host does not wait for."""
    if not device.is_accelerator:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    return packed(arrays, lambda host: host.to(device.torch_name, non_blocking=True), pinned=True)


def packed(
    arrays: Mapping[str, npt.NDArray[Any]], copy: Callable[[torch.Tensor], torch.Tensor], pinned: bool
) -> dict[str, torch.Tensor]:
    """Views of what `copy` makes of one tensor of bytes that holds all arrays."""
    starts, nbytes = {}, 0
    for name, array in arrays.items():
        starts[name] = nbytes
        nbytes += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
    buffer = host.numpy()
    for name, array in arrays.items():
        buffer[starts[name] : starts[name] + array.nbytes] = array.reshape(-1).view(np.uint8)
    there = copy(host)
    return {
        name: there[starts[name] : starts[name] + array.nbytes].view(_DTYPES[array.dtype.name]).view(array.shape)
        for name, array in arrays.items()
    }


def _starts(lens: Ints) -> Ints:
    """[n] to [n + 1]: 0 and the running sums."""
    starts = np.zeros(len(lens) + 1, dtype=np.int64)
    np.cumsum(lens, out=starts[1:])
    return starts


def _last_rows(query_starts: Ints, counts: Ints) -> Ints:
    """Of each sequence in turn, its last `counts` rows."""
    if counts.max() <= 1:
        return query_starts[1:][counts > 0] - 1
    ends = _starts(counts)
    return np.arange(ends[-1]) + np.repeat(query_starts[1:] - ends[1:], counts)
