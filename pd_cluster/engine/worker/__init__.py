"""An engine and its peers: the loop of a worker's process, its messages and its load."""
