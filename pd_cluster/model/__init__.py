"""A checkpoint as a torch module that attends through the paged pool."""

import os

# MKL multiplies attention's small matrices on CPUs. By default its bits depend on where a thread's buffers are in
# memory, at least on AMD processors; in this mode they do not. MKL reads the variable at its first product.
os.environ.setdefault("MKL_CBWR", "AUTO")
