"""A step's attention through FlashInfer. The host plans it once per step, for all layers with the same scoring.

FlashInfer reads the pool's pages through their strides. A batch of single tokens uses the decode kernels; any other
batch uses the prefill kernels for all its sequences. This file does not know when a graph is captured: a batch with
`replay_lens` belongs to a graph, gets permanent buffers, and is planned again before each replay. `problem` reports in
advance what FlashInfer does not support. Written for flashinfer-python 0.6.18.post1; importing this file imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flashinfer
import numpy as np
import torch

from pd_cluster.devices.device import Device, num_multiprocessors
from pd_cluster.devices.device_streams import Marker, mark
from pd_cluster.errors import ModelError, called
from pd_cluster.kv.kv_layout import DTYPE_NBYTES, KVLayout
from pd_cluster.kv.kv_vectors import write_kv
from pd_cluster.model.inputs.forward_batch import ForwardBatch, packed
from pd_cluster.model.layers.attention.sdpa import Scoring

VERSION: str = flashinfer.__version__
HEAD_DIMS = (64, 128, 256)
DTYPES = ("float16", "bfloat16")
LEAST_CAPABILITY = (8, 0)
MAX_PAGE_ELEMENTS = 1 << 32  # FlashInfer counts the stride of a page in 32 bits
MAX_GROUP = 64  # query heads per KV head, which share a tile of rows
LEAST_WORKSPACE_NBYTES = 128 << 20
GRAPH_PLAN_NBYTES = 1 << 20  # a graph's plan has two tiles per sequence, about 13 bytes each
PREFILL_ROWS = 128  # rows of a tile, at most
PROGRAMS_PER_SM = 2  # a plan splits contexts for this many programs on each multiprocessor


def problem(
    layout: KVLayout,
    num_heads: int,
    compute_capability: tuple[int, int],
    *,
    has_sinks: bool = False,
) -> str:
    """Returns why FlashInfer does not support this model and pool on this GPU; "" if it does. `num_heads`: per rank."""
    if compute_capability < LEAST_CAPABILITY:
        return "compute capability {}.{}: FlashInfer's kernels need 8.0".format(*compute_capability)
    if layout.dtype not in DTYPES:
        return f"dtype {layout.dtype}: FlashInfer computes in {' or '.join(DTYPES)}"
    if layout.head_dim not in HEAD_DIMS:
        return f"head_dim {layout.head_dim}: FlashInfer supports {', '.join(map(str, HEAD_DIMS))}"
    if num_heads // layout.local_kv_heads > MAX_GROUP:
        return f"{num_heads // layout.local_kv_heads} query heads per KV head: FlashInfer is used for 1 to {MAX_GROUP}"
    if layout.block_nbytes // DTYPE_NBYTES[layout.dtype] >= MAX_PAGE_ELEMENTS:
        return (
            f"{called('block_size')} {layout.block_size}: FlashInfer's pages, all layers of a block, must have fewer "
            f"than "
            f"2**32 elements"
        )
    if has_sinks:
        return "attention sinks: FlashInfer's paged kernels support them only on some GPUs"
    return ""


class _Shape(NamedTuple):
    """Identifies a plan: layers with equal shapes share one."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scaling: float
    sliding_window: int | None
    softcap: float | None

    @property
    def for_plan(self) -> dict[str, Any]:
        """Returns the arguments that have the same names in both wrappers."""
        return {
            "num_qo_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "page_size": self.block_size,
            "sm_scale": self.scaling,
            "window_left": -1 if self.sliding_window is None else self.sliding_window - 1,  # excluding the token itself
            "logits_soft_cap": self.softcap,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }


class _Pages(NamedTuple):
    """A step's sequences as FlashInfer expects them: int32, on the host."""

    query_starts: torch.Tensor  # [num_seqs + 1]
    page_starts: torch.Tensor  # [num_seqs + 1]
    last_page_lens: torch.Tensor  # [num_seqs]; 0 if the sequence has no page
    context_lens: torch.Tensor  # [num_seqs]

    @classmethod
    def of(cls, batch: ForwardBatch) -> _Pages:
        """Uses pinned memory if there is an accelerator, so that no copy blocks the host."""
        lens = batch.host_context_lens if batch.replay_lens is None else batch.replay_lens
        block_size = batch.pool.layout.block_size
        counts = -(-lens // block_size)
        arrays = {
            "query_starts": np.concatenate(([0], np.cumsum(batch.query_lens))).astype(np.int32),
            "page_starts": np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            "last_page_lens": (lens - np.maximum(counts - 1, 0) * block_size).astype(np.int32),
            "context_lens": lens.astype(np.int32),
        }
        return cls(**packed(arrays, lambda host: host, pinned=batch.pool.device.is_accelerator))


@dataclass(slots=True, eq=False)
class _Planner:
    """A wrapper with its plan. The plan is copied from host memory, which must not change until the copy is done."""

    wrapper: Any
    decodes: bool
    workspace_nbytes: int
    copied: Marker
    planned_for: object = None

    def plan(self, pages: _Pages, table: torch.Tensor, shape: _Shape, step: object, device: Device) -> None:
        table = table[: int(pages.page_starts[-1])]
        # The previous plan was copied before its step's layers, so this waits at most for the step before that one.
        self.copied.wait()
        if self.decodes:
            self.wrapper.plan(
                indptr=pages.page_starts,
                indices=table,
                last_page_len=pages.last_page_lens,
                head_dim=shape.head_dim,
                seq_lens=pages.context_lens,
                **shape.for_plan,
            )
        else:
            self.wrapper.plan(
                qo_indptr=pages.query_starts,
                paged_kv_indptr=pages.page_starts,
                paged_kv_indices=table,
                paged_kv_last_page_len=pages.last_page_lens,
                head_dim_qk=shape.head_dim,
                causal=True,
                seq_lens=pages.context_lens,
                **shape.for_plan,
            )
        self.copied = mark(device)
        self.planned_for = step


class _PlannedStep:
    """The plans of a batch, made from its first layer on. A graph's plans live as long as the graph.

    Holds no reference to the batch, to avoid cycles.
    """

    def __init__(self, batch: ForwardBatch) -> None:
        self.pages = _Pages.of(batch)
        self.planners: dict[_Shape, _Planner] = {}
        if batch.replay_lens is not None:
            batch.before_replay = partial(self.plan_again, batch)

    def plan(self, batch: ForwardBatch, shape: _Shape) -> None:
        self.planners[shape].plan(self.pages, batch.block_table, shape, self, batch.pool.device)

    def plan_again(self, batch: ForwardBatch) -> None:
        """Plans again, for the step that is now in the buffers; `replay_lens` are its context lengths."""
        self.pages = _Pages.of(batch)
        for shape in self.planners:
            self.plan(batch, shape)


class FlashInfer:
    """Attention on one device. Wrappers are kept between steps. All share one workspace, so they share one stream."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device.torch_name)
        self._eager: dict[tuple[bool, int], _Planner] = {}  # (whether it decodes, index of the shape in its step)
        # By a shape's index in its step: the memory of its plan. All graphs share it, as only one replays at a time.
        self._graph_plans: list[torch.Tensor] = []

    def attend_batch(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key_pool: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], strided
        value_pool: torch.Tensor,
        batch: ForwardBatch,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Returns a tensor of the query's shape; this step's keys and values must be in the pool."""
        if scoring.sinks is not None:
            way_out = f"use {called('attention_backend')} triton"
            raise ModelError(f"attention sinks: FlashInfer does not support them here; {way_out}")
        assert key_pool.stride() == value_pool.stride()
        assert key_pool.stride(3) == query.stride(2) == 1
        _, num_heads, head_dim = query.shape
        shape = _Shape(
            num_heads,
            key_pool.shape[2],
            head_dim,
            key_pool.shape[1],
            query.dtype,
            scoring.scaling,
            scoring.sliding_window,
            scoring.softcap,
        )
        attended: torch.Tensor = self._planned(batch, shape).wrapper.run(query, (key_pool, value_pool))
        return attended

    def write_and_attend(
        self,
        layer_idx: int,
        query: torch.Tensor,  # [num_heads, num_tokens, head_dim]
        keys: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        values: torch.Tensor,
        batch: ForwardBatch,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Writes the step's keys and values into the pool; returns [num_tokens, num_heads, head_dim]."""
        key_pool, value_pool = batch.pool.layer(layer_idx)
        write_kv(keys, values, key_pool, value_pool, batch.slot_mapping)
        batch.layer_written(layer_idx, scoring.sliding_window)
        return self.attend_batch(query.transpose(0, 1).contiguous(), key_pool, value_pool, batch, scoring)

    def _planned(self, batch: ForwardBatch, shape: _Shape) -> _Planner:
        step = batch.kernel_state
        if not isinstance(step, _PlannedStep):
            step = batch.kernel_state = _PlannedStep(batch)
        if shape not in step.planners:
            step.planners[shape] = self._planner(batch, shape, len(step.planners))
        found = step.planners[shape]
        if found.planned_for is not step:  # it is new, or another step has used it since
            step.plan(batch, shape)
        return found

    def _planner(self, batch: ForwardBatch, shape: _Shape, slot: int) -> _Planner:
        nbytes = workspace_nbytes(
            batch.num_seqs, shape.num_heads, shape.num_kv_heads, shape.head_dim, num_multiprocessors(self._device)
        )
        if len(self._workspace) < nbytes:  # existing wrappers keep the old workspace
            self._workspace = torch.zeros(nbytes, dtype=torch.uint8, device=self._device.torch_name)
        if batch.replay_lens is not None:
            return self._made(self._graph_wrapper(batch, slot), True)
        decodes = bool((batch.query_lens == 1).all())
        kept = self._eager.get((decodes, slot))
        if kept is None or kept.workspace_nbytes < nbytes:
            if decodes:
                wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=True)
            else:
                wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            kept = self._eager[decodes, slot] = self._made(wrapper, decodes)
        return kept

    def _made(self, wrapper: Any, decodes: bool) -> _Planner:
        return _Planner(wrapper, decodes, len(self._workspace), mark(self._device))

    def _graph_wrapper(self, batch: ForwardBatch, slot: int) -> Any:
        """Makes a wrapper that reads the batch's own table.

        Plans share a buffer, because only one graph replays at a time.
        """
        device = self._device.torch_name
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.zeros(batch.num_seqs + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=batch.block_table,
            paged_kv_last_page_len_buffer=torch.zeros(batch.num_seqs, dtype=torch.int32, device=device),
        )
        if slot == len(self._graph_plans):
            self._graph_plans.append(torch.empty(GRAPH_PLAN_NBYTES, dtype=torch.uint8, device=device))
        wrapper.reset_workspace_buffer(self._workspace, self._graph_plans[slot])
        return wrapper


def workspace_nbytes(num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, num_sms: int) -> int:
    """Returns the most bytes of FlashInfer's split results: float32 output and log-sum-exp for each row of each tile.

    A plan with splits has at most as many tiles as can run concurrently, or two per decoding sequence.
    """
    side_by_side = PROGRAMS_PER_SM * num_sms // num_kv_heads
    rows = 16 if num_heads // num_kv_heads <= 16 else 64  # rows of a decode tile
    num_rows = max(side_by_side * PREFILL_ROWS, max(side_by_side, 2 * num_seqs) * rows)
    return max(LEAST_WORKSPACE_NBYTES, num_heads * num_rows * (head_dim + 1) * 4 + 1024)
