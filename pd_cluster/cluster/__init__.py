"""The processes of a cluster and the way of a request between them."""
