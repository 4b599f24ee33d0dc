"""A checkpoint as a torch module that attends through the paged pool."""

import os

# MKL multiplies attention's small matrices on CPUs. By default its bits depend on where a thread's buffers lie in
# memory, at least on AMD's processors; in this mode they do not. It is read at MKL's first product.
os.environ.setdefault("MKL_CBWR", "AUTO")
