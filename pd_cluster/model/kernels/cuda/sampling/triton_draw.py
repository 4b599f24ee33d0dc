"""Draws with top_k and top_p on the device, in three launches. Does not use requests; never waits for the device.

The kept tokens and the drawn token are exactly those of `token_draw.draw`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton

from pd_cluster.model.kernels.cuda.elementwise_kernels import DTYPES
from pd_cluster.model.kernels.cuda.sampling import draw_kernels as kernels
from pd_cluster.model.kernels.fixed_point import MAX_VOCAB_SIZE

BINS = 8  # bins of logits, each draw_kernels.OCTAVES wide; the last bin has all remaining tokens
PART, BLOCK = 4096, 256  # a program weighs PART tokens, BLOCK at a time, with separate sums for each bin
GATHERED = 1024  # how many tokens are copied, or searched, at a time
SECTIONS = 4  # each pass of the search divides the remaining range into this many sections


class DrawnTokens(NamedTuple):
    """One entry for each drawn row."""

    token_ids: torch.Tensor  # int64
    worst: torch.Tensor  # float32: the lowest logit that top_k and top_p keep
    nums_kept: torch.Tensor  # int32: kept tokens; of several with the lowest logit, the lowest ids are kept


def draw_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    best: torch.Tensor,
    best_ids: torch.Tensor,
    knobs: Mapping[str, torch.Tensor],
) -> DrawnTokens:
    """Draws a token from each of `rows` [num_rows] int64 of logits [all rows, vocab_size].

    Allocates 8 bytes per logit of these rows. `best` and `best_ids` [all rows]: the results of `argmax_rows`; `knobs`:
    the fields of DrawParameters, each [num_rows]. A row without candidates gets its best token.
    """
    num_rows, vocab_size = len(rows), logits.shape[1]
    assert logits.dtype in DTYPES
    assert logits.stride(1) == 1
    assert 0 < vocab_size <= MAX_VOCAB_SIZE
    num_parts = triton.cdiv(vocab_size, PART)
    drawn = DrawnTokens(
        logits.new_empty(num_rows, dtype=torch.int64),
        logits.new_empty(num_rows, dtype=torch.float32),
        logits.new_empty(num_rows, dtype=torch.int32),
    )
    if not num_rows:
        return drawn
    nums = logits.new_empty(num_rows, num_parts, BINS, dtype=torch.int32)
    masses = logits.new_empty(num_rows, num_parts, BINS, dtype=torch.int64)
    values = logits.new_empty(num_rows, vocab_size, dtype=torch.float32)
    token_ids = logits.new_empty(num_rows, vocab_size, dtype=torch.int32)
    nums_likely = logits.new_empty(num_rows, dtype=torch.int32)
    inverse_temperature, top_k, top_p = knobs["inverse_temperature"], knobs["top_k"], knobs["top_p"]
    log_min_p, uniform = knobs["log_min_p"], knobs["uniform"]
    sizes = {"VOCAB_SIZE": vocab_size, "BINS": BINS, "enable_fp_fusion": False}
    parts = triton.next_power_of_2(num_parts)
    grid = (num_rows, num_parts)
    kernels.weigh_bins[grid](
        *(logits, rows, best, inverse_temperature, log_min_p, nums, masses, logits.stride(0)),
        **sizes,
        PART=PART,
        BLOCK=BLOCK,
        num_warps=4,
    )
    kernels.gather_likely[grid](
        *(logits, rows, best, inverse_temperature, log_min_p, top_k, top_p, nums, masses),
        *(values, token_ids, nums_likely, logits.stride(0)),
        **sizes,
        PART=PART,
        BLOCK=GATHERED,
        PARTS=parts,
        num_warps=4,
    )
    kernels.choose_among[(num_rows,)](
        *(rows, best, best_ids, inverse_temperature, top_k, top_p, uniform, nums, masses),
        *(values, token_ids, nums_likely, *drawn, num_parts),
        **sizes,
        BLOCK=GATHERED,
        PARTS=parts,
        SECTIONS=SECTIONS,
        num_warps=8,
    )
    return drawn
