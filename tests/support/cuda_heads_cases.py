"""Queries, keys and values under Triton's interpreter, against transformers' modules and TorchOps."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from pd_cluster.kv.block_major import DeviceBlocks
from pd_cluster.kv.layout import KVLayout, keys_and_values
from pd_cluster.kv.pool import KVPool
from pd_cluster.model.attention import sdpa
from pd_cluster.model.batch import ForwardBatch, build_batch
from pd_cluster.model.cuda.ops import CudaOps, prepare
from pd_cluster.model.layers.ops import Heads, Norm, Rope, TorchOps
from pd_cluster.types import Order, Request, Sampling
from tests.support.interpreted import DTYPES, assert_like, choose_device, strided, whole_numbers
from tests.support.spread import spread

choose_device()

ANY = Sampling(max_tokens=1, temperature=0.0)


def attend_by_reference(
    query: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, batch: ForwardBatch, scoring: sdpa.Scoring
) -> torch.Tensor:
    """Attends one sequence at a time, reading all of it from the pool."""
    result = torch.empty_like(query)
    starts, tables = batch.query_starts.tolist(), batch.table_starts.tolist()
    for i, context_len in enumerate(batch.context_lens.tolist()):
        table = batch.block_table[tables[i] : tables[i + 1]]
        k, v = (pool.index_select(0, table).flatten(0, 1)[:context_len] for pool in (key_pool, value_pool))
        rows = slice(starts[i], starts[i + 1])
        attended = sdpa._attend(query[rows].transpose(0, 1), k.to(query.dtype), v.to(query.dtype), batch, scoring)
        result[rows] = attended.transpose(0, 1)
    return result


def make_pool(heads: Heads, block_size: int, num_blocks: int, dtype: torch.dtype) -> KVPool:
    name = str(dtype).removeprefix("torch.")
    layout = KVLayout(2, heads.num_kv_heads, keys_and_values(heads.head_dim), block_size, name)
    with torch.device("cpu"):
        pool = KVPool(layout, num_blocks)
    pool.memory = DeviceBlocks(layout, [pool.data.to(torch.get_default_device())])
    return pool


def make_rope(num_tokens: int, head_dim: int, dtype: torch.dtype) -> Rope:
    angles = torch.randint(0, 4000, (num_tokens, 1)) / 10000 ** (torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.cat((angles, angles), dim=-1)
    return Rope(angles.cos().to(dtype), angles.sin().to(dtype))


def expected_heads(heads: Heads, qkv: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes them like transformers' attention modules, [num_tokens, num_heads or num_kv_heads, head_dim]."""
    num_kv = heads.num_kv_heads
    parts = qkv.unflatten(1, (-1, heads.head_dim)).split([heads.num_heads, num_kv, num_kv], dim=1)
    query, key, value = parts
    if heads.q_norm is not None and heads.k_norm is not None:
        for norm in (heads.q_norm, heads.k_norm):
            module = LlamaRMSNorm(heads.head_dim, norm.eps).to(qkv.dtype)
            module.weight.data = norm.weight
            if norm is heads.q_norm:
                query = module(query)
            else:
                key = module(key)
    query, key = apply_rotary_pos_emb(query[None], key[None], rope.cos[None], rope.sin[None], unsqueeze_dim=2)
    return query[0], key[0], value


SHAPES = [(1, 1, 2), (4, 2, 16), (7, 1, 80), (14, 2, 64), (3, 3, 96), (8, 8, 256)]


@pytest.mark.parametrize(("dtype", "num_heads", "num_kv_heads", "head_dim"), spread(DTYPES, SHAPES))
def test_prepare_rotates_and_writes_bit_for_bit(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """Only the slots of these tokens change; several padding tokens share one slot of the padding block."""
    torch.manual_seed(head_dim)
    heads = Heads(1, num_heads, num_kv_heads, head_dim, 1.0)
    block_size, num_blocks, num_tokens = 5, 3, 4
    pool = make_pool(heads, block_size, num_blocks, dtype)
    pool.data.normal_()
    before = pool.data.clone()
    padding = num_blocks * block_size + 2
    slots = torch.tensor([14, 0, padding, padding])
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    qkv[3] = qkv[2]
    rope = make_rope(num_tokens, head_dim, dtype)
    rope.cos[3], rope.sin[3] = rope.cos[2], rope.sin[2]
    qkv = strided(qkv)
    query = prepare(heads, qkv, rope, *pool.layer(1), slots)
    expected_query, key, value = expected_heads(heads, qkv, rope)
    assert torch.equal(query, expected_query)
    assert query.is_contiguous()
    at = slots // block_size, slots % block_size
    before[:, 1, 0][at], before[:, 1, 1][at] = key, value
    assert torch.equal(pool.data, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prepare_norms_each_head(dtype: torch.dtype) -> None:
    """Qwen3's order is norm, then rotation. Exact where the sums of squares are exact and the dtype short."""
    torch.manual_seed(4)
    q_norm, k_norm = (Norm((torch.rand(128) + 0.5).to(dtype), eps) for eps in (1e-6, 1e-2))
    heads = Heads(0, 6, 2, 128, 1.0, q_norm=q_norm, k_norm=k_norm)
    slots, rope = torch.tensor([7, 3, 9]), make_rope(3, 128, dtype)
    for qkv in (whole_numbers(3, 10 * 128).to(dtype), torch.randn(3, 10 * 128).to(dtype)):
        pool = make_pool(heads, 4, 3, dtype)
        query = prepare(heads, qkv, rope, *pool.layer(0), slots)
        expected_query, key, value = expected_heads(heads, qkv, rope)
        key_pool, value_pool = (part.flatten(0, 1)[slots] for part in pool.layer(0))
        assert torch.equal(value_pool, value)
        if dtype == torch.float32 or qkv.abs().max() != 6:
            largest = expected_query.abs().max().float()
            tolerance = 1e-6 if dtype == torch.float32 else 2e-2 if dtype == torch.bfloat16 else 2e-3
            assert (query - expected_query).abs().max() <= tolerance * largest
            assert (key_pool - key).abs().max() <= tolerance * largest
            assert dtype == torch.float32 or (query != expected_query).float().mean() < 0.01
        else:
            assert torch.equal(query, expected_query)
            assert torch.equal(key_pool, key)


@pytest.mark.parametrize(("dtype", "pool_dtype"), [(torch.float32, torch.float16), (torch.bfloat16, torch.float32)])
def test_prepare_writes_in_the_dtype_of_the_pool(dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    heads = Heads(0, 2, 1, 32, 1.0)
    pool = make_pool(heads, 16, 2, pool_dtype)
    qkv, rope, slots = torch.randn(2, 4 * 32).to(dtype), make_rope(2, 32, dtype), torch.tensor([31, 1])
    prepare(heads, qkv, rope, *pool.layer(0), slots)
    _, key, value = expected_heads(heads, qkv, rope)
    key_pool, value_pool = (part.flatten(0, 1)[slots] for part in pool.layer(0))
    assert torch.equal(key_pool, key.to(pool_dtype))
    assert torch.equal(value_pool, value.to(pool_dtype))


def make_batch(heads: Heads, rng: random.Random) -> ForwardBatch:
    """Makes prompts, prompts after prefixes and single tokens, in shuffled blocks."""
    block_size = rng.choice([3, 16])
    lens = [(1, 0), (rng.randint(2, 9), 0), (1, rng.randint(1, 40)), (rng.randint(2, 9), rng.randint(1, 40))]
    pool = make_pool(heads, block_size, sum(-(-(n + prefix) // block_size) for n, prefix in lens), torch.float32)
    pool.data[: pool.num_blocks].normal_()
    blocks = rng.sample(range(pool.num_blocks), pool.num_blocks)
    chunks = []
    for i, (n, prefix) in enumerate(lens):
        count = -(-(n + prefix) // block_size)
        table, blocks = blocks[:count], blocks[count:]
        request = Request(
            str(i), Order([0] * (n + prefix), ANY), num_computed_tokens=prefix, block_table=table, arrival_s=float(i)
        )
        chunks.append((request, n))
    with torch.device("cpu"):
        batch = build_batch(chunks, pool)
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    device = torch.get_default_device()
    return replace(batch, **{name: t.to(device) for name, t in tensors.items() if isinstance(t, torch.Tensor)})


@pytest.mark.parametrize("seed", range(4))
def test_attend_is_that_of_torch(seed: int) -> None:
    """Pool and output agree; the layer is reported as written once the pool has it, before attention runs."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num_kv_heads = rng.choice([1, 2])
    heads = Heads(
        layer_idx=1,
        num_heads=num_kv_heads * rng.choice([1, 3]),
        num_kv_heads=num_kv_heads,
        head_dim=rng.choice([16, 48]),
        scaling=0.3,
        sliding_window=rng.choice([None, 5]),
        softcap=rng.choice([None, 4.0]),
    )
    batch = make_batch(heads, rng)
    before = batch.pool.data.clone()
    qkv = torch.randn(batch.num_tokens, (heads.num_heads + 2 * num_kv_heads) * heads.head_dim)
    rope = make_rope(batch.num_tokens, heads.head_dim, torch.float32)
    expected = TorchOps().attend(heads, qkv.clone(), rope, batch)
    expected_pool = batch.pool.data.clone()
    batch.pool.data.copy_(before)
    batch.layers_written.clear()
    seen: list[int] = []

    def attend(*given: object) -> torch.Tensor:
        seen.extend(batch.layers_written)
        return attend_by_reference(*given)  # type: ignore[arg-type]

    actual = CudaOps(attend).attend(heads, qkv, rope, batch)
    assert seen == [1]
    assert batch.windows == {heads.sliding_window}
    assert torch.equal(batch.pool.data, expected_pool)
    assert_like(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_heads(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype, num_rows = rng.choice(DTYPES), rng.randint(1, 6)
    num_kv_heads, head_dim = rng.randint(1, 5), 2 * rng.randint(1, 128)
    heads = Heads(0, num_kv_heads * rng.randint(1, 9), num_kv_heads, head_dim, 1.0)
    pool = make_pool(heads, rng.randint(1, 20), 4, dtype)
    qkv = torch.randn(num_rows, (heads.num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    slots = torch.randperm(4 * pool.layout.block_size)[:num_rows]
    qkv, rope = qkv[: len(slots)], make_rope(len(slots), head_dim, dtype)
    query = prepare(heads, qkv, rope, *pool.layer(0), slots)
    expected_query, key, value = expected_heads(heads, qkv, rope)
    assert torch.equal(query, expected_query)
    assert torch.equal(pool.layer(0)[0].flatten(0, 1)[slots], key)
    assert torch.equal(pool.layer(0)[1].flatten(0, 1)[slots], value)
