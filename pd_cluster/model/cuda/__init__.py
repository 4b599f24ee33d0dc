"""The model's kernels on CUDA, in Triton. Only this package imports triton."""
