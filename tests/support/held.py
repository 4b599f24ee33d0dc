"""Counts what this process holds: shared memory, descriptors, threads, children, temporary folders."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections import Counter
from pathlib import Path

SELF = Path("/proc/self")
SETTLE_S = 10.0  # the kernel and idle threads need time to release things
KIND = re.compile(r"\d+")  # numbers in a descriptor's target: inodes, ports


def held() -> Counter[str]:
    """Counts holdings by name. Shared memory is in pages of memfds, mapped or not, because RSS does not include it."""
    found: Counter[str] = Counter()
    for entry in (SELF / "fd").iterdir():
        try:
            target = os.readlink(entry)
            if target.startswith("/memfd:"):
                found["pages of memfds"] += os.stat(entry).st_blocks
        except FileNotFoundError:  # the descriptor of this very listing
            continue
        found[f"descriptor {KIND.sub('N', target)}"] += 1
    for line in (SELF / "smaps").read_text().splitlines():
        if "/memfd:" in line:
            found["mappings of memfds"] += 1
    for task in (SELF / "task").iterdir():
        found[f"thread {(task / 'comm').read_text().strip()}"] += 1
        for pid in (task / "children").read_text().split():
            found[f"child {(Path('/proc') / pid / 'comm').read_text().strip()}"] += 1
    found.update(f"temporary {entry.name}" for entry in Path(tempfile.gettempdir()).glob("pd-cluster-*"))
    found.update(f"/dev/shm/{entry.name}" for entry in Path("/dev/shm").iterdir() if _is_own(entry))
    return found


def more_than(before: Counter[str]) -> Counter[str]:
    """Returns what is held beyond `before`: an empty counter once nothing is, or the rest after SETTLE_S."""
    deadline_s = time.monotonic() + SETTLE_S
    while (more := held() - before) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return more


def processes_of(text: str) -> list[str]:
    """Returns the command lines of other processes that contain `text`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        if entry.parent.name != str(os.getpid()):
            try:
                line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # the process has ended
                continue
            found += [line] if text in line else []
    return found


def runs(pid: int) -> bool:
    """Returns whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _is_own(entry: Path) -> bool:
    try:
        return entry.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False
