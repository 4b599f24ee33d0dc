"""The KV cache: what a block is, who holds it, where its bytes are."""
