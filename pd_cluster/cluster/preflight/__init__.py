"""Checks of the network before the start: `hccn_tool`'s reports on NPUs, and KV blocks sent between real processes."""
