"""Copies large ranges of memory past the cache, which is faster than memcpy; uses C, if there is a compiler."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable

import torch

from pd_cluster.native import build

log = logging.getLogger(__name__)

MIN_NBYTES = 64 << 10  # smaller copies should stay in the cache

Copy = Callable[[torch.Tensor, torch.Tensor], None]


@functools.cache
def streaming_copy() -> Copy | None:
    """Returns copy(target, source) for contiguous, non-overlapping bytes; None without the kernels."""
    if not build.are_wanted():
        return None
    try:
        library = build.load()
    except build.KernelsUnavailable:  # the model's loader has logged why
        return None
    function = library.pd_copy
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function.restype = None

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        nbytes = len(source)
        if nbytes < MIN_NBYTES:
            target.copy_(source)
            return
        assert len(target) == nbytes
        assert target.dtype == source.dtype == torch.uint8
        assert target.is_contiguous()
        assert source.is_contiguous()
        function(target.data_ptr(), source.data_ptr(), nbytes)

    return copy
