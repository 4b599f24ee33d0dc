"""The C kernels of the CPU forward pass: their source, build and calls."""
