"""Weights that change while the cluster serves: updates, and tensors that a trainer sends."""
