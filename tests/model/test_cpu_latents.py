"""Latent attention in C over pools of each dtype: numbers, bytes, and batch invariance."""

from __future__ import annotations

import itertools
import platform
import random
from dataclasses import dataclass

import pytest
import torch

from pd_cluster.kv.kv_layout import KVLayout, latents
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.kv_vectors import decode, encode
from pd_cluster.model.inputs.forward_batch import ForwardBatch, build_batch
from pd_cluster.model.kernels.cpu.ops import CpuOps, supports
from pd_cluster.model.layers.ops import Latents, Norm, Rope, TorchOps
from pd_cluster.native import build
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.model.test_cpu_kernels import LAYER, NUM_LAYERS, SEQUENCES, assert_close, make_rope

DTYPES = ["float32", "bfloat16", "int8", "fp8_e4m3"]
OLDER = ["-mno-avx512f", "-march=x86-64"]
EPS = 1e-6


@dataclass(frozen=True)
class Widths:
    """Widths of a head's query, the latent, the rotated part, and a head's value."""

    num_heads: int
    query: int
    latent: int
    rope: int
    value: int


SMALL, WIDE = Widths(4, 20, 48, 16, 32), Widths(16, 128, 512, 64, 128)


def a_pool(w: Widths, block_size: int, dtype: str, num_blocks: int) -> KVPool:
    """Returns a pool filled with random numbers."""
    pool = KVPool(KVLayout(NUM_LAYERS, 1, latents(w.latent, w.rope), block_size, dtype), num_blocks)
    for layer in range(NUM_LAYERS):
        for plane, width in zip(pool.layer(layer), (w.latent, w.rope), strict=True):
            plane.copy_(encode(torch.randn(*plane.shape[:-1], width), dtype))
    return pool


@dataclass
class Step:
    """Some tokens of sequences with prefixes, and their projections' outputs."""

    batch: ForwardBatch
    queries: torch.Tensor
    kept: torch.Tensor
    rope: Rope

    def rows(self, rows: slice, batch: ForwardBatch) -> Step:
        return Step(batch, self.queries[rows], self.kept[rows], Rope(self.rope.cos[rows], self.rope.sin[rows]))


def a_layer(w: Widths) -> Latents:
    keys, values = torch.randn(w.num_heads, w.query, w.latent), torch.randn(w.num_heads, w.latent, w.value)
    norm = Norm(torch.rand(w.latent) + 0.5, EPS)
    return Latents(LAYER, norm, keys * w.latent**-0.5, values, w.rope, (w.query + w.rope) ** -0.5)


def a_step(w: Widths, sequences: list[tuple[int, int]], block_size: int, dtype: str, seed: int = 1) -> Step:
    """Makes a step of sequences (query_len, prefix_len) in random blocks of a pool."""
    torch.manual_seed(seed)
    needed = sum(-(-(n + prefix) // block_size) for n, prefix in sequences)
    pool = a_pool(w, block_size, dtype, needed + 3)
    blocks, chunks = random.Random(seed).sample(range(pool.num_blocks), needed), []
    for query_len, prefix in sequences:
        count = -(-(query_len + prefix) // block_size)
        table, blocks = blocks[:count], blocks[count:]
        chunks.append((a_chunk(query_len, prefix, table), query_len))
    batch = build_batch(chunks, pool)
    queries = torch.randn(batch.num_tokens, w.num_heads * (w.query + w.rope)) * 2
    return Step(batch, queries, torch.randn(batch.num_tokens, w.latent + w.rope), make_rope(batch, w.rope))


def a_chunk(query_len: int, prefix: int, table: list[int]) -> Request:
    order = RequestSpec([0] * (query_len + prefix), Sampling())
    return Request(f"r{table[0]}", order, num_computed_tokens=prefix, tables=[table])


def attend(ops: CpuOps | TorchOps, layer: Latents, step: Step) -> torch.Tensor:
    step.batch.kernel_state = None
    return ops.attend_latents(layer, step.queries.clone(), step.kept.clone(), step.rope, step.batch)


def reference(layer: Latents, step: Step) -> torch.Tensor:
    """Attends in float64 with heads computed from latents, one query at a time, over the written pool."""
    batch = step.batch
    planes = [decode(plane, batch.pool.layout.dtype).double() for plane in batch.pool.layer(LAYER)]
    queries = step.queries.double().view(batch.num_tokens, layer.num_heads, -1)
    left, right = queries[..., layer.query_width :].chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1) * step.rope.sin[:, None].double()
    ends = queries[..., layer.query_width :] * step.rope.cos[:, None].double() + turned
    result = torch.empty(batch.num_tokens, layer.num_heads, layer.value_width, dtype=torch.float64)
    starts, tables = batch.query_starts.tolist(), batch.table_starts.tolist()
    for i, context_len in enumerate(batch.context_lens.tolist()):
        table = batch.block_table[tables[i] : tables[i + 1]].long()
        latent, rope = (plane[table].flatten(0, 1)[:context_len, 0] for plane in planes)
        keys = torch.einsum("kc,hdc->hkd", latent, layer.keys.double())
        values = torch.einsum("kc,hcd->hkd", latent, layer.values.double())
        for row in range(starts[i], starts[i + 1]):
            seen = context_len - starts[i + 1] + row + 1
            scores = torch.einsum("hd,hkd->hk", queries[row, :, : layer.query_width], keys[:, :seen])
            weights = ((scores + ends[row] @ rope[:seen].T) * layer.scaling).softmax(-1)
            result[row] = torch.einsum("hk,hkd->hd", weights, values[:, :seen])
    return result.view(batch.num_tokens, -1)


@pytest.mark.parametrize(
    ("w", "block_size", "dtype"),
    [
        *((SMALL, 3, dtype) for dtype in DTYPES),
        (WIDE, 16, "float32"),
        (WIDE, 16, "int8"),
        (Widths(40, 64, 256, 32, 64), 64, "bfloat16"),
        (Widths(1, 7, 16, 16, 16), 16, "fp8_e4m3"),
    ],
)
def test_numbers(ops: CpuOps, w: Widths, block_size: int, dtype: str) -> None:
    """Covers single tokens, a few, and prompts, some after more keys than one pass sums."""
    layer, step = a_layer(w), a_step(w, SEQUENCES if w is SMALL else SEQUENCES[3:8], block_size, dtype)
    assert supports(step.batch.pool.layout, [w.value])
    assert_close(attend(ops, layer, step), reference(layer, step))
    assert_close(attend(TorchOps(), layer, step), reference(layer, step))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64 compilers")
@pytest.mark.parametrize("flag", OLDER)
def test_on_older_cpus(flag: str) -> None:
    try:
        older = CpuOps((*build.FLAGS, flag))
    except build.KernelsUnavailable as reason:
        pytest.skip(str(reason))
    layer, step = a_layer(SMALL), a_step(SMALL, SEQUENCES, 16, "float32")
    assert_close(attend(older, layer, step), reference(layer, step))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_kept(ops: CpuOps, dtype: str) -> None:
    """The pool stores the normed latent and the rotated part in its dtype; other layers and slots do not change."""
    layer, step = a_layer(SMALL), a_step(SMALL, [(5, 30), (40, 0)], 16, dtype)
    batch, slots = step.batch, step.batch.slot_mapping
    before = [[plane.clone() for plane in batch.pool.layer(index)] for index in range(NUM_LAYERS)]
    attend(ops, layer, step)
    latent = ops.norm(step.kept[:, :48].contiguous(), layer.norm)
    left, right = step.kept[:, 48:].chunk(2, dim=-1)
    turned = step.kept[:, 48:] * step.rope.cos + torch.cat((-right, left), dim=-1) * step.rope.sin
    for plane, whole, expected in zip(batch.pool.layer(LAYER), before[LAYER], (latent, turned), strict=True):
        found = decode(plane[slots // 16, slots % 16, 0], dtype)
        assert_close(found, decode(encode(expected, dtype), dtype), 1e-6 if dtype == "float32" else 0.07)
        whole[slots // 16, slots % 16] = plane[slots // 16, slots % 16]
        assert torch.equal(plane, whole) or dtype == "fp8_e4m3"
    for plane, other in zip(batch.pool.layer(1 - LAYER), before[1 - LAYER], strict=True):
        assert torch.equal(plane, other)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("w", [SMALL, WIDE], ids=["small", "wide"])
def test_a_row_has_the_same_bits_wherever_its_prompt_is_cut(ops: CpuOps, w: Widths, dtype: str) -> None:
    """Covers whole prompts, chunks of each kind, single sequences and batches, and several thread counts."""
    layer, whole = a_layer(w), a_step(w, [(70, 0), (1, 100), (9, 60)], 16, dtype)
    together = attend(ops, layer, whole)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.equal(together, attend(ops, layer, whole))
    torch.set_num_threads(num_threads)
    table = whole.batch.block_table[whole.batch.table_starts[0] : whole.batch.table_starts[1]].tolist()
    for cuts in ([0, 1, 2, 70], [0, 5, 22, 63, 65, 70], [0, 64, 70]):
        for start, stop in itertools.pairwise(cuts):
            count = -(-stop // 16)
            batch = build_batch([(a_chunk(stop - start, start, table[:count]), stop - start)], whole.batch.pool)
            found = attend(ops, layer, whole.rows(slice(start, stop), batch))
            assert torch.equal(found, together[start:stop]), (start, stop)


def test_widths_that_the_kernels_do_not_take() -> None:
    def layout(latent: int, rope: int, dtype: str = "float32") -> KVLayout:
        return KVLayout(1, 1, latents(latent, rope), 16, dtype)

    assert supports(layout(512, 64), [128])
    assert not supports(layout(40, 16), [128])
    assert not supports(layout(512, 8), [128])
    assert not supports(layout(512, 64), [20])
    assert not supports(layout(1024, 64), [128])
    assert not supports(layout(512, 64, "float16"), [128])
