"""The engines that `pd-cluster bench engine` compares, and both ends of `bench kv` (kv_*): each a child process.

A child of `bench engine` gets two arguments, a file to read its `Spec` from and a file to write its `PeerResult` to;
those of `bench kv` take commands on stdin, see kv_spec.py. They run what they are asked to and judge nothing. Only
these modules of the bench may import torch and transformers; a module whose peer lives in an environment of its own
imports nothing of pd_cluster.
"""
