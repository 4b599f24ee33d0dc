"""The C kernels of the CPU forward pass: source, how it is built, how it is called."""
