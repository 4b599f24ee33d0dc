"""Measurements of KV cache transfers."""
