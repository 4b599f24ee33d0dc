"""Kernels in C, compiled on first start."""
