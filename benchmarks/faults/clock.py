"""Makes clocks jump under a cluster: the wall clock by an hour, and the monotonic clock by a minute as after a suspend.

The machine's own clocks are unchanged. A small library, compiled on the spot, adds to the values that the cluster's
processes read.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.faults.ground import Ground
from benchmarks.faults.terms import Fault, Means, Seen
from pd_cluster.errors import PdClusterError
from pd_cluster.tables import counted

SOURCE = Path(__file__).with_suffix(".c")
ENTRY = struct.Struct("=qqq")  # matches the C source: pid, realtime_ns, monotonic_ns
NUM_ENTRIES = 64
COMPILE_TIMEOUT_S = 60.0
HOUR_S, SUSPEND_S = 3600.0, 60.0
REST_S = 3.0  # the longest permitted silence


class Clock(Ground):
    """The clocks of a cluster, as its processes read them."""

    def __init__(self) -> None:
        self._table: mmap.mmap | None = None
        self._pids: list[int] = []

    def problem(self) -> str:
        return "" if _compiler() else "no C compiler (gcc or cc) on PATH"

    @contextlib.contextmanager
    def stand(self) -> Iterator[Mapping[str, str]]:
        """Compiles the library. Raises PdClusterError if that fails."""
        with tempfile.TemporaryDirectory(prefix="pd-cluster-clock-") as name:
            library, table = Path(name, "clock.so"), Path(name, "table")
            _compile(library)
            table.write_bytes(bytes(NUM_ENTRIES * ENTRY.size))
            with table.open("r+b") as file, mmap.mmap(file.fileno(), 0) as self._table:
                preload = ":".join(filter(None, (str(library), os.environ.get("LD_PRELOAD", ""))))
                yield {"LD_PRELOAD": preload, "BENCH_CLOCK_FILE": str(table)}
                self._table, self._pids = None, []

    def move(self, realtime_s: float = 0.0, monotonic_s: float = 0.0, pid: int = 0) -> None:
        """Sets the offset from the machine's clocks for every process, or for one."""
        assert self._table is not None
        if pid and pid not in self._pids:
            if len(self._pids) + 1 == NUM_ENTRIES:
                raise PdClusterError(f"no more than {NUM_ENTRIES - 1} processes can have clocks of their own")
            self._pids.append(pid)
        at = self._pids.index(pid) + 1 if pid else 0
        entry = ENTRY.pack(pid, int(realtime_s * 1e9), int(monotonic_s * 1e9))
        self._table[at * ENTRY.size : (at + 1) * ENTRY.size] = entry


async def jump(means: Means, clock: Clock) -> Seen:
    """Moves the wall clock an hour on and back, an hour back and on; then skips a minute for every process."""
    stage = means.stage
    for realtime_s in (HOUR_S, 0.0, -HOUR_S, 0.0):
        clock.move(realtime_s)
        await asyncio.sleep(REST_S)
        await stage.whole()
    clock.move(SUSPEND_S, SUSPEND_S)  # for all at once, as on one machine
    await asyncio.sleep(REST_S)
    await stage.whole()
    for pid in (stage.pid_of("decode-1"), *stage.rank_pids("decode-1")):  # one host among others
        clock.move(SUSPEND_S, SUSPEND_S, pid)
    await asyncio.sleep(REST_S)
    await stage.whole()
    return Seen(figures=[counted("clock jumps", 6, "jumps")])


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC") or "gcc") or shutil.which("cc")


def _compile(library: Path) -> None:
    command = [_compiler() or "cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl", "-lpthread"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PdClusterError(f"the library that moves clocks cannot be compiled: {error}") from None
    if done.returncode:
        raise PdClusterError(f"the library that moves clocks cannot be compiled: {done.stderr.strip()[:300]}")


CLOCK = Clock()
CLOCK_FAULTS: dict[str, Fault] = {
    "clocks": Fault("clocks that jump by an hour, and by a suspend", lambda means: jump(means, CLOCK), ground=CLOCK),
}
