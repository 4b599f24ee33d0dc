"""Memory freed by one step is reused by the next, without new pages from the kernel."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pd_cluster.native.malloc_settings import CHOICES

PROGRAM = """
import ctypes, resource
from pd_cluster.native.malloc_settings import keep_what_is_freed

def taken(size):
    # as torch takes memory for a tensor
    block = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(block), ctypes.c_size_t(64), ctypes.c_size_t(size)) == 0
    ctypes.memset(block, 1, size)
    return block

libc = ctypes.CDLL(None)
print(keep_what_is_freed())
for step in range(10):
    if step == 5:  # by then the heap is as large as it gets
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for block in [taken(24 << 20) for _ in range(6)]:
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(**environment: str) -> tuple[bool, int]:
    env = {name: value for name, value in os.environ.items() if name not in CHOICES}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**env, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    is_set, num_faults = done.stdout.split()
    return is_set == "True", int(num_faults)


def test_large_temporaries_cost_no_page_faults() -> None:
    is_set, num_faults = run()
    if not is_set:
        pytest.skip("this system's malloc is not glibc's")
    assert num_faults < 1000


def test_who_has_chosen_for_himself_is_left_alone() -> None:
    is_set, num_faults = run(MALLOC_TRIM_THRESHOLD_="131072")
    assert not is_set
    assert num_faults > 10_000
