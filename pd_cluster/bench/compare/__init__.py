"""`pd-cluster bench compare`: servers beside each other, in interleaved rounds of the same load."""
