"""Child processes of the benchmarks.

A child of `engine` gets two arguments: a file with its `Spec` and a file for its `PeerResult`. A child of `gpu` (gpu_*)
gets a file with its `GpuSpec` and a file for its lines. Children of `kv` (kv_*) take commands (kv/kv_messages.py).
Children measure, but do not compare with goals. Only these modules import torch and transformers. A module that runs in
another environment imports nothing from pd_cluster.
"""
