"""Checks the network before the start: reads reports of `hccn_tool` on NPUs; sends KV blocks between real processes."""
