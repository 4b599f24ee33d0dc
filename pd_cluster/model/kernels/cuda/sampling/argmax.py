"""Greedy sampling on the device. Does not use requests, changes no logits, and never waits for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from pd_cluster.model.kernels.cuda.elementwise_kernels import DTYPES
from pd_cluster.model.kernels.cuda.sampling import argmax_kernels as kernels

FEW_ROWS = 8  # with fewer rows, parts are small, so that there are enough programs for the device
FEW_ROWS_BLOCK, BLOCK = 1024, 8192


class BestTokens(NamedTuple):
    """The best token of each row of logits; every field is [num_rows]."""

    token_ids: torch.Tensor  # int64: the most likely token; of equal ones, the lowest id
    logits: torch.Tensor  # float32: its logit, finite
    irregular: torch.Tensor  # bool: the row contained NaN or +inf, or only -inf


def argmax_rows(logits: torch.Tensor) -> BestTokens:
    """Returns the best tokens of logits [num_rows, vocab_size]; irregular logits count as in `peaks`.

    NaN counts as -inf, and +inf as the largest float32; a row without finite logits gives token 0 with logit 0. Only
    callers that treat such rows differently need `irregular`.
    """
    num_rows, vocab_size = logits.shape
    assert logits.dtype in DTYPES
    assert logits.stride(1) == 1
    assert vocab_size > 0
    block = FEW_ROWS_BLOCK if num_rows <= FEW_ROWS else BLOCK
    num_parts = triton.cdiv(vocab_size, block)
    best = BestTokens(
        logits.new_empty(num_rows, dtype=torch.int64),
        logits.new_empty(num_rows, dtype=torch.float32),
        logits.new_empty(num_rows, dtype=torch.bool),
    )
    if not num_rows:
        return best
    values = logits.new_empty(num_rows, num_parts, dtype=torch.float32)
    token_ids = logits.new_empty(num_rows, num_parts, dtype=torch.int32)
    irregular = logits.new_empty(num_rows, num_parts, dtype=torch.int8)
    kernels.best_of_parts[(num_rows, num_parts)](
        logits,
        values,
        token_ids,
        irregular,
        logits.stride(0),
        VOCAB_SIZE=vocab_size,
        BLOCK=block,
        num_warps=block // 256 if block <= FEW_ROWS_BLOCK else 8,
    )
    kernels.best_of_rows[(num_rows,)](
        values,
        token_ids,
        irregular,
        best.logits,
        best.token_ids,
        best.irregular,
        NUM_PARTS=num_parts,
        BLOCK=triton.next_power_of_2(num_parts),
        num_warps=1,
    )
    return best
