"""The C kernels of the CPU forward pass: source, build and calls."""
