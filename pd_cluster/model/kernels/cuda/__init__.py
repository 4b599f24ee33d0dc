"""The model's kernels on CUDA, in Triton. Outside it only kv/copy_kernel imports triton."""
