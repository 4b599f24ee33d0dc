"""One launch each of the kernels that decide, for a profiler of kernels such as ncu: `python -m MODULE DEVICE`.

They are decode attention of 32 sequences, prefill attention, and a product of few rows, in the 8B model's shape; on a
CPU tiny ones.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.gpu.spec import CONTEXT_LEN, LLAMA_8B, PREFILL_LEN, QUICK_SHAPE, GpuShape
from pd_cluster.devices.device import Device, resolve, synchronize, use
from pd_cluster.kv.layout import KVLayout, keys_and_values
from pd_cluster.kv.pool import KVPool
from pd_cluster.model.attention import sdpa
from pd_cluster.model.attention.sdpa import Scoring
from pd_cluster.model.batch import build_batch
from pd_cluster.types import Order, Request, Sampling

BLOCK_SIZE = 16


def attend(shape: GpuShape, device: Device, num_seqs: int, query_len: int, context_len: int) -> None:
    """Attends in one layer: sequences that compute `query_len` tokens each, up to `context_len`."""
    planes = keys_and_values(shape.head_dim)
    layout = KVLayout(
        num_layers=1, num_kv_heads=shape.num_kv_heads, planes=planes, block_size=BLOCK_SIZE, dtype="bfloat16"
    )
    per_seq = layout.num_blocks_for(context_len)
    pool = KVPool(layout, num_seqs * per_seq, device)
    pool.data.normal_()
    order = torch.randperm(num_seqs * per_seq, generator=torch.Generator().manual_seed(0)).tolist()
    chunks = []
    for at in range(num_seqs):
        table = order[at * per_seq : (at + 1) * per_seq]
        request = Request(f"a{at}", Order([0] * context_len, Sampling()), block_table=table)
        request.num_computed_tokens = context_len - query_len
        chunks.append((request, query_len))
    batch, scoring = build_batch(chunks, pool), Scoring(shape.head_dim**-0.5)

    def randn(num_heads: int) -> torch.Tensor:
        size = num_seqs * query_len, num_heads, shape.head_dim
        return torch.randn(*size, dtype=torch.bfloat16, device=device.torch_name)

    query = randn(shape.num_heads)
    if device.is_accelerator:
        from pd_cluster.model.cuda.paged import attend_batch  # Triton may be missing

        attend_batch(query, *pool.layer(0), batch, scoring)
        return
    new = randn(shape.num_kv_heads)
    sdpa.write_and_attend(0, query.transpose(0, 1), new, new, batch, scoring)


def launch(name: str) -> None:
    device = resolve(name)
    use(device)
    shape = LLAMA_8B if device.is_accelerator else QUICK_SHAPE
    batch, context_len, prompt_len = (32, CONTEXT_LEN, PREFILL_LEN) if device.is_accelerator else (2, 32, 32)
    weight = torch.randn(shape.hidden_size, 2 * shape.intermediate_size, dtype=torch.bfloat16, device=device.torch_name)
    with torch.inference_mode():
        attend(shape, device, batch, 1, context_len)
        attend(shape, device, 2, prompt_len, prompt_len)
        torch.mm(weight[:, :1].T.expand(batch, -1).contiguous(), weight)
        synchronize(device)


if __name__ == "__main__":
    launch(sys.argv[1])
