"""What processor this is. Knows nothing of tensors."""

from __future__ import annotations

import functools
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def is_intel() -> bool:
    """False where the system does not say."""
    try:
        return any(line.split() == ["vendor_id", ":", "GenuineIntel"] for line in CPUINFO.read_text().splitlines())
    except (OSError, UnicodeDecodeError):
        return False
