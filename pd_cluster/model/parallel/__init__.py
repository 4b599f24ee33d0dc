"""Tensor parallelism: one model on several ranks of one instance, each with a share of every layer."""
