"""Constant CPU work, timed between runs; if it takes longer, the machine is slower.

`python -m pd_cluster.bench.compare.constant_work CORE SHARE` computes it on one core, and prints the seconds. One part
(hashing) stays in the core's caches, the other copies bytes through memory. Together they take about a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Collection

from pd_cluster.errors import PdClusterError

NUM_HASHED, HASHED_NBYTES = 1024, 1 << 20
NUM_COPIED, COPIED_NBYTES = 128, 64 << 20  # more than the caches hold
DEADLINE_S = 120.0


def work(share: float) -> float:
    """Does this share of the work and returns its duration in seconds."""
    piece, large = bytes(HASHED_NBYTES), bytearray(COPIED_NBYTES)
    started_s = time.perf_counter()
    digest = hashlib.sha256()
    for _ in range(round(share * NUM_HASHED)):
        digest.update(piece)
    half = COPIED_NBYTES // 2
    view = memoryview(large)
    for at in range(round(share * NUM_COPIED)):
        view[half * (at % 2) : half * (at % 2 + 1)] = view[half * (1 - at % 2) : half * (2 - at % 2)]
    return time.perf_counter() - started_s


async def constant_work_s(cores: Collection[int], share: float = 1.0) -> float:
    """Runs on all these cores at the same time and returns the seconds of the slowest. Raises PdClusterError."""
    children = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, str(core), str(share)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        for core in sorted(cores)
    ]
    try:
        async with asyncio.timeout(DEADLINE_S):
            answers = [await child.communicate() for child in children]
    except TimeoutError:
        raise PdClusterError(f"constant work took more than {DEADLINE_S:g} s; end other programs here") from None
    finally:
        for child in children:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
    if any(child.returncode for child in children):
        raise PdClusterError("constant work failed; its error is above")
    return max(float(output) for output, _ in answers)


if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[1])})
    print(work(float(sys.argv[2])))
