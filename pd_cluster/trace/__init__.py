"""`pd-cluster trace`: the timeline of one request, read from the admin address and drawn."""
