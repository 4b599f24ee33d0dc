"""Binds the threads of torch's OpenMP team to cores, in C."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from pd_cluster.native import build

WORD_NBITS = 64  # size of a word in the kernel's core masks


def team_binding() -> Callable[[int, frozenset[int]], list[int]]:
    """Returns `bind(num_threads, cores)`, which returns the threads' ids and may raise OSError.

    Raises KernelsUnavailable.
    """
    if not build.are_wanted():
        raise build.KernelsUnavailable("PD_CLUSTER_CPU_KERNELS is 0")
    function = build.load().pd_place
    function.argtypes = [ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p]
    function.restype = ctypes.c_int64

    def bind(num_threads: int, cores: frozenset[int]) -> list[int]:
        nbytes = (max(cores) // WORD_NBITS + 1) * WORD_NBITS // 8
        mask = sum(1 << core for core in cores).to_bytes(nbytes, "little")
        threads = (ctypes.c_int64 * num_threads)()
        if error := function(num_threads, mask, nbytes, threads):
            raise OSError(error, os.strerror(error))
        return [each for each in threads if each]

    return bind
