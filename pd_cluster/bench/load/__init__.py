"""Load by guidellm, in a process of its own, joined with what the cluster knows of the same requests."""
