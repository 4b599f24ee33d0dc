"""A checkpoint as a torch module whose attention uses the paged pool."""

import os

# MKL computes attention's small matrix products on CPUs. By default their bits depend on the addresses of a thread's
# buffers, at least on AMD processors; in this mode they do not. MKL reads the variable at its first product.
os.environ.setdefault("MKL_CBWR", "AUTO")
