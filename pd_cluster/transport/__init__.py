"""Transports move the bytes of KV blocks from one process into another."""
