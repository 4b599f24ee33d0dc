"""The KV cache: its blocks, their holders, and their memory."""
