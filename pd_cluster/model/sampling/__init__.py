"""Sampling: tokens from logits."""
