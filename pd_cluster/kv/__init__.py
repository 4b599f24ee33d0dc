"""The KV cache: its blocks, the holders of blocks, and the memory."""
