"""Child processes of the benches: engines to compare, made-up workers, both ends of links; and `fused`, a command.

A child of `bench engine` gets two arguments, a file with its `Spec` and a file for its `PeerResult`; one of `bench gpu`
(gpu_*) a file with its `GpuSpec` and a file for its lines; those of `bench kv` (kv_*) take commands on stdin, see
lab/kv/spec.py. They run what they are asked to and judge nothing. Only these modules of the bench may import torch and
transformers; a module whose peer has an environment of its own imports nothing of pd_cluster.
"""
