"""Copies blocks of one pool into blocks of another with one launch of a Triton kernel, not one launch per block.

Imported only if Triton is installed. Knows nothing of a block's content.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WORDS_PER_PROGRAM = 4096  # words of 8 bytes


@triton.jit  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]  # Triton cannot compile annotations with names of this module
    source,
    target,
    pairs,
    source_stride,
    target_stride,
    num_words,
    WORDS: tl.constexpr,
):
    """Copies part j of the i-th pair of blocks in program (i, j)."""
    pair, part = tl.program_id(0), tl.program_id(1)
    first = tl.load(pairs + 2 * pair)
    into = tl.load(pairs + 2 * pair + 1)
    at = part * WORDS + tl.arange(0, WORDS)
    inside = at < num_words
    words = tl.load(source + first * source_stride + at, mask=inside)
    tl.store(target + into * target_stride + at, words, mask=inside)


def copy_pairs(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copies `target[t] = source[s]` for every (s, t) of `pairs` [n, 2] int64, all on one device.

    `source` and `target` are [num_blocks, num_words] int64. Each block must be contiguous; there may be gaps between
    blocks.
    """
    num_words = source.shape[1]
    grid = (len(pairs), triton.cdiv(num_words, WORDS_PER_PROGRAM))
    _copy[grid](source, target, pairs, source.stride(0), target.stride(0), num_words, WORDS=WORDS_PER_PROGRAM)
