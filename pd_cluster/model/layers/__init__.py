"""Layers, and the operations that devices compute for them."""
