"""Latent attention (MLA) on NPUs, with torch-npu's fused operator: absorbed queries; latents are both keys and values.

The operator reads the pool's two planes: latents, and the rotated parts beside them. It supports only WIDTHS, and
numbers of heads that are powers of two; other numbers are filled up with heads of zeros, whose results are dropped. A
step's sequences are packed (TND). All versions of the operator accept up to 16 tokens per sequence, so a longer chunk
of a prompt is cut into several sequences. A call accepts up to 4,096 sequences, so a larger step takes several calls.
`problem` reports at load what the operator does not support. Nothing here has run on hardware.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from pd_cluster.devices.device import Device
from pd_cluster.errors import called
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.model.inputs.forward_batch import ForwardBatch, on_device
from pd_cluster.model.kernels.npu import npu_attention
from pd_cluster.model.kernels.npu.npu_attention import CAUSAL, MAX_PACKED_SEQS, PlannedStep, causal_mask, planned_step
from pd_cluster.model.kernels.npu.ops import NpuOps, rotated
from pd_cluster.model.layers.attention import sdpa
from pd_cluster.model.layers.ops import Latents, Rope

WIDTHS = (512, 64)  # of the latent and its rotated part
BLOCK_SIZES = (16, 128)
MAX_HEADS = 128
MAX_QUERIES = 16  # tokens of one sequence in a call, at most


def takes_widths(layout: KVLayout) -> bool:
    """Whether the operator supports the widths of a model's latents."""
    return tuple(plane.width for plane in layout.planes[:2]) == WIDTHS


def problem(layout: KVLayout, num_heads: int, max_num_seqs: int) -> str:
    """Returns why the operator does not support this pool and model; "" if it does."""
    if layout.dtype not in npu_attention.DTYPES:
        return f"{called('dtype')} {layout.dtype}: attention on NPUs supports {' or '.join(npu_attention.DTYPES)}"
    if num_heads > MAX_HEADS:
        return f"{num_heads} heads: latent attention on NPUs supports at most {MAX_HEADS}"
    if layout.block_size not in BLOCK_SIZES:
        sizes = " or ".join(map(str, BLOCK_SIZES))
        return f"{called('block_size')} {layout.block_size}: latent attention on NPUs supports {sizes}"
    if max_num_seqs > MAX_PACKED_SEQS:
        return f"{called('max_num_seqs')} {max_num_seqs}: attention on NPUs supports at most {MAX_PACKED_SEQS} at once"
    return ""


class _PlannedCalls(NamedTuple):
    """A step's calls, for all its layers, in the order of its tokens."""

    calls: tuple[PlannedStep, ...]


class NpuLatentOps(NpuOps):
    """`NpuOps` with latent attention."""

    wide_latents = False

    def __init__(self, device: Device, attention: str) -> None:
        super().__init__(sdpa.write_and_attend, attention)
        self._mask = causal_mask(device)

    def attend_latents(
        self, latents: Latents, queries: torch.Tensor, kept: torch.Tensor, rope: Rope, batch: ForwardBatch
    ) -> torch.Tensor:
        num_tokens, width = len(queries), latents.width
        latent = self.norm(kept[:, :width].contiguous(), latents.norm)
        ends = rotated(kept[:, None, width:], rope)  # [num_tokens, 1, rope_width]
        npu_attention.write_kv(latents.layer_idx, latent[:, None], ends, batch)
        batch.layer_written(latents.layer_idx, None)
        apart = queries.view(num_tokens, latents.num_heads, -1)
        heads = apart[..., : latents.query_width].transpose(0, 1)  # [num_heads, num_tokens, query_width]
        whole = 1 << (latents.num_heads - 1).bit_length()
        absorbed = padded_heads(torch.bmm(heads, latents.keys).transpose(0, 1), whole)
        turned = padded_heads(rotated(apart[..., latents.query_width :], rope), whole)
        summed = self._summed(latents, absorbed, turned, batch)[:, : latents.num_heads]
        return torch.bmm(summed.transpose(0, 1), latents.values).transpose(0, 1).reshape(num_tokens, -1)

    def _summed(
        self, latents: Latents, absorbed: torch.Tensor, turned: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Returns the weighted sums of latents, [num_tokens, num_heads, width]."""
        if latents.layer_idx == 0 or not isinstance(batch.kernel_state, _PlannedCalls):
            batch.kernel_state = _PlannedCalls(_in_calls(planned_step(batch), batch))
        found, start = [], 0
        for call in batch.kernel_state.calls:
            own = slice(start, start + call.query_ends[-1])
            found.append(self._call(latents, absorbed[own], turned[own], batch, call))
            start = own.stop
        return found[0] if len(found) == 1 else torch.cat(found)

    def _call(
        self, latents: Latents, absorbed: torch.Tensor, turned: torch.Tensor, batch: ForwardBatch, step: PlannedStep
    ) -> torch.Tensor:
        latent_pool, rope_pool = (pool.flatten(2) for pool in batch.pool.layer(latents.layer_idx))
        # For single tokens some versions of the operator accept no mask; without one, the tokens see all keys.
        is_decode = len(step.query_ends) == len(absorbed)
        found: torch.Tensor = torch.ops.npu.npu_fused_infer_attention_score(
            absorbed,
            latent_pool,
            latent_pool,
            query_rope=turned,
            key_rope=rope_pool,
            atten_mask=None if is_decode else self._mask,
            sparse_mode=0 if is_decode else CAUSAL,
            block_table=step.tables,
            block_size=latent_pool.shape[1],
            input_layout="TND",
            actual_seq_lengths=step.query_ends,
            actual_seq_lengths_kv=step.context_lens,
            num_heads=absorbed.shape[1],
            num_key_value_heads=1,
            scale=latents.scaling,
        )[0]
        return found


def padded_heads(x: torch.Tensor, whole: int) -> torch.Tensor:
    """Returns x [num_tokens, num_heads, width], contiguous, with heads of zeros appended up to `whole` heads."""
    num_tokens, num_heads, width = x.shape
    if whole == num_heads:
        return x.contiguous()
    found = x.new_zeros(num_tokens, whole, width)
    found[:, :num_heads] = x
    return found


def _in_calls(step: PlannedStep, batch: ForwardBatch) -> tuple[PlannedStep, ...]:
    """Returns the calls of a step, with sequences of more than MAX_QUERIES tokens split into pieces."""
    lens = np.asarray(batch.query_lens)
    if lens.max() <= MAX_QUERIES:
        return (step,)
    counts = -(-lens // MAX_QUERIES)
    owners = np.repeat(np.arange(len(lens)), counts)  # [num_pieces]
    stops = (np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts) + 1) * MAX_QUERIES
    stops = np.minimum(stops, lens[owners])  # counted in tokens of the sequence that the piece belongs to
    ends = stops + (np.cumsum(lens) - lens)[owners]
    context_lens = np.asarray(step.context_lens)[owners] - lens[owners] + stops
    tables = step.tables.index_select(0, on_device({"owners": owners}, batch.pool.device)["owners"])
    calls = []
    for first in range(0, len(owners), MAX_PACKED_SEQS):
        own = slice(first, first + MAX_PACKED_SEQS)
        before = int(ends[first - 1]) if first else 0
        calls.append(PlannedStep(tables[own], (ends[own] - before).tolist(), context_lens[own].tolist()))
    return tuple(calls)
