"""An engine among its peers: the loop of a worker's process, its messages and its load."""
