"""The model's kernels on CUDA, in Triton. Outside this package only kv/copy_kernel imports triton."""
