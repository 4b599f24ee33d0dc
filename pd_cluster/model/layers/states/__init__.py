"""Layers that keep one state per sequence instead of keys and values."""
