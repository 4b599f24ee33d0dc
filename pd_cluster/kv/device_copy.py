"""Copies blocks unchanged from pool to pool on one device.

With Triton, this takes one launch, otherwise a few. The functions only launch copies; the caller orders them and
determines when they have ended (transport/link_copies.py).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch

from pd_cluster.devices.device import has_triton
from pd_cluster.kv.pool_memory import ids_on

WORD_NBYTES = 8
MAX_COPIES = 4  # up to this many stretches that are contiguous in both pools are copied by the driver, one by one

Runs = list[tuple[int, int, int]]
CopyPairs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def copy_blocks(source: torch.Tensor, target: torch.Tensor, ids: list[int], into: list[int], runs: Runs) -> None:
    """Copies `target[into] = source[ids]`, [num_blocks, nbytes] uint8. `runs`: the same pairs as stretches."""
    if _has_words(source) and _has_words(target):
        source, target = source.view(torch.int64), target.view(torch.int64)
    there = [target[start : start + count] for _, start, count in runs[:MAX_COPIES]]
    here = [source[first : first + count] for first, _, count in runs[:MAX_COPIES]]
    is_plain = len(runs) <= MAX_COPIES and all(each.is_contiguous() for each in there + here)
    kernel = None if is_plain or source.dtype != torch.int64 else _kernel(source.device.type)
    if kernel is not None:
        kernel(source, target, ids_on(source.device, torch.tensor(list(zip(ids, into, strict=True)))))
    elif is_plain:
        for to, of in zip(there, here, strict=True):
            to.copy_(of)
    else:
        there += [target[start : start + count] for _, start, count in runs[MAX_COPIES:]]
        here += [source[first : first + count] for first, _, count in runs[MAX_COPIES:]]
        torch._foreach_copy_(there, here)


def warm(device: torch.device) -> None:
    """Compiles the kernel, if Triton is installed. Called when a link opens, so that no transfer has to wait for it."""
    kernel = _kernel(device.type)
    if kernel is not None:
        words = torch.zeros(2, 16, dtype=torch.int64, device=device)  # sizes like a pool's, for Triton
        kernel(words, words, ids_on(device, torch.tensor([[0, 1]])))


def _has_words(blocks: torch.Tensor) -> bool:
    """Whether every block of [num_blocks, nbytes] begins and ends at a multiple of 8 bytes."""
    return not any(each % WORD_NBYTES for each in (blocks.shape[1], blocks.stride(0), blocks.storage_offset()))


@functools.cache
def _kernel(device_type: str) -> CopyPairs | None:
    if device_type != "cuda" or not has_triton():
        return None
    copy: CopyPairs = importlib.import_module("pd_cluster.kv.copy_kernel").copy_pairs
    return copy
