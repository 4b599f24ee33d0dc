"""The model's kernels on CUDA, in Triton. Outside of this package only kv/copy_kernel imports triton."""
