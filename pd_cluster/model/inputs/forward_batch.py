"""The input of one step to the model, as tensors. Knows nothing of how these tokens were chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pd_cluster.devices.device import Device
from pd_cluster.devices.device_streams import HostValues
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.image_rows import ImageRows, key_limits
from pd_cluster.model.inputs.state_rows import StateRows, segments_of
from pd_cluster.model.inputs.step_input import (
    KEEP_COLUMNS,
    ONE_BLOCK,
    GroupTables,
    Ints,
    StepInput,
    last_rows,
    starts_of,
    step_input,
)
from pd_cluster.model.inputs.virtual_token_rows import VirtualRows
from pd_cluster.types import Request

OnLayer = Callable[[int], None]  # receives the number of layers whose writes to the pool are done or launched

ALIGNMENT = 16  # bytes
_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "float64": torch.float64}


class EncoderTotals(NamedTuple):
    """The number of images that a tower has computed since the start, pairs of video frames included, and the seconds
    that this took.
    """

    num_images: int = 0
    seconds: float = 0.0


class RunnerOutput(NamedTuple):
    """The result of a step's forward pass, float32; rows are in the order of the step's chunks."""

    logits: torch.Tensor  # [num_samples, vocab_size]
    hidden_states: torch.Tensor  # [num_hidden_rows, hidden_size], on the host; width 0: the model has none


NO_HIDDEN_STATES = torch.empty(0, 0)


@dataclass(slots=True)
class HiddenRows:
    """The rows of a batch whose final hidden states are requested; the model fills in `states`."""

    rows: torch.Tensor  # [num_hidden_rows] int64, ascending
    kept: torch.Tensor  # [num_kept] int64, ascending: `rows` and the rows with requested logits
    logits_at: torch.Tensor  # [num_samples] int64: indexes in `kept`
    hidden_at: torch.Tensor  # [num_hidden_rows] int64: indexes in `kept`
    states: torch.Tensor | None = None  # [num_hidden_rows, hidden_size], after the final norm, in the model's dtype


@dataclass(slots=True)
class AuxiliaryStates:
    """Hidden states of all tokens, read by a draft head; the model fills in `states`, in the order of `layers`.

    `layers`: the layers whose input (the residual stream before any norm) is recorded; () records the final norm's
    output.
    """

    layers: tuple[int, ...]
    states: list[torch.Tensor] = field(default_factory=list)  # each [num_tokens, hidden_size]


@dataclass(slots=True)
class PairRows:
    """The hidden-state halves of the pairs in a draft head's batch; the batch's tokens are the other halves: see
    draft_head.py. The model fills in the tokens' `embeddings`.
    """

    states: torch.Tensor  # [num_tokens, hidden_size]
    embeddings: torch.Tensor | None = None  # [num_tokens, hidden_size]


class GroupSlotMapping(NamedTuple):
    """The positions of a step's tokens in the pool of another layer group; the fields are as in ForwardBatch."""

    pool: KVPool
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    table_starts: torch.Tensor


@dataclass(slots=True)
class ForwardBatch:
    """All sequences of a step, flattened: sequence i owns rows [query_starts[i], query_starts[i + 1]).

    Its blocks are block_table[table_starts[i] : table_starts[i + 1]]; all of them are in the pool. Slots, masks and
    windows depend on lengths only, not on rotary positions.

    With several groups of layers, these fields describe group 0; `of_layer` returns a batch for another group.
    """

    input_ids: torch.Tensor  # [1, num_tokens] int64
    rope_positions: torch.Tensor  # [1, num_tokens] int64, or [3, 1, num_tokens] for M-RoPE
    slot_mapping: torch.Tensor  # [num_tokens] int64: block * block_size + offset
    query_starts: torch.Tensor  # [num_seqs + 1] int32
    context_lens: torch.Tensor  # [num_seqs] int32: tokens in the pool once this step's are written
    block_table: torch.Tensor  # [sum of blocks] int32
    table_starts: torch.Tensor  # [num_seqs + 1] int32
    sample_rows: torch.Tensor  # [num_samples] int64: rows whose logits are requested, ascending
    query_lens: Ints  # [num_seqs], on the host
    host_context_lens: Ints  # [num_seqs], `context_lens` on the host
    pool: KVPool
    hidden: HiddenRows | None = None  # None: no hidden states are requested
    taps: AuxiliaryStates | None = None  # None: no draft head reads states
    pairs: PairRows | None = None  # None: a batch for the whole model, not for a draft head
    images: ImageRows | None = None  # None: no token belongs to a picture
    virtual: VirtualRows | None = None  # None: no token is a virtual token of an adapter
    # [num_tokens] int32: where each row's visible keys end; None: each row sees the keys up to its own position.
    key_limits: torch.Tensor | None = None
    masks: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    layers_written: list[int] = field(default_factory=list)
    windows: set[int | None] = field(default_factory=set)  # the windows of the layers that have attended
    after_layer: Callable[[], None] | None = None  # called between layers on a CPU; may change the number of threads
    on_layer: OnLayer | None = None  # receives the number of layers whose keys and values are in the pool
    write_and_attend: Callable[..., torch.Tensor] | None = None  # replaces the function in layers/attention/sdpa.py
    # A layer without its own keys -> the earlier layer whose keys it reads.
    reads: Mapping[int, int] = field(default_factory=dict)
    # [num_tokens, most] int32: see layers/attention/sparse_selection.py, and on CUDA kernels/cuda/attention/
    # listed_keys.py; None: all keys are visible.
    chosen: torch.Tensor | None = None
    further: tuple[GroupSlotMapping, ...] = ()  # for the other groups that keep tokens, from group 1 on
    # The batches that `of_group` returns for these groups; empty until its first call.
    views: list[ForwardBatch] = field(default_factory=list)
    states: StateRows | None = None  # None: no layer keeps a state
    states_written: list[int] = field(default_factory=list)  # layers whose states are in their pool
    kernel_state: object = None  # kept by the kernels between layers
    adapters: Ints | None = None  # [num_seqs]: adapter slots; None: no sequence has an adapter
    leaders: Ints | None = None  # [num_seqs], see StepInput
    adapted_rows: Any = None  # only for a graph's batch: AdaptedBlocks of the replayed step
    kept_rows: Ints = field(
        default_factory=lambda: np.empty(0, dtype=np.int64)
    )  # `hidden.kept`, or `sample_rows`, on the host
    most_tokens: Ints | None = None  # [num_seqs]: the requests' token limits; None: equal to `host_context_lens`
    query_factors: torch.Tensor | None = None  # [num_tokens] float32: factors of the queries, applied last
    replay_lens: Ints | None = None  # only for a graph's batch: the `host_context_lens` of the replayed step
    before_replay: Callable[[], None] | None = None  # only for a graph's batch: the kernels' host work
    # Only for a graph's batch: returns the host values that the kernels need for a step with these context lengths.
    host_values: Callable[[Ints], HostValues] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.slot_mapping)

    def of_group(self, group: int) -> ForwardBatch:
        """Returns the batch for another group of layers that keeps tokens, with its pool, slots and block tables.

        Both batches share everything that layers write. Only the model's layers call this, when the batch is complete.
        """
        if group == 0:
            return self
        if not self.views:
            self.views += [
                replace(self, **each._asdict(), further=(), views=[], kernel_state=None) for each in self.further
            ]
        return self.views[group - 1]

    def of_layer(self, layer_idx: int) -> ForwardBatch:
        """Returns the batch for the attention of this layer."""
        if not self.further or self.pool.has_layer(layer_idx):
            return self
        return self.of_group(1 + [each.pool.has_layer(layer_idx) for each in self.further].index(True))

    def layer_written(self, layer_idx: int, window: int | None) -> None:
        """Records that this layer's keys and values are in the pool, and its `window`.

        The checks at load verify the order.
        """
        if self.virtual is not None:
            self.virtual.written(layer_idx, self.pool, self.slot_mapping)
        self.layers_written.append(layer_idx)
        self.windows.add(window)
        if self.after_layer is not None:
            self.after_layer()
        if self.on_layer is not None:
            self.on_layer(len(self.layers_written))

    def state_written(self, layer_idx: int) -> None:
        """Records that the states of all sequences in this layer are in the pool, including checkpoints."""
        self.states_written.append(layer_idx)
        if self.after_layer is not None:
            self.after_layer()

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)


def build_batch(chunks: list[tuple[Request, int]], pool: KVPool, further: Sequence[KVPool] = ()) -> ForwardBatch:
    """Builds the batch from the result of `step_input`."""
    return batch_of(step_input(chunks, pool.layout.block_size, further=sizes_of_blocks(further)), pool, False, further)


def sizes_of_blocks(pools: Sequence[KVPool]) -> list[int]:
    """Returns the tokens per block of each pool, for RowCollector."""
    layouts = [pool.layout for pool in pools]
    return [ONE_BLOCK if layout.holds.is_state else layout.block_size for layout in layouts]


def batch_of(step: StepInput, pool: KVPool, sees_whole: bool = False, further: Sequence[KVPool] = ()) -> ForwardBatch:
    """Builds a step's tensors. Raises ValueError for a block table that is too short or names an unknown block.

    `sees_whole`: each token of a picture attends to the whole picture. `further`: the pools of groups 1 and up.
    """
    lens, starts, _, _, most_tokens, nums_hidden = step.rows.T  # each [num_seqs]
    arrays = step_numbers(step, pool, sees_whole)
    hidden: dict[str, Ints] = {}
    if nums_hidden.any():
        hidden = _hidden_rows(arrays["sample_rows"], last_rows(starts_of(lens), nums_hidden))
    tensors: dict[str, Any] = on_device({**arrays, **hidden}, pool.device)
    if hidden:
        tensors["hidden"] = HiddenRows(**{name: tensors.pop(name) for name in hidden})
    if further:
        tensors |= _of_groups(step, further)
    return ForwardBatch(
        **tensors,
        query_lens=lens,
        host_context_lens=starts + lens,
        pool=pool,
        most_tokens=most_tokens,
        adapters=step.adapters,
        leaders=step.leaders,
        kept_rows=hidden.get("kept", arrays["sample_rows"]),
    )


def _of_groups(step: StepInput, pools: Sequence[KVPool]) -> dict[str, Any]:
    """Returns the fields of a batch for groups 1 and up."""
    lens, starts = step.rows[:, 0], step.rows[:, 1]
    positions = _positions(lens, starts, starts_of(lens))
    places, states = list[GroupSlotMapping](), None
    for pool, tables in zip(pools, step.further, strict=True):
        if pool.layout.holds.is_state:
            states = _states(step, pool, tables)
        else:
            numbers = on_device(_places(pool, tables, positions, lens), pool.device)
            places.append(GroupSlotMapping(pool, **numbers))
    return {"further": tuple(places), "states": states}


def _states(step: StepInput, pool: KVPool, tables: GroupTables) -> StateRows:
    lens, starts = step.rows[:, 0], step.rows[:, 1]
    pool.check_blocks(tables.blocks, len(lens))
    keeps = np.empty((0, KEEP_COLUMNS), dtype=np.int64) if step.keeps is None else step.keeps
    if len(keeps):
        pool.check_blocks(keeps[:, 2], len(keeps))
    behind = [(seq, num_tokens - int(starts[seq]), block) for seq, num_tokens, block in keeps.tolist()]
    return StateRows.of(pool, segments_of(lens.tolist(), tables.blocks.tolist(), behind))


def _positions(lens: Ints, starts: Ints, query_starts: Ints) -> Ints:
    """Returns the index of each of the step's tokens in its sequence, [num_tokens]."""
    if len(lens) == query_starts[-1]:  # each sequence has one token
        return starts
    return np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], lens)


def _places(pool: KVPool, tables: GroupTables, positions: Ints, lens: Ints) -> dict[str, npt.NDArray[Any]]:
    """Returns where the step's tokens are in this pool. Raises ValueError like `batch_of`."""
    block_size, table_starts = pool.layout.block_size, starts_of(tables.nums_blocks)
    pool.check_blocks(tables.blocks, int(table_starts[-1]))
    first_block = table_starts[:-1]
    if len(lens) < len(positions):
        first_block = np.repeat(first_block, lens)
    block, offset = positions // block_size, positions % block_size
    return {
        "slot_mapping": tables.blocks[first_block + block] * block_size + offset,
        "block_table": tables.blocks.astype(np.int32),
        "table_starts": table_starts.astype(np.int32),
    }


def step_numbers(step: StepInput, pool: KVPool, sees_whole: bool = False) -> dict[str, npt.NDArray[Any]]:
    """Returns the tensors of a step's batch as arrays. Raises ValueError like `batch_of`."""
    input_ids = step.input_ids
    lens, starts, nums_blocks, counts, _, _ = step.rows.T
    query_starts = starts_of(lens)
    positions = _positions(lens, starts, query_starts)
    rope_positions = positions[None]
    if (own := step.rope_positions) is not None:
        rope_positions = own if len(own) == 1 else own[:, None]
    places = _places(pool, GroupTables(nums_blocks, step.blocks), positions, lens)
    if step.num_again:  # rows that are computed again write to the padding block
        places["slot_mapping"][-step.num_again :] = pool.num_blocks * pool.layout.block_size
    limits = {"key_limits": key_limits(step.images, positions).astype(np.int32)} if sees_whole and step.images else {}
    return {
        "input_ids": input_ids[None],
        "rope_positions": np.ascontiguousarray(rope_positions),
        "sample_rows": last_rows(query_starts, counts),
        "query_starts": query_starts.astype(np.int32),
        "context_lens": (starts + lens).astype(np.int32),
        **places,
        **limits,
    }


def _hidden_rows(sample_rows: Ints, rows: Ints) -> dict[str, Ints]:
    """Returns the arrays of HiddenRows."""
    kept = np.union1d(sample_rows, rows)
    return {
        "rows": rows,
        "kept": kept,
        "logits_at": np.searchsorted(kept, sample_rows),
        "hidden_at": np.searchsorted(kept, rows),
    }


def on_device(arrays: Mapping[str, npt.NDArray[Any]], device: Device) -> dict[str, torch.Tensor]:
    """Returns the arrays as tensors. On an accelerator all are copied at once, without waiting."""
    if not device.is_accelerator:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    return packed(arrays, lambda host: host.to(device.torch_name, non_blocking=True), pinned=True)


def packed(
    arrays: Mapping[str, npt.NDArray[Any]], copy: Callable[[torch.Tensor], torch.Tensor], pinned: bool
) -> dict[str, torch.Tensor]:
    """Packs all arrays into one tensor of bytes and returns views of its `copy`."""
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
