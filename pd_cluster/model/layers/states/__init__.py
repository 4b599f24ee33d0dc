"""Layers that keep a state of a sequence in place of keys and values."""
