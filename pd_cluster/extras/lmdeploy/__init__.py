"""LMDeploy's offline interface: `pipeline`, `AsyncEngine`, its configs and its sessions."""
