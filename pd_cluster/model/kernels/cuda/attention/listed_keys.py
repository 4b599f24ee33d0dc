"""Sparse latent attention on CUDA: lists the slots of the keys that each token attends to, and attends to those.

`ForwardBatch.chosen` [num_tokens, most] has these slots; a token with fewer keys uses only the first entries. Each
token becomes a sequence of its own whose table is its list. Nothing here waits for the device, and shapes depend on the
batch's own shape alone, so graphs can capture all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import triton

from pd_cluster.devices.device import num_multiprocessors
from pd_cluster.kv.kv_layout import INDEX, KVLayout
from pd_cluster.model.inputs.forward_batch import ForwardBatch, on_device
from pd_cluster.model.kernels.cuda.attention import index_kernels as kernels
from pd_cluster.model.kernels.cuda.attention.attention_configs import AttentionConfigs, largest_divisor, padded
from pd_cluster.model.kernels.cuda.attention.attention_plan import NO_SEQS, SPLIT_KEYS, AttentionPlan, plan_decode
from pd_cluster.model.kernels.cuda.attention.latent_heads import ROPE_ELEMENTS
from pd_cluster.model.kernels.cuda.attention.paged_attention import BatchMetadata, PagedKV, attend
from pd_cluster.model.kernels.cuda.attention.triton_planner import AttentionShape, configs_of_shape
from pd_cluster.model.kernels.cuda.dependent_launch import launched
from pd_cluster.model.kernels.cuda.elementwise_kernels import DTYPES
from pd_cluster.model.layers.attention.latent_attention import MOST_SCORES
from pd_cluster.model.layers.attention.sdpa import Scoring
from pd_cluster.model.layers.attention.sparse_selection import IndexNorm, IndexRows
from pd_cluster.model.layers.ops import Rope

MAX_HEADS, MAX_WIDTH = 128, 256  # of an indexer
SCORED, SCORED_WIDE = (64, 4, 2), (16, 8, 1)  # keys in a tile of scores, warps, stages; the second for float32
SPAN = 512  # keys that a program scores; so few that one long context occupies the whole device
PART = 16384  # keys of one part: in a longer context, a program finds the best keys of each part
LISTED = 8192  # scores that a program reads at once when it chooses
Kept = TypeVar("Kept")


class _Lists(NamedTuple):
    """The parts of a batch's metadata that all layers share, on the device, int32."""

    token_seqs: torch.Tensor  # [num_tokens]: each token's sequence
    starts: torch.Tensor  # [num_tokens + 1]: 0, 1, …
    table_starts: torch.Tensor  # [num_tokens + 1]: `starts` times `most`
    nums_listed: torch.Tensor  # [num_tokens]: written by each layer that chooses keys; in a graph, at each replay


def problem(layout: KVLayout, num_index_heads: int) -> str:
    """Returns why these kernels do not support such an indexer; "" if they do."""
    if num_index_heads > MAX_HEADS:
        return f"an indexer of {num_index_heads} heads: the Triton attention supports up to {MAX_HEADS}"
    if layout.width_of(INDEX) > MAX_WIDTH or layout.width_of(INDEX) % 8:
        return f"index keys of {layout.width_of(INDEX)} numbers: the Triton attention supports multiples of 8 up to 256"
    return ""


def prepare_index(
    queries: torch.Tensor, keys: torch.Tensor, norm: IndexNorm, rope: Rope, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `SparseOps.prepare_index`. Overwrites the queries."""
    (num_tokens, num_heads, width), rope_width = queries.shape, rope.cos.shape[1]
    assert queries.is_contiguous()
    assert keys.shape == (num_tokens, width)
    assert keys.stride(1) == 1
    assert queries.dtype == keys.dtype
    assert queries.dtype in DTYPES
    assert norm.weight.dtype == norm.bias.dtype == torch.float32
    assert rope_width <= width
    for table in (rope.cos, rope.sin):
        assert table.shape == (num_tokens, rope_width)
        assert table.stride() == (rope.cos.stride(0), 1)
    normed = keys.new_empty(num_tokens, width)
    if num_tokens:
        half = triton.next_power_of_2(rope_width // 2)
        heads = min(max(1, ROPE_ELEMENTS // half), triton.next_power_of_2(num_heads))
        kernels.prepare_index[(num_tokens, 1 + triton.cdiv(num_heads, heads))](
            *(queries, keys, normed, norm.weight, norm.bias, rope.cos, rope.sin),
            *(keys.stride(0), rope.cos.stride(0), norm.eps),
            NUM_HEADS=num_heads,
            WIDTH=width,
            ROPE_WIDTH=rope_width,
            HEADS=heads,
            HALF=half,
            REST=triton.next_power_of_2(max(1, width - rope_width)),
            num_warps=2,
            enable_fp_fusion=False,
            **launched(pdl),
        )
    return queries, normed


def choose_keys(rows: IndexRows, batch: ForwardBatch, lists_all: bool, pdl: bool = False) -> torch.Tensor | None:
    """Writes the index keys to the pool; returns the new value of `ForwardBatch.chosen`.

    This value is None if no token has more than `rows.most` keys, unless `lists_all`. For the batch of a graph, the
    longest context that the graph supports decides.
    """
    (num_tokens, width), plane = rows.keys.shape, batch.pool.planes(rows.layer_idx)[2]
    _check(rows, plane, batch)
    if num_tokens:
        kernels.keep_index_keys[(num_tokens,)](
            *(rows.keys, plane, batch.slot_mapping, *plane.stride()[:2]),
            WIDTH=width,
            D=padded(width),
            BLOCK_SIZE=plane.shape[1],
            num_warps=1,
            **launched(pdl),
        )
    longest = int(batch.host_context_lens.max(initial=0))
    if longest <= rows.most and not lists_all:
        return None
    chosen = batch.slot_mapping.new_empty(num_tokens, rows.most, dtype=torch.int32)
    at_once = max(1, MOST_SCORES // longest if longest > rows.most else num_tokens)
    for first in range(0, num_tokens, at_once):
        _list_keys(rows, batch, longest, slice(first, min(first + at_once, num_tokens)), chosen, pdl)
    return chosen


def _list_keys(
    rows: IndexRows, batch: ForwardBatch, longest: int, tokens: slice, chosen: torch.Tensor, pdl: bool
) -> None:
    """Writes the lists of these tokens. `longest`: the batch's longest context."""
    num_tokens, plane = tokens.stop - tokens.start, batch.pool.planes(rows.layer_idx)[2]
    lists = lists_of(batch, rows.most)
    seqs = (lists.token_seqs, batch.query_starts, batch.context_lens)
    tables = (batch.block_table, batch.table_starts)
    block = min(LISTED, triton.next_power_of_2(max(16, longest)))
    scores = keys = rows.weights  # not read if all lists are whole
    part = 0
    if longest > rows.most:
        scores = rows.weights.new_empty(num_tokens, longest)
        _score(rows, plane, scores, (*seqs, *tables, tokens.start), pdl)
    if longest > max(rows.most, own_part := max(PART, triton.next_power_of_2(2 * rows.most))):
        part, num_parts = own_part, triton.cdiv(longest, own_part)
        best = scores.new_empty(num_tokens, num_parts * rows.most)
        keys = torch.empty_like(best, dtype=torch.int32)
        kernels.keep_best[(num_tokens, num_parts)](
            *(scores, best, keys, *seqs, tokens.start, longest, best.shape[1]),
            MOST=rows.most,
            PART=part,
            BLOCK=block,
            num_warps=16,
            **launched(pdl),
        )
        scores = best
    kernels.list_keys[(num_tokens,)](
        *(scores, keys, chosen, lists.nums_listed, *seqs, *tables, tokens.start, scores.shape[1]),
        MOST=rows.most,
        PART=part,
        BLOCK_SIZE=plane.shape[1],
        BLOCK=block,
        num_warps=16,
        **launched(pdl),
    )


def _score(
    rows: IndexRows,
    plane: torch.Tensor,
    scores: torch.Tensor,
    places: tuple[torch.Tensor | int, ...],  # where the tokens and their keys are; last, the first token
    pdl: bool,
) -> None:
    (_, num_heads, width), (num_tokens, longest) = rows.queries.shape, scores.shape
    is_wide = rows.queries.dtype == torch.float32
    keys, num_warps, num_stages = SCORED_WIDE if is_wide else SCORED
    kernels.score_keys[(num_tokens, triton.cdiv(longest, SPAN))](
        *(rows.queries, rows.weights, plane, scores, *places, longest, *plane.stride()[:2]),
        MOST=rows.most,
        NUM_HEADS=num_heads,
        HEADS=padded(num_heads),
        WIDTH=width,
        D=padded(width),
        BLOCK_SIZE=plane.shape[1],
        BLOCK_N=keys,
        SPAN=SPAN,
        PRECISION="ieee" if is_wide else "tf32",
        num_warps=num_warps,
        num_stages=num_stages,
        **launched(pdl),
    )


@dataclass(frozen=True, slots=True)
class ListedAttention:
    """Attends to the keys in `batch.chosen`; see `attend`. `may_split`: decode steps may use another kernel than
    prompts.
    """

    may_split: bool
    pdl: bool

    def __call__(
        self,
        query: torch.Tensor,
        latent_pool: torch.Tensor,
        rope_pool: torch.Tensor,
        batch: ForwardBatch,
        scoring: Scoring,
    ) -> torch.Tensor:
        assert batch.chosen is not None
        num_tokens, most = batch.chosen.shape
        lists = lists_of(batch, most)
        shape = AttentionShape.of_latents(query.shape[1], batch.pool.layout)
        by_splits = self.may_split and num_tokens == batch.num_seqs  # each sequence has one token
        key = ("plan of lists", most, shape)
        plan, arrivals, tiles = _kept(batch, key, lambda: _planned(query, batch, shape, most, by_splits))
        metadata = BatchMetadata(
            *(plan, lists.starts, lists.nums_listed, batch.chosen.view(-1), lists.table_starts),
            *(tiles[:0, 0], tiles, arrivals),
            has_slots=True,
        )
        return attend(query, PagedKV(latent_pool, rope_pool), metadata, scoring, pdl=self.pdl)


def _planned(
    query: torch.Tensor, batch: ForwardBatch, shape: AttentionShape, most: int, by_splits: bool
) -> tuple[AttentionPlan, torch.Tensor, torch.Tensor]:
    """Returns the plan for one list per token, counters of completed splits, and the tiles on the device."""
    num_tokens, device = len(query), batch.pool.device
    configs = configs_of_shape(shape, query.element_size() * 8, device, False)
    if by_splits:
        plan = plan_decode(num_tokens, most, shape.num_kv_heads, configs, num_multiprocessors(device))
        nothing = batch.query_starts.new_zeros(0, 2)
        return plan, batch.query_starts.new_zeros(plan.num_arrivals(shape.num_kv_heads)), nothing
    configs = with_whole_tiles(configs, shape.num_heads)
    tiles = np.stack((np.arange(num_tokens), np.zeros(num_tokens, dtype=np.int64)), axis=1).astype(np.int32)
    there = torch.arange(num_tokens, dtype=torch.int32, device=query.device)
    plan = AttentionPlan(configs, num_tokens, 1, SPLIT_KEYS, 1, NO_SEQS, tiles)
    return plan, there[:0], torch.stack((there, torch.zeros_like(there)), dim=1)


def with_whole_tiles(configs: AttentionConfigs, num_heads: int) -> AttentionConfigs:
    """Returns configs in which all rows of a tile are heads of one token, because each token has its own list.

    All tiles of keys are masked. With a second loop for unmasked tiles, the addresses of single keys would not fit the
    registers.
    """
    assert configs.latent is not None
    group = largest_divisor(num_heads, configs.prefill.rows)
    return replace(configs, is_uniform=True, latent=replace(configs.latent, group=group))


def lists_of(batch: ForwardBatch, most: int) -> _Lists:
    return _kept(batch, ("lists", most), lambda: _new_lists(batch, most))


def _new_lists(batch: ForwardBatch, most: int) -> _Lists:
    starts = torch.arange(batch.num_tokens + 1, dtype=torch.int32, device=batch.query_starts.device)
    token_seqs = starts[:-1]
    if batch.num_seqs != batch.num_tokens:
        seqs = np.repeat(np.arange(batch.num_seqs, dtype=np.int32), batch.query_lens)
        token_seqs = on_device({"seqs": seqs}, batch.pool.device)["seqs"]
    return _Lists(token_seqs, starts, starts * most, torch.empty_like(starts[:-1]))


def _kept(batch: ForwardBatch, key: object, make: Callable[[], Kept]) -> Kept:
    """Returns a value that the first layer makes and the others share. A replayed graph does not make it again."""
    known = batch.kernel_state
    if not isinstance(known, dict):
        known = batch.kernel_state = {}
    if key not in known:
        known[key] = make()
    found: Kept = known[key]
    return found


def _check(rows: IndexRows, plane: torch.Tensor, batch: ForwardBatch) -> None:
    """Asserts the kernels' preconditions."""
    num_tokens, num_heads, width = rows.queries.shape
    assert num_tokens == batch.num_tokens
    assert batch.key_limits is None
    assert num_heads <= MAX_HEADS
    assert width <= MAX_WIDTH
    assert rows.keys.shape == (num_tokens, width)
    assert rows.weights.shape == (num_tokens, num_heads)
    assert plane.shape[2:] == (1, width)
    assert plane.stride(3) == 1
    assert rows.weights.dtype == torch.float32
    assert rows.queries.dtype in DTYPES
    for given in (rows.queries, rows.keys, rows.weights, batch.slot_mapping):
        assert given.is_contiguous()
