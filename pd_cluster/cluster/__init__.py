"""The processes of a cluster, and a request's path through them."""
