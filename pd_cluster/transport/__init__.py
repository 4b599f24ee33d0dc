"""How the bytes of KV blocks get from one process into another."""
