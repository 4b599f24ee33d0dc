"""Quantized KV pools on CUDA, interpreted or on a GPU: the same bytes as kv/kv_vectors.py, and attention over them."""

from __future__ import annotations

import pytest
import torch

from pd_cluster.devices.device import CPU, resolve
from pd_cluster.kv.copy_kernel import WORDS_PER_PROGRAM, copy_pairs
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.kv_vectors import encode
from pd_cluster.model.inputs.forward_batch import ForwardBatch, build_batch
from pd_cluster.model.kernels.cuda.attention.paged_attention import PagedKV, write_kv
from pd_cluster.model.kernels.cuda.attention.triton_planner import attend_batch
from pd_cluster.model.kernels.cuda.deterministic import attend_rows
from pd_cluster.model.kernels.cuda.ops import prepare
from pd_cluster.model.layers.attention import sdpa
from pd_cluster.model.layers.ops import Heads, Rope
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.interpreted import choose_device

choose_device()

DEVICE = CPU if torch.get_default_device().type == "cpu" else resolve("cuda")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def pool_of(heads: Heads, dtype: str, num_blocks: int, block_size: int = 16) -> KVPool:
    layout = KVLayout(2, heads.num_kv_heads, keys_and_values(heads.head_dim), block_size, dtype)
    with torch.device("cpu"):
        return KVPool(layout, num_blocks, DEVICE)


def odd_vectors(num_vectors: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns vectors of many magnitudes, vectors with values halfway between codes, and vectors without a scale."""
    found = torch.randn(num_vectors, head_dim) * torch.logspace(-12, 4, num_vectors)[:, None]
    found[0, 3], found[1, 5], found[2] = float("nan"), float("-inf"), 0
    found[3] = 1e-35
    found[4] = torch.arange(head_dim) - 0.5  # halfway between codes, given the largest magnitude below
    found[4, 0], found[5, :] = 127.0, torch.linspace(-448, 448, head_dim)
    found[6] = torch.arange(head_dim) * 2.0**-10  # halfway between subnormal floats
    found[6, 0] = 448
    return found.to(dtype)


@pytest.mark.parametrize(
    ("pool_dtype", "dtype"),
    [("int8", torch.float32), ("fp8_e4m3", torch.float32), ("fp8_e4m3", torch.bfloat16), ("int4", torch.bfloat16)],
    ids=str,
)
def test_vectors_have_the_bytes_of_every_other_device(pool_dtype: str, dtype: torch.dtype) -> None:
    """Checks both writers: the one used by fused layers and the one used by transformers' modules."""
    head_dim, num_tokens = 80 if dtype == torch.float32 else 128, 12
    torch.manual_seed(head_dim)
    heads = Heads(1, 4, 2, head_dim, 1.0)
    slots = torch.randperm(3 * 16)[:num_tokens].to(torch.int64)
    qkv = odd_vectors(num_tokens * 8, head_dim, dtype)[torch.randperm(num_tokens * 8)].view(num_tokens, -1)
    angles = torch.rand(num_tokens, head_dim // 2) * 6
    rope = Rope(*(torch.cat((each, each), dim=-1).to(dtype) for each in (angles.cos(), angles.sin())))
    plain, coded, other = (pool_of(heads, name, 3) for name in (NAMES[dtype], pool_dtype, pool_dtype))
    prepare(heads, qkv, rope, PagedKV(*plain.layer(1)), slots)
    prepare(heads, qkv, rope, PagedKV(*coded.layer(1), pool_dtype), slots)
    at = slots // 16, slots % 16
    keys, values = (plane[at] for plane in plain.layer(1))
    write_kv(keys.contiguous(), values.contiguous(), *other.layer(1), slots, pool_dtype)
    for vectors, planes in zip((keys, values), zip(coded.layer(1), other.layer(1), strict=True), strict=True):
        expected = same_nan(encode(vectors.cpu(), pool_dtype))
        for plane in planes:
            assert torch.equal(same_nan(plane[at].cpu()), expected)


def same_nan(stored: torch.Tensor) -> torch.Tensor:
    """Replaces NaN scales by one NaN with fixed bits."""
    scales = stored[..., -4:].contiguous().view(torch.float32)
    scales = torch.where(scales.isnan(), torch.nan, scales).view(torch.uint8)
    return torch.cat((stored[..., :-4], scales), dim=-1)


@pytest.mark.parametrize(
    ("pool_dtype", "dtype", "head_dim", "group", "window", "softcap"),
    [
        ("int8", torch.float32, 128, 4, None, None),
        ("int4", torch.float32, 128, 4, None, None),
        ("bfloat16", torch.float32, 128, 4, None, None),
        ("int4", torch.bfloat16, 128, 4, None, None),
        ("fp8_e4m3", torch.bfloat16, 64, 7, 40, 5.0),
    ],
    ids=str,
)
def test_attention_over_codes(
    pool_dtype: str, dtype: torch.dtype, head_dim: int, group: int, window: int | None, softcap: float | None
) -> None:
    """Uses a server's tiles for prompts, decoded tokens and contexts in several splits; also tests the uniform form."""
    torch.manual_seed(group)
    heads = Heads(1, group, 1, head_dim, 1.0)
    sequences = [(1, 300), (20, 90), (1, 1)] if dtype == torch.bfloat16 else [(1, 40), (3, 35)]
    pool, batch = filled(heads, pool_dtype, sequences)
    query, keys, values = (torch.randn(batch.num_tokens, n, head_dim).to(dtype) for n in (group, 1, 1))
    scoring = sdpa.Scoring(head_dim**-0.5, window, softcap)
    expected = sdpa.write_and_attend(1, query.transpose(0, 1), keys, values, batch, scoring).float()
    for attend in (attend_batch, attend_rows):
        batch.kernel_state = None
        found = attend(query, *pool.layer(1), batch, scoring).float()
        assert (found - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


def filled(heads: Heads, pool_dtype: str, sequences: list[tuple[int, int]]) -> tuple[KVPool, ForwardBatch]:
    counts = [-(-context // 16) for _, context in sequences]
    pool, blocks = pool_of(heads, pool_dtype, sum(counts)), torch.randperm(sum(counts)).tolist()
    for plane in pool.layer(1):
        plane.copy_(encode(torch.randn(*plane.shape[:3], heads.head_dim), pool_dtype))
    chunks = []
    for (query_len, context), count in zip(sequences, counts, strict=True):
        table, blocks = blocks[:count], blocks[count:]
        order = RequestSpec([0] * context, Sampling())
        chunks.append((Request("x", order, num_computed_tokens=context - query_len, tables=[table]), query_len))
    return pool, build_batch(chunks, pool)


@pytest.mark.parametrize("words", [8, WORDS_PER_PROGRAM, 2 * WORDS_PER_PROGRAM + 24])
def test_the_copy_kernel_copies_named_blocks_and_no_others(words: int) -> None:
    source, target = torch.randint(-9, 9, (9, 2 * words)), torch.zeros(7, 2 * words, dtype=torch.int64)
    expected = target.clone()
    expected[[3, 0, 6], words:] = source[[8, 2, 1], words:]
    copy_pairs(source[:, words:], target[:, words:], torch.tensor([[8, 3], [2, 0], [1, 6]]))
    assert torch.equal(target, expected)
