"""Queries, keys and values under Triton's interpreter, against transformers' modules and TorchOps."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from pd_cluster.kv.block_major import DeviceBlocks
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.forward_batch import build_batch
from pd_cluster.model.kernels.cuda.attention.paged_attention import PagedKV
from pd_cluster.model.kernels.cuda.ops import CudaOps, prepare
from pd_cluster.model.layers.ops import Heads, Norm, Rope, TorchOps
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.interpreted import DTYPES, choose_device, strided, whole_numbers
from tests.support.spread import spread

choose_device()


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
    """Computes heads as transformers' attention modules do: [num_tokens, num_heads or num_kv_heads, head_dim]."""
    num_kv = heads.num_kv_heads
    parts = qkv.unflatten(1, (-1, heads.head_dim)).split([heads.num_heads, num_kv, num_kv], dim=1)
    query, key, value = parts
    if heads.q_norm is not None and heads.k_norm is not None:
        modules = [LlamaRMSNorm(heads.head_dim, norm.eps).to(qkv.dtype) for norm in (heads.q_norm, heads.k_norm)]
        for module, norm in zip(modules, (heads.q_norm, heads.k_norm), strict=True):
            module.weight.data = norm.weight
        query, key = modules[0](query), modules[1](key)
    query, key = apply_rotary_pos_emb(query[None], key[None], rope.cos[None], rope.sin[None], unsqueeze_dim=2)
    return query[0], key[0], value


SHAPES = [(1, 1, 2), (4, 2, 16), (7, 1, 80), (14, 2, 64), (3, 3, 96), (8, 8, 256)]


@pytest.mark.parametrize(("dtype", "num_heads", "num_kv_heads", "head_dim"), spread(DTYPES, SHAPES))
def test_prepare_rotates_and_writes_bit_for_bit(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """Writes only these tokens' slots; several padding tokens share one slot of the padding block."""
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
    query = prepare(heads, qkv, rope, PagedKV(*pool.layer(1)), slots)
    expected_query, key, value = expected_heads(heads, qkv, rope)
    assert torch.equal(query, expected_query)
    assert query.is_contiguous()
    at = slots // block_size, slots % block_size
    before[:, 1, 0][at], before[:, 1, 1][at] = key, value
    assert torch.equal(pool.data, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prepare_norms_each_head(dtype: torch.dtype) -> None:
    """As in Qwen3, the norm precedes the rotation. Exact if sums of squares are exact and the dtype has 16 bits."""
    torch.manual_seed(4)
    q_norm, k_norm = (Norm((torch.rand(128) + 0.5).to(dtype), eps) for eps in (1e-6, 1e-2))
    heads = Heads(0, 6, 2, 128, 1.0, q_norm=q_norm, k_norm=k_norm)
    slots, rope = torch.tensor([7, 3, 9]), make_rope(3, 128, dtype)
    for qkv in (whole_numbers(3, 10 * 128).to(dtype), torch.randn(3, 10 * 128).to(dtype)):
        pool = make_pool(heads, 4, 3, dtype)
        query = prepare(heads, qkv, rope, PagedKV(*pool.layer(0)), slots)
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
    prepare(heads, qkv, rope, PagedKV(*pool.layer(0)), slots)
    _, key, value = expected_heads(heads, qkv, rope)
    key_pool, value_pool = (part.flatten(0, 1)[slots] for part in pool.layer(0))
    assert torch.equal(key_pool, key.to(pool_dtype))
    assert torch.equal(value_pool, value.to(pool_dtype))


def test_a_layer_is_reported_as_written_before_attention_runs() -> None:
    """By then the pool holds the same keys and values as TorchOps writes."""
    heads = Heads(layer_idx=1, num_heads=6, num_kv_heads=2, head_dim=16, scaling=0.3, sliding_window=5)
    pool = make_pool(heads, 3, 16, torch.float32)
    pool.data[: pool.num_blocks].normal_()
    order, before = RequestSpec([0] * 20, Sampling()), pool.data.clone()
    chunks = [(Request("prompt", order, tables=[[4, 2, 9, 0, 1, 3, 5]]), 9)]
    chunks.append((Request("decoded", order, num_computed_tokens=8, tables=[[12, 7, 8, 6, 10, 11, 13]]), 1))
    with torch.device("cpu"):
        batch = build_batch(chunks, pool)
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    there = {n: t.to(torch.get_default_device()) for n, t in tensors.items() if isinstance(t, torch.Tensor)}
    batch = replace(batch, **there)
    qkv = torch.randn(batch.num_tokens, 10 * heads.head_dim)
    rope = make_rope(batch.num_tokens, heads.head_dim, torch.float32)
    TorchOps().attend(heads, qkv.clone(), rope, batch)
    expected = batch.pool.data.clone()
    batch.pool.data.copy_(before)
    batch.layers_written.clear()
    seen: list[int] = []

    def attend(query: torch.Tensor, *_: object) -> torch.Tensor:
        seen.extend(batch.layers_written)
        return query

    CudaOps(attend).attend(heads, qkv, rope, batch)
    assert seen == [1]
    assert batch.windows == {5}
    assert torch.equal(batch.pool.data, expected)
