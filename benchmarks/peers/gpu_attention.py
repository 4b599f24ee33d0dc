"""Attention alone, in the shape of one layer: ours through the paged pool, torch's SDPA on contiguous keys, FlashInfer.

Launches are replayed as graphs, so that the figures exclude the host. A contender that cannot run is noted.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.spec import GpuShape, GpuSpec, Writer, child_main
from benchmarks.gpu.workloads import CONTEXT_LEN, NUM_PREFILL, PREFILL_LEN, decode_batches
from benchmarks.peers.gpu_ceilings import put_rate
from benchmarks.peers.gpu_clock import time_kernels, time_launches
from pd_cluster.devices.device import Device, resolve, use
from pd_cluster.kv.layout import KVLayout, keys_and_values
from pd_cluster.kv.pool import KVPool
from pd_cluster.model.attention import sdpa
from pd_cluster.model.attention.sdpa import Scoring
from pd_cluster.model.batch import ForwardBatch, build_batch
from pd_cluster.types import Order, Request, Sampling

BLOCK_SIZE = 16
LAYERS_IN_POOL = 4  # so that the parts of one layer in successive blocks are about as far apart as in a model
WORKSPACE_NBYTES = 256 << 20

Run = Callable[[], Any]


class Case:
    """Sequences that compute `query_len` tokens each, up to `context_len`; one layer's queries, keys and values."""

    def __init__(self, shape: GpuShape, device: Device, num_seqs: int, query_len: int, context_len: int) -> None:
        self.shape, self.device = shape, device
        self.num_seqs, self.query_len, self.context_len = num_seqs, query_len, context_len
        self.scoring = Scoring(shape.head_dim**-0.5)
        layout = KVLayout(
            num_layers=LAYERS_IN_POOL,
            num_kv_heads=shape.num_kv_heads,
            planes=keys_and_values(shape.head_dim),
            block_size=BLOCK_SIZE,
            dtype="bfloat16",
        )
        per_seq = layout.num_blocks_for(context_len)
        self.pool = KVPool(layout, num_seqs * per_seq, device)
        self.pool.data.normal_()
        order = torch.randperm(num_seqs * per_seq, generator=torch.Generator().manual_seed(0)).tolist()
        chunks = []
        for i in range(num_seqs):
            blocks = order[i * per_seq : (i + 1) * per_seq]
            request = Request(f"a{i}", Order([0] * context_len, Sampling()), block_table=blocks)
            request.num_computed_tokens = context_len - query_len
            chunks.append((request, query_len))
        self.batch: ForwardBatch = build_batch(chunks, self.pool)
        self.query = self.randn(num_seqs * query_len, shape.num_heads)

    def randn(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, self.shape.head_dim, dtype=torch.bfloat16, device=self.device.torch_name)

    @property
    def kv_nbytes(self) -> int:
        return self.num_seqs * self.context_len * 2 * self.shape.num_kv_heads * self.shape.head_dim * 2

    @property
    def flops(self) -> float:
        """Returns the operations for a whole prompt: pairs of a query and a key that it may see."""
        pairs = self.num_seqs * self.query_len * (2 * self.context_len - self.query_len + 1) / 2
        return 4.0 * self.shape.num_heads * self.shape.head_dim * pairs

    # ---- contenders

    def ours(self) -> Run:
        if self.device.is_accelerator:
            from pd_cluster.model.cuda.paged import attend_batch  # Triton may be missing

            keys, values = self.pool.layer(0)
            return lambda: attend_batch(self.query, keys, values, self.batch, self.scoring)
        new = self.randn(len(self.query), self.shape.num_kv_heads)
        query = self.query.transpose(0, 1)
        return lambda: sdpa.write_and_attend(0, query, new, new, self.batch, self.scoring)

    def torch_sdpa(self) -> Run:
        shape, n = self.shape, self.num_seqs
        q = self.randn(n, shape.num_heads, self.query_len)
        k, v = (self.randn(n, shape.num_kv_heads, self.context_len) for _ in range(2))
        causal = self.query_len > 1
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    def flashinfer(self) -> Run:
        """Runs FlashInfer, planned once outside the timing, as for all layers of a step."""
        import flashinfer

        name, shape, batch = self.device.torch_name, self.shape, self.batch
        workspace = torch.empty(WORKSPACE_NBYTES, dtype=torch.uint8, device=name)
        last = torch.full((self.num_seqs,), (self.context_len - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device=name)
        sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim, BLOCK_SIZE)
        pages = self.pool.layer(0)
        if self.query_len == 1:
            decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            decode.plan(batch.table_starts, batch.block_table, last, *sizes, data_type=torch.bfloat16)
            return lambda: decode.run(self.query, pages)
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        prefill.plan(
            batch.query_starts,
            batch.table_starts,
            batch.block_table,
            last,
            *sizes,
            causal=True,
            q_data_type=torch.bfloat16,
        )
        return lambda: prefill.run(self.query, pages)


def contenders(case: Case) -> Iterator[tuple[str, Callable[[], Run]]]:
    yield "ours", case.ours
    yield "SDPA", case.torch_sdpa
    if importlib.util.find_spec("flashinfer"):
        yield "FlashInfer", case.flashinfer


def measure(spec: GpuSpec, results: Writer) -> None:
    device = resolve(spec.device)
    use(device)
    if not importlib.util.find_spec("flashinfer"):
        results.note("FlashInfer is not installed here")
    context, prompt = spec.sizes(CONTEXT_LEN, 32), spec.sizes(PREFILL_LEN, 32)
    with torch.inference_mode():
        for batch in decode_batches(spec.quick):
            with results.section(f"decode {batch}"):
                case = Case(spec.shape, device, batch, 1, context)
                compare(spec, results, case, f"attention, decode {batch}", case.kv_nbytes / 1e9, "GB/s")
                del case
        with results.section("prefill"):
            case = Case(spec.shape, device, spec.sizes(NUM_PREFILL, 2), prompt, prompt)
            compare(spec, results, case, "attention, prefill", case.flops / 1e12, "TFLOP/s")


def compare(spec: GpuSpec, results: Writer, case: Case, what: str, amount: float, unit: str) -> None:
    num_launches, num_tries = spec.sizes(10, 1), spec.sizes(7, 1)
    for name, make in contenders(case):
        try:
            clock = time_launches if name == "FlashInfer" else time_kernels  # its plan is not for a graph
            took = clock(make(), case.device, num_launches, num_tries)
        except Exception as error:  # library-specific errors; the others are still measured
            results.note(f"{what}: {name} could not run: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        put_rate(results, f"{what}, {name}", amount, unit, took)


if __name__ == "__main__":
    child_main(measure)
