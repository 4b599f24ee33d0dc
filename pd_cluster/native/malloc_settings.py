"""Configures glibc's malloc to keep freed memory for the next step; returns memory to the system on request.

By default, malloc returns large temporaries to the system and gets newly zeroed pages for each new one. With a small
model, this takes a quarter of a prompt's CPU time.
"""

from __future__ import annotations

import ctypes
import mmap
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's parameters, from malloc.h
KEPT_NBYTES = 256 << 20  # free memory that is kept at the heap's end
LARGEST_NBYTES = (
    32 << 20
)  # larger temporaries are mapped. This is malloc's default, but it must be set together with the other parameter
CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")  # users' settings


def keep_what_is_freed() -> bool:
    """Configures this process. Returns False if the environment configures malloc, or if malloc is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(os.environ.get(name) for name in CHOICES):
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST_NBYTES)) and bool(mallopt(TRIM_THRESHOLD, KEPT_NBYTES))


def give_pages_back(address: int, nbytes: int) -> None:
    """Returns the whole pages in a range of private memory to the system; their contents become zeros or undefined."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise")


def give_freed_back() -> None:
    """Returns to the system the freed memory that glibc's malloc keeps."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def resident_nbytes() -> int:
    """Returns the bytes of memory that this process uses, including shared pages."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE
