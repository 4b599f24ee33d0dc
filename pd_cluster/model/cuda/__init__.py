"""The model's kernels on CUDA, in Triton. Outside it only transport/copy_kernel imports triton."""
