"""The network before the start: what `hccn_tool` says of NPUs, and KV blocks sent between real processes."""
