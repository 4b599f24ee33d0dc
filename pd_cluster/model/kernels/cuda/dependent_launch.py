"""Programmatic dependent launch: a kernel's programs start before the previous kernel has ended, and wait for its end.

Every kernel launched in this way waits before it reads or writes anything that another kernel may use. So when it ends,
all earlier kernels have ended. After the wait it lets the next kernel start at once, because that kernel waits, too.
Other kernels are launched as usual, after the end of the previous one.
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
    """Returns the launch arguments. Without `pdl`, Triton's option is omitted, because the interpreter rejects it."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
