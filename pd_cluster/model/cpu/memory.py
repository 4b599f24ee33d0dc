"""glibc's malloc, told to keep what a step frees for the next one.

By itself it gives large temporaries back to the kernel and gets zeroed pages for each of them anew: a quarter of a
prompt's CPU time, with a small model.
"""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt, by malloc.h
KEPT_NBYTES = 256 << 20  # at the heap's end
LARGEST_NBYTES = 32 << 20  # of what is kept; malloc's own limit, too, but it must be told once the other is set
CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")  # of whoever started this process


def keep_what_is_freed() -> bool:
    """For this process. False where it was told otherwise, or has another malloc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(os.environ.get(name) for name in CHOICES):
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST_NBYTES)) and bool(mallopt(TRIM_THRESHOLD, KEPT_NBYTES))
