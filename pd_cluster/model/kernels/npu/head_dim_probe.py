"""Tests packed attention on this device, before a model uses it, with head sizes outside the operator's description.

For `--npu-head-dims wide`. Random sequences, computed in chunks and then decoded, pass through the same write and call
as a model's, and the results are compared with float32 attention on the host. Independent of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from pd_cluster.devices.device import Device, synchronize
from pd_cluster.errors import first_line
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.pool_memory import TORCH_DTYPES
from pd_cluster.model.inputs.forward_batch import build_batch
from pd_cluster.model.kernels.npu.npu_attention import NpuAttention
from pd_cluster.model.layers.attention.sdpa import Scoring
from pd_cluster.types import Request, RequestSpec, Sampling

STEPS = ((130, 60, 1), (3, 1, 1), (1, 1, 1))  # tokens of three sequences per step: chunks, then decode
BLOCK_TABLES = ((3, 0), (1,), (2,))  # the first sequence has two blocks, in descending order
WINDOW = 37  # a window that is wrong by one key changes a row by a sixth
# The largest error of a head's row, relative to the row's size; weights and results are each rounded once.
TOLERANCE = {"float32": 1e-3, "float16": 0.01, "bfloat16": 0.03}
SEED = 11


class _Numbers(NamedTuple):
    """One sequence's random inputs, in the pool's dtype, on the host."""

    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    keys: torch.Tensor  # [num_tokens, num_kv_heads, head_dim]
    values: torch.Tensor


def why_not(device: Device, layout: KVLayout, num_heads: int, has_window: bool, has_sinks: bool) -> str:
    """Returns what is wrong with this device's packed attention for such heads; "" if its results are correct.

    `has_window`: tests layers with a window in addition to layers without.
    """
    small = replace(layout, num_layers=1)
    dtype = TORCH_DTYPES[layout.dtype]
    made = torch.Generator().manual_seed(SEED)
    num_tokens = [sum(each) for each in zip(*STEPS, strict=True)]
    numbers = [_numbers(count, num_heads, small, dtype, made) for count in num_tokens]
    sinks = torch.randn(num_heads, generator=made).to(dtype) if has_sinks else None
    scaling = small.head_dim**-0.5
    for window in (None, WINDOW) if has_window else (None,):
        scoring = Scoring(scaling, window, None, sinks)
        try:
            with torch.inference_mode():
                found = _found(device, small, numbers, scoring)
        except RuntimeError as error:  # raised by torch-npu, or later by an asynchronous launch
            return f"the operator rejects it: {first_line(error)}"
        for actual, each in zip(found, numbers, strict=True):
            expected = expected_of(*each, scoring)
            error_size = float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
            if not error_size <= TOLERANCE[layout.dtype]:
                return (
                    f"its results differ from float32 by {error_size:.1e} of their size, "
                    f"with {'no window' if window is None else f'a window of {window}'}"
                )
    return ""


def expected_of(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Computes one sequence's attention in float32, without softcap: [num_tokens, num_heads, head_dim]."""
    num_tokens, num_heads, _ = query.shape
    keys, values = (each.float().repeat_interleave(num_heads // each.shape[1], dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scoring.scaling
    at = torch.arange(num_tokens)
    distance = at[:, None] - at  # from each query back to each key
    window = num_tokens if scoring.sliding_window is None else scoring.sliding_window
    scores = scores.masked_fill((distance < 0) | (distance >= window), float("-inf"))
    if scoring.sinks is not None:
        sinks = scoring.sinks.float()[:, None, None].expand(-1, num_tokens, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :num_tokens], values)


def _numbers(num_tokens: int, num_heads: int, layout: KVLayout, dtype: torch.dtype, made: torch.Generator) -> _Numbers:
    heads = (num_heads, layout.local_kv_heads, layout.local_kv_heads)
    return _Numbers(*(torch.randn(num_tokens, num, layout.head_dim, generator=made).to(dtype) for num in heads))


def _found(device: Device, layout: KVLayout, numbers: Sequence[_Numbers], scoring: Scoring) -> list[torch.Tensor]:
    """Computes the sequences together, in STEPS; returns for each [num_tokens, num_heads, head_dim] float32."""
    pool = KVPool(layout, num_blocks=sum(map(len, BLOCK_TABLES)), device=device)
    try:
        attention = NpuAttention(device, "TND")
        if scoring.sinks is not None:
            scoring = replace(scoring, sinks=scoring.sinks.to(device.torch_name))
        requests = [
            Request(f"probe {i}", RequestSpec([0] * len(each.query), Sampling()), tables=[list(table)])
            for i, (each, table) in enumerate(zip(numbers, BLOCK_TABLES, strict=True))
        ]
        parts: list[list[torch.Tensor]] = [[] for _ in numbers]
        starts = [0] * len(numbers)
        for step in STEPS:
            batch = build_batch(list(zip(requests, step, strict=True)), pool)
            ends = [start + count for start, count in zip(starts, step, strict=True)]
            query, keys, values = (
                torch.cat([each[kind][start:end] for each, start, end in zip(numbers, starts, ends, strict=True)]).to(
                    device.torch_name
                )
                for kind in range(3)
            )
            found = attention.write_and_attend(0, query.transpose(0, 1), keys, values, batch, scoring)
            synchronize(device)  # raises the errors of launches
            for part, rows in zip(parts, torch.split(found.cpu().float(), list(step)), strict=True):
                part.append(rows)
            for request, count in zip(requests, step, strict=True):
                request.num_computed_tokens += count
            starts = ends
        return [torch.cat(part) for part in parts]
    finally:
        pool.close()
