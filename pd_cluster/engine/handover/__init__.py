"""Moves the KV cache of a prompt from one engine to another."""
