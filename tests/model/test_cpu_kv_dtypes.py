"""Attention in C over 16-bit and quantized pools: numbers, bytes, and batch invariance."""

from __future__ import annotations

import itertools
import platform
import random

import pytest
import torch

from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_vectors import decode, encode
from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.kernels.cpu.ops import POOLS, CpuOps, supports
from pd_cluster.model.layers.ops import Heads, TorchOps
from pd_cluster.native import build
from tests.model.test_cpu_kernels import (
    LAYER,
    NUM_LAYERS,
    SEQUENCES,
    assert_close,
    check_rows_apart,
    make_batch,
    make_rope,
    reference,
)
from tests.support.usual import slow_but

NARROW = [dtype for dtype in POOLS if dtype != "float32"]
OLDER = ["-mno-avx512f", "-march=x86-64"]


def a_step(
    dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, rng: random.Random
) -> tuple[ForwardBatch, torch.Tensor]:
    batch = make_batch(rng.sample(SEQUENCES, 6), num_kv_heads, head_dim, block_size, rng, dtype)
    return batch, torch.randn(batch.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim) * 2


def check_attention(ops: CpuOps, dtype: str, shape: tuple[int, int, int, int]) -> None:
    num_heads, num_kv_heads, head_dim, _ = shape
    rng = random.Random(repr(shape))
    torch.manual_seed(head_dim)
    for window, softcap in itertools.product((None, 24), (None, 5.0)):
        batch, qkv = a_step(dtype, *shape, rng)
        sinks = torch.randn(num_heads) * 4 if softcap is None else None
        heads = Heads(LAYER, num_heads, num_kv_heads, head_dim, head_dim**-0.5, window, softcap, sinks=sinks)
        rope = make_rope(batch, head_dim)
        actual = ops.attend(heads, qkv.clone(), rope, batch)
        assert_close(actual, reference(heads, qkv, rope, batch))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("shape", [(4, 2, 32, 3), (7, 1, 128, 16), (24, 2, 96, 64)])
def test_attention(ops: CpuOps, dtype: str, shape: tuple[int, int, int, int]) -> None:
    """Compares with float64 over the written pool: lengths, prefixes, windows, softcaps and sinks."""
    check_attention(ops, dtype, shape)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64 compilers")
@pytest.mark.parametrize("dtype", slow_but({"int8"}, NARROW))
@pytest.mark.parametrize("flag", OLDER)
def test_on_older_cpus(dtype: str, flag: str) -> None:
    try:
        older = CpuOps((*build.FLAGS, flag), dtype)
    except build.KernelsUnavailable as reason:
        pytest.skip(str(reason))
    for shape in [(4, 2, 32, 3), (7, 1, 128, 16)]:
        check_attention(older, dtype, shape)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("flags", [(), *([(flag,) for flag in OLDER] if platform.machine() == "x86_64" else [])])
def test_the_pool_s_bytes_are_those_of_the_reference(ops: CpuOps, dtype: str, flags: tuple[str, ...]) -> None:
    """The kernel writes the bytes of a float32 pool quantized by torch, infinities and NaN included."""
    shape = (4, 2, 64, 16)
    kernels = CpuOps((*build.FLAGS, *flags), dtype) if flags else ops
    torch.manual_seed(3)
    exact, qkv = a_step("float32", *shape, random.Random(3))
    qkv *= torch.logspace(-20, 20, len(qkv))[:, None]
    qkv[1], qkv[5] = 0.0, 1e-31
    if dtype != "bfloat16":
        qkv[2, -1], qkv[3, -64] = torch.inf, torch.nan
    narrow, _ = a_step(dtype, *shape, random.Random(3))
    heads, rope = Heads(LAYER, 4, 2, 64, 0.125), make_rope(exact, 64)
    kernels.attend(heads, qkv.clone(), rope, exact)
    kernels.attend(heads, qkv.clone(), rope, narrow)
    slots = exact.slot_mapping
    assert torch.equal(slots, narrow.slot_mapping)
    for numbers, stored in zip(exact.pool.layer(LAYER), narrow.pool.layer(LAYER), strict=True):
        found = stored[slots // 16, slots % 16]
        expected = encode(numbers[slots // 16, slots % 16], dtype)
        same = (found == expected) | (found.isnan() & expected.isnan())
        is_nan = decode(expected, dtype).isnan().all(-1, keepdim=True)
        assert (same | is_nan).all()
        assert torch.equal(decode(found, dtype).isnan(), decode(expected, dtype).isnan())


@pytest.mark.parametrize("dtype", [dtype for dtype in NARROW if dtype != "bfloat16"])
def test_a_prompt_attends_as_if_the_pool_had_its_numbers(ops: CpuOps, dtype: str) -> None:
    """Bits equal the float32 kernel's over the dequantized pool, because tiles are dequantized first."""
    rng = random.Random(9)
    torch.manual_seed(9)
    sequences = [(17, 40), (64, 130), (33, 0)]
    batch = make_batch(sequences, 2, 64, 16, rng, dtype)
    heads, rope = Heads(LAYER, 8, 2, 64, 0.125), make_rope(batch, 64)
    qkv = torch.randn(batch.num_tokens, 12 * 64)
    actual = ops.attend(heads, qkv.clone(), rope, batch)
    plain = make_batch(sequences, 2, 64, 16, random.Random(9))
    for there, here in zip(plain.pool.layer(LAYER), batch.pool.layer(LAYER), strict=True):
        there.copy_(decode(here, dtype))
    keys, values = (part.flatten(0, 1)[batch.slot_mapping] for part in plain.pool.layer(LAYER))
    flat = make_rope(batch, 64)
    flat.cos.fill_(1.0)
    flat.sin.fill_(0.0)
    rotated = qkv.clone()
    ops.attend(heads, rotated, rope, plain)  # rotates queries in place
    rotated[:, 8 * 64 :] = torch.cat((keys.flatten(1), values.flatten(1)), dim=1)
    plain.kernel_state = None
    assert torch.equal(actual, ops.attend(heads, rotated, flat, plain))


@pytest.mark.parametrize("dtype", NARROW)
def test_a_row_does_not_depend_on_the_batch_or_the_threads(ops: CpuOps, dtype: str) -> None:
    check_rows_apart(ops, dtype)


@pytest.mark.parametrize("dtype", NARROW)
def test_torch_computes_the_same(ops: CpuOps, dtype: str) -> None:
    """SDPA over the same pool also attends to a step's own keys as stored in the pool."""
    torch.manual_seed(11)
    batch, qkv = a_step(dtype, 6, 2, 64, 16, random.Random(11))
    heads, rope = Heads(LAYER, 6, 2, 64, 0.125), make_rope(batch, 64)
    before = batch.pool.data.clone()
    actual = ops.attend(heads, qkv.clone(), rope, batch)
    written = batch.pool.data.clone()
    others = [layer for layer in range(NUM_LAYERS) if layer != LAYER]
    assert torch.equal(written[:, others].isnan(), before[:, others].isnan())
    assert torch.equal(written[:, others].nan_to_num(), before[:, others].nan_to_num())
    batch.pool.data.copy_(before)
    batch.kernel_state = None
    assert_close(actual, TorchOps().attend(heads, qkv.clone(), rope, batch), 0.02)
    ours, theirs = (decode(data, dtype).nan_to_num() for data in (written, batch.pool.data))
    assert (ours - theirs).abs().max() <= ours.abs().max() * {"int4": 0.15, "bfloat16": 0.008}.get(dtype, 0.07)
    assert ((ours - theirs).abs() > 1e-5 * ours.abs().max()).float().mean() < 0.001  # rounded to the other neighbour


def test_what_the_kernels_take() -> None:
    def layout(dtype: str) -> KVLayout:
        return KVLayout(1, 1, keys_and_values(48), 16, dtype)

    assert supports(layout("int8"))
    assert not supports(layout("int4"))  # each half of a head fills whole vectors
    assert not supports(layout("float16"))
