"""Compares sparse to dense latent attention on a device, in one layer with DeepSeek-V3.2's widths.

Times the choice of keys, attention to the chosen keys, and attention to all keys. ../sparse.py does so on a CPU.
"""

from __future__ import annotations

from statistics import median

import torch

from benchmarks.gpu.gpu_messages import GpuSpec, Writer, child_main
from benchmarks.peers.gpu_profile import launches_s
from benchmarks.sparse import BLOCK_SIZE, SparseStep, layout_of
from pd_cluster.devices.device import Device, resolve, use
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.kernels.attention_backend import triton_attention
from pd_cluster.model.layers.ops import SparseOps, TorchOps

CONTEXT, QUICK_CONTEXT = 16_384, 64  # tokens of a sequence; an eighth of them is chosen
NUM_SEQS = {"decode 1": 1, "decode 32": 32, "prefill": 1}
PROMPT = 512  # tokens of a prompt's chunk


def measure(spec: GpuSpec, results: Writer) -> None:
    device = resolve(spec.device)
    use(device)
    context = spec.sizes(CONTEXT, QUICK_CONTEXT)
    most = spec.sizes(max(NUM_SEQS.values()), 2)
    with torch.inference_mode(), KVPool(layout_of(spec.dtype), most * context // BLOCK_SIZE, device) as pool:
        for plane in pool.planes(0):
            plane.normal_()
        ops = _ops_of(device)
        for name in spec.sections:
            with results.section(name):
                num_tokens = spec.sizes(PROMPT, 4) if name == "prefill" else 1
                step = SparseStep(ops, pool, context, num_tokens, min(most, NUM_SEQS[name]))
                _time(f"sparse, {name}", step, spec, device, results)


def _ops_of(device: Device) -> SparseOps:
    attention = triton_attention() if device.traits.runs_triton else None
    made = TorchOps() if attention is None or attention.make_ops is None else attention.make_ops(attention)
    assert isinstance(made, SparseOps)
    return made


def _time(name: str, step: SparseStep, spec: GpuSpec, device: Device, results: Writer) -> None:
    took = {}
    for what, run in (("dense attention", step.dense), ("choice", step.choose), ("attention to it", step.chosen)):
        took_s = launches_s(run, device, spec.sizes(20, 1), spec.sizes(7, 1))
        took[what] = median(took_s)
        results.figure(f"{name}: {what}", 1e3 * took[what], "ms", "lower", [1e3 * each for each in took_s])
    dense_s, choice_s, chosen_s = took.values()
    results.figure(f"{name}: choice and attention, share of dense", (choice_s + chosen_s) / dense_s, "x", "lower")


if __name__ == "__main__":
    child_main(measure)
