"""The forward pass on NVIDIA GPUs: Triton kernels and what launches them. Nothing outside imports it without a GPU."""
