"""One launch each of the kernels that decide, for a profiler of kernels such as ncu: `python -m MODULE DEVICE`.

They are decode attention of 32 sequences, prefill attention, and a product of few rows, in the 8B model's shape; on a
CPU tiny ones.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.gpu.spec import LLAMA_8B, QUICK_SHAPES
from benchmarks.gpu.workloads import CONTEXT_LEN, PREFILL_LEN
from benchmarks.peers.gpu_attention import Case
from pd_cluster.devices.device import resolve, synchronize, use


def launch(name: str) -> None:
    device = resolve(name)
    use(device)
    shape = LLAMA_8B if device.is_accelerator else QUICK_SHAPES[0]
    batch, context_len, prompt_len = (32, CONTEXT_LEN, PREFILL_LEN) if device.is_accelerator else (2, 32, 32)
    weight = torch.randn(shape.hidden_size, 2 * shape.intermediate_size, dtype=torch.bfloat16, device=device.torch_name)
    with torch.inference_mode():
        for num_seqs, query_len, context in ((batch, 1, context_len), (2, prompt_len, prompt_len)):
            Case(shape, device, num_seqs, query_len, context).ours()()
        torch.mm(weight[:, :1].T.expand(batch, -1).contiguous(), weight)
        synchronize(device)


if __name__ == "__main__":
    launch(sys.argv[1])
