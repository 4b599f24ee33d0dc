"""Child processes of the benchmarks.

A child of `engine` gets two arguments, a file with its `Spec` and a file for its `PeerResult`; one of `gpu` (gpu_*) a
file with its `GpuSpec` and a file for its lines; those of `kv` (kv_*) take commands (kv/kv_messages.py). They run
what they are asked to and judge nothing. Only these modules import torch and transformers; a module whose peer has an
environment of its own imports nothing of pd_cluster.
"""
