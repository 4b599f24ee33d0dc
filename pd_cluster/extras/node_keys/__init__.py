"""Keys of nodes, with which processes prove on which host they run."""
