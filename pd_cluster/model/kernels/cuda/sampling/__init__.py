"""Greedy and drawn tokens on CUDA, without the host."""
