"""`pd-cluster bench compare`: compares servers in interleaved rounds of the same load."""
