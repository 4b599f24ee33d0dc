"""Rows that share a block table attend together in C, with the same bits as alone."""

from __future__ import annotations

import dataclasses
import itertools
import platform
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.kv_vectors import encode
from pd_cluster.model.inputs.forward_batch import ForwardBatch, batch_of
from pd_cluster.model.inputs.step_input import StepInput
from pd_cluster.model.kernels.cpu.ops import POOLS, CpuOps
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.model.layers.ops import Heads
from pd_cluster.native import build
from tests.model.test_company import wide
from tests.model.test_cpu_kernels import LAYER, NUM_LAYERS, make_rope
from tests.model.test_decoder_layers import CASES, runner_of
from tests.support.spread import spread

pytestmark = pytest.mark.usefixtures("kept_threads")
NUMS_ROWS = [(1, 8), (12, 1, 3), (20, 2), (1, 1, 4, 5), (6,)]
SHAPES = spread(  # block size, query heads, KV heads, head dim
    [16, 1, 3, 64],
    [(2, 2, 64), (6, 2, 128), (8, 2, 96), (24, 3, 64), (4, 4, 160), (18, 2, 64), (12, 4, 64), (16, 8, 128)],
)
FLAGS: list[tuple[str, ...]] = [()]
if platform.machine() == "x86_64":  # vectors of 8 and of 4 floats
    FLAGS += [("-mno-avx512f",), ("-march=x86-64",)]


def a_step(nums_rows: tuple[int, ...], block_size: int, rng: random.Random, has_prompt: bool = True) -> StepInput:
    """Makes a step with a sequence for each number of rows, and a prompt. Additional rows follow all sequences."""
    lens = [rng.choice([1, 30, 64, 95, 150, 200]) for _ in nums_rows]
    most = [length + num_rows for length, num_rows in zip(lens, nums_rows, strict=True)]
    prompt = (rng.choice([5, 33]), rng.choice([0, 40]))
    needed = [-(-each // block_size) for each in (*most, sum(prompt) * has_prompt)]
    blocks = iter(rng.sample(range(sum(needed)), sum(needed)))
    tables = [[next(blocks) for _ in range(count)] for count in needed]
    chunks = [(1, length - 1, seq) for seq, length in enumerate(lens)]
    if has_prompt:
        chunks.insert(rng.randrange(len(chunks)), (*prompt, len(lens)))
    place = {seq: index for index, (_, _, seq) in enumerate(chunks)}
    chunks += [(1, lens[seq] - 1 + row, seq) for seq, num in enumerate(nums_rows) for row in range(1, num)]
    counts = [-(-(num_tokens + start) // block_size) for num_tokens, start, _ in chunks]
    rows = [(num, start, count, 1, 999, 0) for (num, start, _), count in zip(chunks, counts, strict=True)]
    table = [block for (_, _, seq), count in zip(chunks, counts, strict=True) for block in tables[seq][:count]]
    input_ids = np.array([rng.randrange(1, 200) for num, *_ in chunks for _ in range(num)])
    leaders = np.array([place[seq] for _, _, seq in chunks])
    return StepInput(np.array(rows), input_ids, np.array(table), leaders=leaders)


def pool_of(step: StepInput, layout: KVLayout) -> KVPool:
    """Returns a filled pool with NaN after each sequence."""
    pool = KVPool(layout, int(step.blocks.max()) + 1)
    size, heads, dim = layout.block_size, layout.local_kv_heads, layout.head_dim
    numbers = torch.full((len(pool.data), NUM_LAYERS, 2, size, heads, dim), torch.nan)
    ends = np.cumsum(step.rows[:, 2])
    for (_, start, count, *_), end in zip(step.rows.tolist(), ends.tolist(), strict=True):
        for index, block in enumerate(step.blocks[end - count : end].tolist()):
            numbers[block, :, :, : max(0, start - index * size)] = 0.5
    numbers *= 2 * torch.randn(numbers.shape)
    pool.data.copy_(encode(numbers, layout.dtype))
    return pool


def attended(ops: CpuOps, heads: Heads, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    return ops.attend(heads, qkv.clone(), make_rope(batch, heads.head_dim), batch)


def check(ops: CpuOps, dtype: str, shape: tuple[int, int, int, int], nums_rows: tuple[int, ...]) -> None:
    """Compares results and the pool's bytes, on one and two threads."""
    block_size, num_heads, num_kv_heads, head_dim = shape
    rng = random.Random(repr((dtype, shape, nums_rows)))
    torch.manual_seed(head_dim)
    for at, window in enumerate((None, 1, 64, 150)):
        softcap = (None, 5.0)[(at + block_size) % 2]  # over all shapes, each window has both
        step = a_step(nums_rows, block_size, rng)
        pool = pool_of(step, KVLayout(NUM_LAYERS, num_kv_heads, keys_and_values(head_dim), block_size, dtype))
        sinks = torch.randn(num_heads) * 4 if softcap is None else None
        heads = Heads(LAYER, num_heads, num_kv_heads, head_dim, head_dim**-0.5, window, softcap, sinks=sinks)
        qkv = torch.randn(len(step.input_ids), (num_heads + 2 * num_kv_heads) * head_dim) * 2
        before = pool.data.clone()
        apart = attended(ops, heads, qkv, batch_of(dataclasses.replace(step, leaders=None), pool))
        assert apart.isfinite().all()
        written = pool.data.clone()
        for threads in (1, 2):
            torch.set_num_threads(threads)
            pool.data.copy_(before)
            assert torch.equal(attended(ops, heads, qkv, batch_of(step, pool)), apart), (
                f"{window}, {softcap}, {threads}"
            )
            assert torch.equal(pool.data.view(torch.uint8), written.view(torch.uint8))


@pytest.mark.parametrize(
    "flags", [FLAGS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in FLAGS[1:])], ids=str
)
@pytest.mark.parametrize(
    "dtype", [pytest.param(each, marks=[] if each in ("float32", "int8") else pytest.mark.slow) for each in POOLS]
)
def test_rows_together_have_the_bits_of_rows_alone(dtype: str, flags: tuple[str, ...]) -> None:
    try:
        kernels = CpuOps((*build.FLAGS, *flags), dtype)
    except build.KernelsUnavailable as reason:
        pytest.skip(str(reason))
    for index, shape in enumerate(SHAPES):
        check(kernels, dtype, shape, NUMS_ROWS[index % len(NUMS_ROWS)])


def test_rows_of_a_table_read_its_keys_once(ops: CpuOps) -> None:
    """All rows use the longest row's table; the others' tables are not read."""
    step = a_step((6,), 16, random.Random(1), has_prompt=False)
    pool = pool_of(step, KVLayout(NUM_LAYERS, 2, keys_and_values(64), 16, "float32"))
    heads, qkv, batch = Heads(LAYER, 4, 2, 64, 0.125), torch.randn(6, 8 * 64), batch_of(step, pool)
    found = attended(ops, heads, qkv, batch)
    batch.kernel_state = None
    batch.block_table[: batch.table_starts[5]] = 0
    assert torch.equal(attended(ops, heads, qkv, batch), found)
    batch.kernel_state, batch.leaders = None, None
    assert not torch.equal(attended(ops, heads, qkv, batch), found)


@pytest.mark.parametrize("name", ["bfloat16, int8 pool", "w4a8 of bfloat16"])
def test_logits_of_a_step(tmp_path: Path, name: str) -> None:
    """Covers all decoder layers in one call, and separate calls."""
    runner, decoder = runner_of(wide(tmp_path / "model", "llama"), **CASES[name])
    assert isinstance(runner.model, FusedCausalLM)
    step = a_step((5, 1, 2, 8), 16, random.Random(2), has_prompt=False)
    runner.pool.data.copy_(torch.randint(0, 50, runner.pool.data.shape).to(runner.pool.data.dtype))
    before = runner.pool.data.clone()
    apart = runner.compute(dataclasses.replace(step, leaders=None)).logits
    written = runner.pool.data.clone()
    for threads, runner.model.decoder in itertools.product((1, 2), (decoder, None)):
        torch.set_num_threads(threads)
        runner.pool.data.copy_(before)
        assert torch.equal(runner.compute(step).logits, apart)
        assert torch.equal(runner.pool.data, written)
