"""Sparse latent attention through the CUDA path's kernels: choices and results, interpreted or on a GPU.

cuda_sparse_model_cases.py has whole models.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from pd_cluster.devices.device import CPU, resolve
from pd_cluster.kv.kv_layout import INDEX, KVLayout, latents
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.pool_memory import TORCH_DTYPES
from pd_cluster.model.inputs.forward_batch import ForwardBatch, build_batch
from pd_cluster.model.kernels.cuda.attention import attention_plan, listed_keys
from pd_cluster.model.kernels.cuda.attention.triton_planner import attend_batch
from pd_cluster.model.kernels.cuda.deterministic import DeterministicOps, attend_rows
from pd_cluster.model.kernels.cuda.ops import CudaOps
from pd_cluster.model.layers.attention.sparse_selection import IndexNorm, IndexRows
from pd_cluster.model.layers.ops import Latents, Rope, prepared_index
from pd_cluster.types import Request, RequestSpec, Sampling
from pd_cluster.wire import Plane
from tests.support.cuda_latent_cases import Shape, rows_of
from tests.support.interpreted import DTYPES, SLOW_IF_INTERPRETED, assert_like, choose_device, multiplied_in_order

choose_device()

DEVICE = CPU if torch.get_default_device().type == "cpu" else resolve("cuda")
LAYER = 1
MIXED = [(1, 0), (1, 15), (1, 160), (2, 0), (5, 63), (20, 70)]  # (tokens of this step, tokens before it)
DECODED = [(1, 0), (1, 6), (1, 7), (1, 140), (1, 80)]
# index heads, width of index keys, chosen keys, block_size, dtype of rows and pool
INDEXERS = [
    (16, 64, 7, 4, "float32"),
    (40, 32, 64, 16, "bfloat16"),
    (64, 128, 1, 64, "float32"),
    (1, 16, 100, 16, "bfloat16"),
]
ANY_ROPE = Rope(torch.empty(0), torch.empty(0))
WIDTHS = (24, 48, 16, 32)  # of a query's own part, the latent, the rotated part, a value
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}


class Place(NamedTuple):
    """A token of a step."""

    row: int
    num_seen: int
    slots: list[int]  # of the sequence's tokens


def pool_of(block_size: int, dtype: str, num_blocks: int, width: int) -> KVPool:
    """Returns a pool whose index keys are small whole numbers, so that sums are exact and many scores equal."""
    with torch.device("cpu"):
        layout = KVLayout(2, 1, (*latents(*WIDTHS[1:3]), Plane(INDEX, width)), block_size, dtype)
        pool = KVPool(layout, num_blocks, DEVICE)
        torch.manual_seed(1)
        for latent, rope, index in (pool.planes(layer) for layer in range(2)):
            latent.copy_(torch.randn(latent.shape))
            rope.copy_(torch.randn(rope.shape))
            index.copy_(torch.randint(-2, 3, index.shape))
    return pool


def batch_over(pool: KVPool, sequences: list[tuple[int, int]], tables: list[list[int]]) -> ForwardBatch:
    chunks = []
    for at, ((num_tokens, num_before), table) in enumerate(zip(sequences, tables, strict=True)):
        order = RequestSpec([0] * (num_tokens + num_before), Sampling())
        own = table[: -(-(num_tokens + num_before) // pool.layout.block_size)]
        request = Request(str(at), order, num_computed_tokens=num_before, tables=[own], arrival_s=float(at))
        chunks.append((request, num_tokens))
    with torch.device("cpu"):
        return build_batch(chunks, pool)


def tables_of(sequences: list[tuple[int, int]], block_size: int) -> list[list[int]]:
    counts = [-(-sum(each) // block_size) for each in sequences]
    free = iter(random.Random(1).sample(range(sum(counts)), sum(counts)))
    return [list(itertools.islice(free, count)) for count in counts]


def batch_of(sequences: list[tuple[int, int]], block_size: int, dtype: str, width: int) -> ForwardBatch:
    tables = tables_of(sequences, block_size)
    return batch_over(pool_of(block_size, dtype, sum(map(len, tables)), width), sequences, tables)


def index_rows(batch: ForwardBatch, num_heads: int, most: int) -> IndexRows:
    """Returns whole numbers with many negative products."""
    dtype, width = TORCH_DTYPES[batch.pool.layout.dtype], batch.pool.layout.width_of(INDEX)
    shapes = ((batch.num_tokens, num_heads, width), (batch.num_tokens, num_heads), (batch.num_tokens, width))
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(2)
        queries, weights, keys = (torch.randint(-2, 3, shape, generator=generator) for shape in shapes)
    device = batch.slot_mapping.device
    return IndexRows(LAYER, queries.to(device, dtype), weights.to(device).float(), keys.to(device, dtype), most)


def places(batch: ForwardBatch) -> list[Place]:
    found, size = [], batch.pool.layout.block_size
    starts, lens, tables = (each.tolist() for each in (batch.query_starts, batch.context_lens, batch.table_starts))
    for seq, context_len in enumerate(lens):
        table = batch.block_table[tables[seq] : tables[seq + 1]].tolist()
        slots = [table[at // size] * size + at % size for at in range(context_len)]
        rows = range(*starts[seq : seq + 2])
        found += [Place(row, context_len - starts[seq + 1] + row + 1, slots) for row in rows]
    return found


def expected_slots(rows: IndexRows, batch: ForwardBatch) -> list[list[int]]:
    """Returns the slots of each token's best keys, in the keys' order; among equal keys the first ones are best."""
    plane = batch.pool.planes(LAYER)[2].flatten(0, 1)[:, 0].double().cpu()
    queries, weights = rows.queries.double().cpu(), rows.weights.double().cpu()
    found = []
    for row, num_seen, slots in places(batch):
        at = list(range(num_seen))
        if num_seen > rows.most:
            scores = ((queries[row] @ plane[slots[:num_seen]].T).relu() * weights[row, :, None]).sum(0).tolist()
            at = sorted(sorted(at, key=lambda each: (-scores[each], each))[: rows.most])
        found.append([slots[each] for each in at])
    return found


def lists_in(batch: ForwardBatch, chosen: torch.Tensor) -> list[list[int]]:
    nums = listed_keys._lists(batch, chosen.shape[1]).nums_listed.tolist()
    return [row[:num] for row, num in zip(chosen.tolist(), nums, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "width", "rope_width"), [(32, 64, 16), (9, 40, 24), (2, 16, 16)])
def test_keys_are_normed_and_both_are_rotated(dtype: torch.dtype, num_heads: int, width: int, rope_width: int) -> None:
    torch.manual_seed(width)
    queries, keys = torch.randn(5, num_heads, width).to(dtype), torch.randn(5, width + 8).to(dtype)[:, :width]
    angles = torch.rand(5, rope_width // 2) * 6
    rope = Rope(*(torch.cat((each, each), dim=-1).to(dtype) for each in (angles.cos(), angles.sin())))
    norm = IndexNorm(torch.randn(width), torch.randn(width), 1e-6)
    expected = prepared_index(queries.clone(), keys, norm, rope)
    found = CudaOps(attend_batch).prepare_index(queries, keys, norm, rope)
    for actual, wanted in zip(found, expected, strict=True):
        assert_like(actual, wanted)


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes sizes so small that each token takes several launches, spans and tiles."""
    monkeypatch.setattr(listed_keys, "MOST_SCORES", 1000)
    monkeypatch.setattr(listed_keys, "SPAN", 64)
    monkeypatch.setattr(listed_keys, "LISTED", 64)
    monkeypatch.setattr(listed_keys, "PART", 32)


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize(
    "indexer", [*INDEXERS[:2], *(pytest.param(each, marks=SLOW_IF_INTERPRETED) for each in INDEXERS[2:])], ids=str
)
def test_the_best_keys_are_listed(indexer: tuple[int, int, int, int, str]) -> None:
    """Single tokens and prompts choose among keys that include the step's own."""
    num_heads, width, most, block_size, dtype = indexer
    batch = batch_of(MIXED, block_size, dtype, width)
    rows = index_rows(batch, num_heads, most)
    chosen = CudaOps(attend_batch).choose_keys(rows, ANY_ROPE, batch)
    assert chosen is not None
    kept = batch.pool.planes(LAYER)[2].flatten(0, 1)[batch.slot_mapping, 0]
    assert torch.equal(kept, rows.keys)
    assert lists_in(batch, chosen) == expected_slots(rows, batch)


def test_scores_of_every_size_and_sign() -> None:
    """Covers distant, close and negative scores, and zeros of both signs, which are equal."""
    batch = batch_of([(1, 299)], 16, "float32", 64)
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(3)
        keys = torch.randn(300, generator=generator) * 10.0 ** torch.randint(-30, 30, (300,), generator=generator)
        keys[::3] = 0.0
        whole, queries = torch.zeros(300, 64), torch.zeros(1, 2, 64)
    whole[:, 0], queries[0, :, 0] = keys, torch.tensor([1.0, -1.0], device="cpu")
    (place,) = places(batch)
    plane = batch.pool.planes(LAYER)[2]
    for slot, key in zip(place.slots, whole.to(plane.device), strict=True):
        plane[slot // 16, slot % 16, 0] = key
    queries, own = (each.to(plane.device).contiguous() for each in (queries, whole[-1:]))
    for weights in ([1.0, -1.0], [-1.0, -1.0], [0.0, -1.0], [1.0, 1.0]):
        for most in (1, 50, 299):
            batch.kernel_state = None
            rows = IndexRows(LAYER, queries, torch.tensor([weights], device=plane.device), own, most)
            chosen = CudaOps(attend_batch).choose_keys(rows, ANY_ROPE, batch)
            assert chosen is not None
            assert lists_in(batch, chosen) == expected_slots(rows, batch), (weights, most)


def test_nothing_is_listed_where_all_is_seen() -> None:
    """Only `--deterministic` makes lists then, so that no result depends on whether other tokens have lists."""
    for most, is_dense in ((16, True), (15, False)):
        batch = batch_of([(3, 5), (1, 15)], 8, "float32", 64)
        rows = index_rows(batch, 16, most)
        assert (CudaOps(attend_batch).choose_keys(rows, ANY_ROPE, batch) is None) == is_dense
        chosen = DeterministicOps(attend_rows).choose_keys(rows, ANY_ROPE, batch)
        assert chosen is not None
        assert lists_in(batch, chosen) == expected_slots(rows, batch)


Given = tuple[Latents, torch.Tensor, torch.Tensor, Rope]


def given_of(num_heads: int, dtype: str, num_tokens: int) -> Given:
    """Returns a layer, and the queries, latents and rotations of a step."""
    shape: Shape = (num_heads, WIDTHS, 0, dtype, dtype)
    return rows_of(shape, num_tokens, 4)


def over_lists(given: Given, batch: ForwardBatch, lists: list[list[int]]) -> torch.Tensor:
    """Attends in float64, one token at a time, over its list's slots of the pool as written by the kernels."""
    layer, queries, _, rope = given
    latent, turned = (plane.flatten(0, 1)[:, 0].double().cpu() for plane in batch.pool.planes(LAYER)[:2])
    apart = queries.double().cpu().view(batch.num_tokens, layer.num_heads, -1)
    ends, cos, sin = apart[..., layer.query_width :], rope.cos.double().cpu()[:, None], rope.sin.double().cpu()[:, None]
    left, right = ends.chunk(2, dim=-1)
    ends = ends * cos + torch.cat((-right, left), dim=-1) * sin
    found = []
    for row, slots in enumerate(lists):
        keys = layer.keys.double().cpu()
        scores = torch.einsum("hd,hdc,kc->hk", apart[row, :, : layer.query_width], keys, latent[slots])
        weights = ((scores + ends[row] @ turned[slots].T) * layer.scaling).softmax(-1)
        found.append(torch.einsum("hk,kc,hcd->hd", weights, latent[slots], layer.values.double().cpu()))
    return torch.stack(found).view(batch.num_tokens, -1)


@pytest.mark.parametrize(
    ("num_heads", "block_size", "dtype", "sequences"),
    [
        pytest.param(6, 8, "float32", MIXED, marks=SLOW_IF_INTERPRETED),
        pytest.param(20, 4, "float32", DECODED, marks=SLOW_IF_INTERPRETED),
        (32, 16, "bfloat16", MIXED),
        (3, 64, "bfloat16", DECODED),
    ],
    ids=str,
)
def test_tokens_attend_to_what_is_listed(
    num_heads: int, block_size: int, dtype: str, sequences: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers decode steps, whose lists are split, and steps with prompts, by default and with `--deterministic`."""
    monkeypatch.setattr(attention_plan.plan_decode, "__defaults__", (32,))  # keys of a split: lists of 40 have two
    for ops in (CudaOps(attend_batch), DeterministicOps(attend_rows)):
        batch = batch_of(sequences, block_size, dtype, 64)
        rows = index_rows(batch, 16, 40)
        batch.chosen = ops.choose_keys(rows, ANY_ROPE, batch)
        given = given_of(num_heads, dtype, batch.num_tokens)
        found = ops.attend_latents(*given, batch).double().cpu()
        expected = over_lists(given, batch, expected_slots(rows, batch))
        assert (found - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()


@pytest.fixture
def _in_order() -> Iterator[None]:
    with multiplied_in_order():
        yield


@pytest.mark.usefixtures("_in_order")
def test_a_token_has_the_same_bits_however_its_prompt_is_cut() -> None:
    """Covers lists of all keys and of some, alone and beside other sequences."""
    sequences, ops = [(20, 0), (1, 30), (3, 12)], DeterministicOps(attend_rows)
    tables = tables_of(sequences, 8)
    pool = pool_of(8, "float32", sum(map(len, tables)), 64)
    whole = batch_over(pool, sequences, tables)
    rows, (layer, queries, kept, rope) = index_rows(whole, 16, 14), given_of(6, "float32", whole.num_tokens)

    def attended(batch: ForwardBatch, part: slice) -> torch.Tensor:
        own: dict[str, Any] = {name: getattr(rows, name)[part] for name in ("queries", "weights", "keys")}
        batch.chosen = ops.choose_keys(IndexRows(LAYER, most=rows.most, **own), ANY_ROPE, batch)
        return ops.attend_latents(layer, queries[part], kept[part], Rope(rope.cos[part], rope.sin[part]), batch)

    together = attended(whole, slice(None))
    for cuts in ([0, 1, 13, 20], [0, 14, 15, 20]):
        for start, stop in itertools.pairwise(cuts):
            found = attended(batch_over(pool, [(stop - start, start)], tables[:1]), slice(start, stop))
            assert torch.equal(found, together[start:stop]), (start, stop)
