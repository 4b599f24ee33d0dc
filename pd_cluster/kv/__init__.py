"""The KV cache: its blocks, their holders, and the memory that they lie in."""
