"""Checks the ordering of memory accesses in a kernel's PTX."""

from __future__ import annotations

import re

# Matches a count of complete splits with a barrier before it (no store between) and another after it. So all
# threads of the program have stored before the count's release, and none loads before its acquire.
ORDERED_COUNT = re.compile(
    r"bar\.sync\s+0;(?:(?!st\.global|bar\.sync)[^$])*?atom\.global\.gpu\.acq_rel\.add"
    r"(?:(?!ld\.global|st\.global)[^$])*?bar\.sync\s+0;"
)
ACCESS = re.compile(r"\b(?:ld|st|atom|red)(?:\.volatile)?\.global|\bcp\.async")
WAIT = "griddepcontrol.wait"


def order_of(ptx: str) -> dict[str, int]:
    """Counts atomic operations on global memory (`counts`), those that order results around them (`ordered_counts`),
    waits for the previous kernel, accesses before the first wait, and permissions for the next kernel (`lets_go`).
    """
    return {
        "counts": len(re.findall(r"\batom\.(?!shared)", ptx)),
        "ordered_counts": len(ORDERED_COUNT.findall(ptx)),
        "waits": ptx.count(WAIT),
        "early_accesses": len(ACCESS.findall(ptx.partition(WAIT)[0])) if WAIT in ptx else 0,
        "lets_go": ptx.count("griddepcontrol.launch_dependents"),
    }
