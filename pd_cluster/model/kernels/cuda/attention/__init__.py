"""Paged attention on CUDA: plans, launches and Triton kernels, or FlashInfer."""
