"""Sparse MLPs on CUDA: routing and grouped products."""
