"""Programmatic dependent launch: a kernel's programs start while the previous kernel ends, and wait for its end here.

Every kernel launched in this way waits before it reads or writes anything that another kernel may have written or read:
its own end then implies the end of all earlier kernels. It lets the next kernel start at once, because that one waits,
too. Other kernels are launched as usual, after the end of the previous one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def launched(pdl: bool) -> dict[str, bool]:
    """Returns the arguments of a launch. Without `pdl` Triton's option is omitted: the interpreter does not know it."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
