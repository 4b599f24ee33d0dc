"""The engines that `pd-cluster bench engine` compares: one module each, run as a child process.

A child gets two arguments, a file to read its `Spec` from and a file to write its `PeerResult` to. It runs what it is
asked to and judges nothing. Only these modules of the bench may import torch and transformers; a module whose peer
lives in an environment of its own imports nothing of pd_cluster.
"""
