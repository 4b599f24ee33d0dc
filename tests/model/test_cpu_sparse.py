"""Sparse latent attention in C: the chosen keys, the numbers over them, and batch invariance."""

from __future__ import annotations

import itertools
import platform
import random

import pytest
import torch

from pd_cluster.kv.kv_layout import INDEX, KVLayout, latents
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.forward_batch import ForwardBatch, build_batch
from pd_cluster.model.kernels.cpu.ops import CpuOps
from pd_cluster.model.layers.attention.sparse_selection import IndexRows
from pd_cluster.model.layers.ops import TorchOps
from pd_cluster.native import build
from pd_cluster.wire import Plane
from tests.model.test_cpu_kernels import LAYER, NUM_LAYERS, SEQUENCES, assert_close, make_rope
from tests.model.test_cpu_latents import OLDER, SMALL, Step, a_chunk, a_layer, attend

INDEX_WIDTH = 64


def a_pool(block_size: int, dtype: str, num_blocks: int, width: int) -> KVPool:
    """Returns a pool of small whole numbers, so that sums are exact and many scores are equal."""
    planes = (*latents(SMALL.latent, SMALL.rope), Plane(INDEX, width))
    pool = KVPool(KVLayout(NUM_LAYERS, 1, planes, block_size, dtype), num_blocks)
    for layer in range(NUM_LAYERS):
        latent, rope, index = pool.memory.planes(layer)
        latent.copy_(torch.randn(latent.shape))
        rope.copy_(torch.randn(rope.shape))
        index.copy_(torch.randint(-2, 3, index.shape))
    return pool


def a_batch(
    sequences: list[tuple[int, int]], block_size: int = 16, dtype: str = "float32", width: int = INDEX_WIDTH
) -> ForwardBatch:
    """Makes a batch of sequences (query_len, prefix_len) in random blocks of a pool."""
    torch.manual_seed(1)
    needed = sum(-(-(n + prefix) // block_size) for n, prefix in sequences)
    pool = a_pool(block_size, dtype, needed + 3, width)
    blocks, chunks = random.Random(1).sample(range(pool.num_blocks), needed), []
    for query_len, prefix in sequences:
        count = -(-(query_len + prefix) // block_size)
        table, blocks = blocks[:count], blocks[count:]
        chunks.append((a_chunk(query_len, prefix, table), query_len))
    return build_batch(chunks, pool)


def index_rows(batch: ForwardBatch, num_heads: int, most: int) -> IndexRows:
    """Returns whole numbers with many negative products."""
    width, generator = batch.pool.layout.width_of(INDEX), torch.Generator().manual_seed(2)
    queries, weights, keys = (
        torch.randint(-2, 3, shape, generator=generator).float()
        for shape in ((batch.num_tokens, num_heads, width), (batch.num_tokens, num_heads), (batch.num_tokens, width))
    )
    return IndexRows(LAYER, queries, weights, keys, most)


def choose(ops: CpuOps | TorchOps, rows: IndexRows, batch: ForwardBatch) -> torch.Tensor | None:
    batch.kernel_state = None
    return ops.choose_keys(rows, make_rope(batch, SMALL.rope), batch)


def places(batch: ForwardBatch) -> list[tuple[int, int, int]]:
    """Returns (row, sequence, number of visible keys) for each token of a step."""
    starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    return [(row, i, lens[i] - starts[i + 1] + row + 1) for i in range(len(lens)) for row in range(*starts[i : i + 2])]


def expected(rows: IndexRows, batch: ForwardBatch) -> dict[int, list[int]]:
    """Returns the best keys of each row that sees more than `most`; of equal scores the first ones."""
    plane, found = batch.pool.memory.planes(LAYER)[2], {}
    for row, seq, seen in places(batch):
        if seen <= rows.most:
            continue
        table = batch.block_table[batch.table_starts[seq] : batch.table_starts[seq + 1]].long()
        keys = plane[table].flatten(0, 1)[:seen, 0].double()
        scores = (rows.queries[row].double() @ keys.T).relu().mul(rows.weights[row, :, None].double()).sum(0)
        by_score = sorted(zip((-scores).tolist(), range(seen), strict=True))
        found[row] = sorted(at for _, at in by_score[: rows.most])
    return found


@pytest.mark.parametrize(
    ("num_heads", "width", "most", "block_size", "dtype"),
    [
        (16, 64, 7, 3, "float32"),
        (64, 128, 64, 16, "float32"),
        (40, 32, 1, 64, "bfloat16"),
        (1, 16, 100, 16, "float32"),
    ],
)
def test_the_best_keys_are_chosen(
    ops: CpuOps, num_heads: int, width: int, most: int, block_size: int, dtype: str
) -> None:
    """Single tokens, a few, and prompts choose among keys that include the step's own."""
    for each in (ops, TorchOps()):
        batch = a_batch(SEQUENCES, block_size, dtype, width)
        rows = index_rows(batch, num_heads, most)
        chosen = choose(each, rows, batch)
        assert chosen is not None
        wanted = expected(rows, batch)
        assert {row: chosen[row].tolist() for row in wanted} == wanted
        kept = batch.pool.memory.planes(LAYER)[2][batch.slot_mapping // block_size, batch.slot_mapping % block_size, 0]
        assert torch.equal(kept.float(), rows.keys)


def test_scores_of_every_size_and_sign(ops: CpuOps) -> None:
    """Covers distant, close and negative scores, and zeros of both signs, which are equal."""
    batch = a_batch([(1, 299)])
    keys = torch.zeros(300, INDEX_WIDTH)
    generator = torch.Generator().manual_seed(3)
    keys[:, 0] = torch.randn(300, generator=generator) * 10.0 ** torch.randint(-30, 30, (300,), generator=generator)
    keys[::3, 0] = 0.0
    plane = batch.pool.memory.planes(LAYER)[2]
    table = batch.block_table.long()
    plane[table, :, 0] = torch.cat((keys, torch.zeros(len(table) * 16 - 300, INDEX_WIDTH))).view(len(table), 16, -1)
    queries = torch.zeros(1, 2, INDEX_WIDTH)
    queries[0, :, 0] = torch.tensor([1.0, -1.0])
    for weights in ([1.0, -1.0], [-1.0, -1.0], [0.0, -1.0], [1.0, 1.0]):
        for most in (1, 50, 150, 299):
            rows = IndexRows(LAYER, queries, torch.tensor([weights]), keys[-1:], most)
            for each in (ops, TorchOps()):
                chosen = choose(each, rows, batch)
                assert chosen is not None
                assert chosen[0].tolist() == expected(rows, batch)[0], (weights, most)


def test_nothing_is_chosen_where_all_is_seen(ops: CpuOps) -> None:
    for each in (ops, TorchOps()):
        batch = a_batch([(3, 5), (1, 15)])
        assert choose(each, index_rows(batch, 16, 16), batch) is None
        assert choose(each, index_rows(batch, 16, 15), batch) is not None


def a_step(batch: ForwardBatch) -> Step:
    torch.manual_seed(4)
    queries = torch.randn(batch.num_tokens, SMALL.num_heads * (SMALL.query + SMALL.rope)) * 2
    kept = torch.randn(batch.num_tokens, SMALL.latent + SMALL.rope)
    return Step(batch, queries, kept, make_rope(batch, SMALL.rope))


def some_keys(batch: ForwardBatch, most: int) -> torch.Tensor:
    """Returns a random choice for rows that see more than `most` keys; other rows hold values that must not be read."""
    rng, chosen = random.Random(5), torch.full((batch.num_tokens, most), 1 << 30, dtype=torch.int32)
    for row, _, seen in places(batch):
        if seen > most:
            chosen[row] = torch.tensor(sorted(rng.sample(range(seen), most)), dtype=torch.int32)
    return chosen


def over_chosen(step: Step, most: int) -> torch.Tensor:
    """Attends in float64 with heads computed from latents, one query at a time, over the chosen keys of the pool."""
    layer, batch = a_layer(SMALL), step.batch
    planes = [plane.double() for plane in batch.pool.memory.planes(LAYER)[:2]]
    queries = step.queries.double().view(batch.num_tokens, layer.num_heads, -1)
    left, right = queries[..., layer.query_width :].chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1) * step.rope.sin[:, None].double()
    ends = queries[..., layer.query_width :] * step.rope.cos[:, None].double() + turned
    result = torch.empty(batch.num_tokens, layer.num_heads, layer.value_width, dtype=torch.float64)
    for row, seq, seen in places(batch):
        table = batch.block_table[batch.table_starts[seq] : batch.table_starts[seq + 1]].long()
        assert batch.chosen is not None
        at = batch.chosen[row].long() if seen > most else torch.arange(seen)
        latent, rope = (plane[table].flatten(0, 1)[at, 0] for plane in planes)
        scores = torch.einsum("hd,hdc,kc->hk", queries[row, :, : layer.query_width], layer.keys.double(), latent)
        weights = ((scores + ends[row] @ rope.T) * layer.scaling).softmax(-1)
        result[row] = torch.einsum("hk,kc,hcd->hd", weights, latent, layer.values.double())
    return result.view(batch.num_tokens, -1)


@pytest.mark.parametrize("most", [5, 64, 130])
@pytest.mark.parametrize(("block_size", "dtype"), [(3, "float32"), (16, "bfloat16")])
def test_numbers_over_chosen_keys(ops: CpuOps, most: int, block_size: int, dtype: str) -> None:
    torch.manual_seed(6)
    step = a_step(a_batch(SEQUENCES, block_size, dtype))
    step.batch.chosen = some_keys(step.batch, most)
    for each in (ops, TorchOps()):
        torch.manual_seed(6)
        layer = a_layer(SMALL)
        found = attend(each, layer, step)
        torch.manual_seed(6)
        assert_close(found, over_chosen(step, most))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64 compilers")
@pytest.mark.parametrize("flag", OLDER)
def test_on_older_cpus(flag: str) -> None:
    try:
        older = CpuOps((*build.FLAGS, flag))
    except build.KernelsUnavailable as reason:
        pytest.skip(str(reason))
    batch = a_batch(SEQUENCES)
    rows = index_rows(batch, 40, 20)
    chosen, wanted = choose(older, rows, batch), expected(rows, batch)
    assert chosen is not None
    assert {row: chosen[row].tolist() for row in wanted} == wanted
    step = a_step(batch)
    batch.chosen = chosen
    torch.manual_seed(6)
    found = attend(older, a_layer(SMALL), step)
    torch.manual_seed(6)
    assert_close(found, over_chosen(step, 20))


def test_a_row_has_the_same_bits_wherever_its_prompt_is_cut(ops: CpuOps) -> None:
    """Covers whole prompts, chunks, batches and several thread counts, also when all keys are chosen."""
    torch.manual_seed(7)
    layer, whole = a_layer(SMALL), a_step(a_batch([(170, 0), (1, 100), (9, 160)]))
    whole.batch.chosen = some_keys(whole.batch, 70)
    together = attend(ops, layer, whole)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.equal(together, attend(ops, layer, whole))
    torch.set_num_threads(num_threads)
    table = whole.batch.block_table[whole.batch.table_starts[0] : whole.batch.table_starts[1]].tolist()
    for cuts in ([0, 1, 2, 170], [0, 5, 69, 71, 75, 170], [0, 70, 90, 170]):
        for start, stop in itertools.pairwise(cuts):
            batch = build_batch(
                [(a_chunk(stop - start, start, table[: -(-stop // 16)]), stop - start)], whole.batch.pool
            )
            batch.chosen = whole.batch.chosen[start:stop].contiguous()
            found = attend(ops, layer, whole.rows(slice(start, stop), batch))
            assert torch.equal(found, together[start:stop]), (start, stop)
    whole.batch.chosen = None
    dense = attend(ops, layer, whole)
    assert torch.equal(dense[:70], together[:70])
    whole.batch.chosen = torch.arange(150, dtype=torch.int32).expand(whole.batch.num_tokens, -1).contiguous()
    assert torch.equal(attend(ops, layer, whole)[:150], dense[:150])
