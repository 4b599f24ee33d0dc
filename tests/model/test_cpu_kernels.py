"""The C kernels against plain references, over shapes, windows, softcaps and block tables."""

from __future__ import annotations

import ctypes
import itertools
import platform
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.kv_vectors import decode, encode
from pd_cluster.model.inputs.forward_batch import ForwardBatch, build_batch
from pd_cluster.model.inputs.image_rows import ImagePart, key_limits
from pd_cluster.model.kernels.cpu.ops import CpuOps
from pd_cluster.model.layers.gated_mlp import Activation
from pd_cluster.model.layers.ops import Heads, Norm, Rope, TorchOps
from pd_cluster.native import build
from pd_cluster.native.streaming_copy import streaming_copy
from pd_cluster.types import Image, Request, RequestSpec, Sampling
from tests.support.spread import spread

ANY = Sampling(max_tokens=1, temperature=0.0)
LAYER, NUM_LAYERS = 1, 2
SEQUENCES = [(1, 0), (1, 1), (1, 15), (1, 200), (1, 300), (2, 0), (5, 63), (16, 16), (33, 0), (64, 130), (200, 77)]


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    try:
        return CpuOps()
    except build.KernelsUnavailable as reason:
        pytest.skip(str(reason))


def make_batch(
    sequences: list[tuple[int, int]],
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    rng: random.Random,
    dtype: str = "float32",
) -> ForwardBatch:
    """Makes sequences (query_len, prefix_len) in random blocks of a filled pool; unused blocks hold NaN."""
    needed = sum(-(-(n + prefix) // block_size) for n, prefix in sequences)
    pool = KVPool(KVLayout(NUM_LAYERS, num_kv_heads, keys_and_values(head_dim), block_size, dtype), needed + 3)
    shape = (NUM_LAYERS, 2, block_size, num_kv_heads, head_dim)
    pool.data.copy_(encode(torch.full((1, *shape), torch.nan), dtype))
    blocks = rng.sample(range(pool.num_blocks), needed)
    pool.data[blocks] = encode(torch.randn(needed, *shape), dtype)
    chunks = []
    for i, (query_len, prefix) in enumerate(sequences):
        count = -(-(query_len + prefix) // block_size)
        table, blocks = blocks[:count], blocks[count:]
        request = Request(
            str(i),
            RequestSpec([0] * (query_len + prefix), ANY),
            num_computed_tokens=prefix,
            tables=[table],
            arrival_s=float(i),
        )
        chunks.append((request, query_len))
    return build_batch(chunks, pool)


def make_rope(batch: ForwardBatch, head_dim: int) -> Rope:
    angles = batch.rope_positions[0, :, None] / 10000 ** (torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.cat((angles, angles), dim=-1).float()
    return Rope(angles.cos(), angles.sin())


def numbers_of(pool: KVPool, plane: torch.Tensor) -> torch.Tensor:
    return decode(plane, pool.layout.dtype).double()


def reference(heads: Heads, qkv: torch.Tensor, rope: Rope, batch: ForwardBatch) -> torch.Tensor:
    """Attends in float64, one sequence, head and query at a time, over the pool as written by the kernel."""
    dim, group = heads.head_dim, heads.num_heads // heads.num_kv_heads
    query = qkv.double().view(len(qkv), -1, dim)[:, : heads.num_heads]
    if heads.q_norm is not None:
        query = query / (query.square().mean(-1, keepdim=True) + heads.q_norm.eps).sqrt() * heads.q_norm.weight
    left, right = query.chunk(2, dim=-1)
    query = query * rope.cos[:, None] + torch.cat((-right, left), dim=-1) * rope.sin[:, None]
    key_pool, value_pool = (numbers_of(batch.pool, plane) for plane in batch.pool.layer(heads.layer_idx))
    starts, tables = batch.query_starts.tolist(), batch.table_starts.tolist()
    result = torch.empty(len(qkv), heads.num_heads, dim, dtype=torch.float64)
    for i, context_len in enumerate(batch.context_lens.tolist()):
        table = batch.block_table[tables[i] : tables[i + 1]].long()
        keys, values = (p[table].flatten(0, 1)[:context_len] for p in (key_pool, value_pool))
        rows = slice(starts[i], starts[i + 1])
        position = torch.arange(context_len - (starts[i + 1] - starts[i]), context_len)[:, None]
        at = torch.arange(context_len)[None]
        seen = at <= position if batch.key_limits is None else at < batch.key_limits[rows, None]
        if heads.sliding_window:
            seen &= at > position - heads.sliding_window
        for head in range(heads.num_heads):
            scores = query[rows, head] @ keys[:, head // group].T * heads.scaling
            if heads.softcap:
                scores = torch.tanh(scores / heads.softcap) * heads.softcap
            scores = scores.masked_fill(~seen, float("-inf"))
            sink = heads.sinks[head].double().expand(len(scores), 1) if heads.sinks is not None else scores[:, :0]
            weights = torch.cat((scores, sink), dim=-1).softmax(-1)[:, :context_len]
            result[rows, head] = weights @ values[:, head // group]
    return result.view(len(qkv), -1)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    error = (actual.double() - expected.double()).abs().max() / expected.abs().max()
    assert error <= tolerance, f"differs by {error:.1e} of the largest"


FEATURES_OF_ROWS = (771, 9001, 40_003)
HEADS = [(4, 2), (3, 1), (8, 8), (7, 1), (24, 2)]


@pytest.mark.parametrize(
    ("block_size", "head_dim", "num_heads", "num_kv_heads"),
    spread(
        [1, 3, 16, 64],
        [*((16, *heads) for heads in HEADS), *((dim, *heads) for dim in (64, 80, 128, 256) for heads in HEADS[::4])],
    ),
)
def test_attention(ops: CpuOps, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """For each shape of heads and blocks, one batch covers lengths, prefixes, windows, softcaps and sinks."""
    rng = random.Random(repr((num_heads, head_dim, block_size)))
    torch.manual_seed(num_heads * head_dim + block_size)
    for window, softcap in itertools.product((None, 1, 24, 150), (None, 5.0)):
        sequences = rng.sample(SEQUENCES, 5)
        batch = make_batch(sequences, num_kv_heads, head_dim, block_size, rng)
        sinks = torch.randn(num_heads) * 4 if softcap is None else None
        heads = Heads(LAYER, num_heads, num_kv_heads, head_dim, head_dim**-0.5, window, softcap, sinks=sinks)
        qkv = torch.randn(batch.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim) * 2
        rope = make_rope(batch, head_dim)
        actual = ops.attend(heads, qkv.clone(), rope, batch)
        assert_close(actual, reference(heads, qkv, rope, batch))


@pytest.mark.parametrize(
    ("window", "head_dim", "num_heads", "num_kv_heads"), [(None, 16, 24, 2), (24, 128, 4, 2), (None, 128, 24, 2)]
)
def test_tokens_that_see_later_ones(
    ops: CpuOps, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None
) -> None:
    """Tokens of a picture see the whole picture, by the C kernels and by SDPA with and without a softcap."""
    rng = random.Random(head_dim)
    torch.manual_seed(head_dim)
    for softcap in (None, 5.0):
        batch = make_batch([(70, 0), (1, 40), (33, 20), (5, 0)], num_kv_heads, head_dim, 16, rng)
        heads = Heads(LAYER, num_heads, num_kv_heads, head_dim, head_dim**-0.5, window, softcap)
        qkv = torch.randn(batch.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim) * 2
        rope = make_rope(batch, head_dim)
        causal = ops.attend(heads, qkv.clone(), rope, batch)
        batch.kernel_state, batch.key_limits = None, limits_of(batch, [(3, 40), (41, 44), (71, 90), (104, 109)])
        expected = reference(heads, qkv, rope, batch)
        assert_close(ops.attend(heads, qkv.clone(), rope, batch), expected)
        batch.kernel_state = None
        assert_close(TorchOps().attend(heads, qkv.clone(), rope, batch), expected)
        with pytest.raises(AssertionError, match="differs by"):
            assert_close(causal, expected)


def limits_of(batch: ForwardBatch, pictures: list[tuple[int, int]]) -> torch.Tensor:
    """Returns the end of each row's visible keys; rows of a picture see up to the picture's end."""
    lens = batch.query_lens
    starts = np.repeat(batch.host_context_lens - np.cumsum(lens), lens)
    positions = np.arange(batch.num_tokens) + starts
    parts = [ImagePart(first, 0, stop - first, b"", Image(1, 1)) for first, stop in pictures]
    return torch.from_numpy(key_limits(parts, positions).astype(np.int32))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64 compilers")
@pytest.mark.parametrize("flag", ["-mno-avx512f", "-march=x86-64"])
def test_on_older_cpus(ops: CpuOps, flag: str) -> None:
    """Without AVX-512 and without AVX, vectors have 8 and 4 floats instead of 16."""
    older = CpuOps((*build.FLAGS, flag))
    for shape in [(4, 2, 16, 3), (3, 1, 64, 16), (7, 1, 80, 16), (24, 2, 128, 64)]:
        test_attention(older, *shape)
    test_norm(older, 3, 771)
    for activation in get_args(Activation):
        test_gate(older, 3, 99, activation)


@pytest.mark.parametrize(("head_dim", "normed"), [(16, True), (64, False), (80, True)])
def test_keys_and_values_reach_their_slots_and_no_others(ops: CpuOps, head_dim: int, normed: bool) -> None:
    rng = random.Random(head_dim)
    torch.manual_seed(head_dim)
    batch = make_batch([(1, 4), (7, 6), (30, 0)], 2, head_dim, 3, rng)
    norm = Norm(torch.rand(head_dim) + 0.5, 1e-6) if normed else None
    heads = Heads(LAYER, 4, 2, head_dim, head_dim**-0.5, q_norm=norm, k_norm=norm)
    qkv, rope = torch.randn(batch.num_tokens, 8 * head_dim), make_rope(batch, head_dim)
    before = batch.pool.data.clone()
    actual = ops.attend(heads, qkv.clone(), rope, batch)
    written = batch.pool.data.clone()
    assert_close(actual, reference(heads, qkv, rope, batch))
    batch.pool.data.copy_(before)
    assert_close(actual, TorchOps().attend(heads, qkv.clone(), rope, batch))
    torch.testing.assert_close(written, batch.pool.data, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert batch.layers_written == [LAYER, LAYER]


def test_the_padding_block_can_be_written(ops: CpuOps) -> None:
    pool = KVPool(KVLayout(NUM_LAYERS, 1, keys_and_values(16), 4, "float32"), num_blocks=2)
    batch = build_batch([(Request("probe", RequestSpec([0, 0], ANY), tables=[[2]]), 2)], pool)
    ops.attend(Heads(0, 2, 1, 16, 0.25), torch.randn(2, 4 * 16), make_rope(batch, 16), batch)
    assert pool.data[2, 0].any()
    assert not pool.data[:2].any()
    with pytest.raises(ValueError, match="from 3 to 3, expected 1 from 0 to 2"):
        build_batch([(Request("probe", RequestSpec([0, 0], ANY), tables=[[3]]), 2)], pool)


def check_rows_apart(ops: CpuOps, dtype: str) -> None:
    """Checks that a row's bits do not depend on the batch or the threads."""
    torch.manual_seed(5)
    batch = make_batch(SEQUENCES, 2, 64, 16, random.Random(5), dtype)
    heads, rope = Heads(LAYER, 6, 2, 64, 0.125), make_rope(batch, 64)
    qkv = torch.randn(batch.num_tokens, 10 * 64)
    together = ops.attend(heads, qkv.clone(), rope, batch)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    batch.kernel_state = None
    assert torch.equal(together, ops.attend(heads, qkv.clone(), rope, batch))
    torch.set_num_threads(num_threads)
    starts, tables = batch.query_starts.tolist(), batch.table_starts.tolist()
    for i, (query_len, prefix) in enumerate(SEQUENCES):
        rows = slice(starts[i], starts[i + 1])
        table = batch.block_table[tables[i] : tables[i + 1]].tolist()
        request = Request("x", RequestSpec([0] * (query_len + prefix), ANY), num_computed_tokens=prefix, tables=[table])
        alone = build_batch([(request, query_len)], batch.pool)
        assert torch.equal(together[rows], ops.attend(heads, qkv[rows].clone(), make_rope(alone, 64), alone))


def test_a_row_does_not_depend_on_the_batch_or_the_threads(ops: CpuOps) -> None:
    check_rows_apart(ops, "float32")


@pytest.mark.parametrize("features", FEATURES_OF_ROWS)
def test_norms_and_gates_of_a_row_do_not_depend_on_the_batch_or_the_threads(ops: CpuOps, features: int) -> None:
    """Threads divide the batch of 41 rows among them, but split each row of a batch of one or three."""
    torch.manual_seed(features)
    x, delta, norm = torch.randn(41, features), torch.randn(41, features), Norm(torch.rand(features), 1e-5)
    gate_up = torch.randn(41, 2 * features) * 4
    added = ops.add_norm(x.clone(), delta, norm)
    gates = {activation: ops.gate(gate_up, activation) for activation in get_args(Activation)}
    num_threads = torch.get_num_threads()
    for threads, num_rows in itertools.product({1, num_threads}, (1, 3)):
        torch.set_num_threads(threads)
        for start in (0, 17, 38):
            rows = slice(start, start + num_rows)
            assert torch.equal(added[rows], ops.add_norm(x[rows].clone(), delta[rows], norm))
            for activation, together in gates.items():
                assert torch.equal(together[rows], ops.gate(gate_up[rows], activation)), activation
    torch.set_num_threads(num_threads)


def test_layers_of_one_batch_have_ropes_of_their_own(ops: CpuOps) -> None:
    batch = make_batch([(1, 5), (9, 0)], 1, 16, 4, random.Random(7))
    rope = make_rope(batch, 16)
    flat = Rope(torch.ones_like(rope.cos), torch.zeros_like(rope.sin))
    qkv = torch.randn(batch.num_tokens, 3 * 16)
    for each in (rope, flat, rope):
        actual = ops.attend(Heads(LAYER, 1, 1, 16, 0.25), qkv.clone(), each, batch)
        assert_close(actual, reference(Heads(LAYER, 1, 1, 16, 0.25), qkv, each, batch))


def test_scores_far_apart_and_infinite(ops: CpuOps) -> None:
    """Weights below the smallest number become 0, the largest is 1, and NaN is preserved."""
    batch = make_batch([(1, 40), (40, 0)], 1, 16, 16, random.Random(6))
    heads = Heads(LAYER, 1, 1, 16, 1.0)
    qkv, rope = torch.randn(batch.num_tokens, 3 * 16) * 60, make_rope(batch, 16)
    actual = ops.attend(heads, qkv.clone(), rope, batch)
    assert_close(actual, reference(heads, qkv, rope, batch), 1e-3)
    qkv[0, 0] = float("nan")
    assert ops.attend(heads, qkv.clone(), rope, batch)[0].isnan().all()


@pytest.mark.parametrize(("num_rows", "features"), [(1, 16), (40, 96), (3, 768), (1, 771), (40, 771)])
def test_norm(ops: CpuOps, num_rows: int, features: int) -> None:
    torch.manual_seed(features)
    x, delta, norm = torch.randn(num_rows, features), torch.randn(num_rows, features), Norm(torch.rand(features), 1e-5)
    plain = TorchOps()
    assert_close(ops.norm(x, norm), plain.norm(x, norm), 1e-6)
    ours, theirs = x.clone(), x.clone()
    assert_close(ops.add_norm(ours, delta, norm), plain.add_norm(theirs, delta, norm), 1e-6)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize(("num_rows", "features"), [(1, 9001), (3, 96)])
def test_gate(ops: CpuOps, num_rows: int, features: int, activation: Activation) -> None:
    torch.manual_seed(features)
    gate_up = torch.randn(num_rows, 2 * features) * 8
    gate_up[0, :4] = torch.tensor([-1000.0, 1000.0, -88.0, 0.0])
    assert_close(ops.gate(gate_up, activation), TorchOps().gate(gate_up.double(), activation), 1e-6)


def test_the_limited_gate_is_that_of_gpt_oss(ops: CpuOps) -> None:
    """Covers values on both sides of each limit."""
    config = GptOssConfig(hidden_size=8, intermediate_size=64, num_local_experts=1, num_experts_per_tok=1)
    gate, up = (torch.randn(5, 64, dtype=torch.float64) * 8 for _ in range(2))
    assert {bool(each) for part in (gate, up) for each in (part > 7).flatten()} == {True, False}
    expected = GptOssExperts(config)._apply_gate(torch.stack((gate, up), dim=-1).flatten(1))
    for each in (ops, TorchOps()):
        assert_close(each.gate(torch.cat((gate, up), dim=-1).float(), "swigluoai"), expected, 1e-6)


def test_one_openmp_library_serves_torch_and_the_kernels(ops: CpuOps) -> None:
    with open("/proc/self/maps") as maps:
        assert len({line.split()[-1] for line in maps if build.OPENMP.search(line.strip())}) == 1


def test_of_processes_that_race_one_builds_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a source that compiles quickly, because the kernels take seconds and other tests build them."""
    cache, source, compiler, calls = (tmp_path / name for name in ("cache", "source", "compiler", "calls"))
    source.mkdir()
    (source / "kernels.c").write_text("int pd_init(void) { return 0; }\n")
    compiler.write_text(f'#!/bin/sh\ncase " $* " in *" -o "*) echo >>{calls} ;; esac\nexec gcc "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(build, "FOLDER", source)
    with ThreadPoolExecutor() as pool:
        built = set(pool.map(build.build, [build.FLAGS] * 3))
    assert calls.read_text() == "\n"
    assert built == set((cache / "pd-cluster").iterdir())
    assert (cache / "pd-cluster").stat().st_mode & 0o777 == 0o700
    assert build.build((*build.FLAGS, "-g0")) not in built
    (source / "kernels.h").write_text("")
    assert build.build(build.FLAGS) not in built


def test_a_source_that_changes_while_it_is_compiled_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library compiled from the new source must not be stored under the old source's name."""
    source, changed, compiler = (tmp_path / name for name in ("kernels.c", "changed", "compiler"))
    source.write_text("int number(void) { return 1; }\n")
    changed.write_text("int number(void) { return 2; }\n")
    out = 'out=; for each; do [ "$last" = -o ] && out=$each; last=$each; done'
    changes = f'[ -z "$out" ] || [ ! -e {changed} ] || mv {changed} {source}'
    compiler.write_text(f'#!/bin/sh\n{out}\n{changes}\nexec gcc "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    assert ctypes.CDLL(str(build.build(build.FLAGS))).number() == 2
    source.write_text("int number(void) { return 1; }\n")
    assert ctypes.CDLL(str(build.build(build.FLAGS))).number() == 1


def test_why_there_are_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def assert_fails(reason: str) -> None:
        with pytest.raises(build.KernelsUnavailable, match=reason):
            build.build(build.FLAGS)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        patch.delenv("CC", raising=False)
        assert_fails("no C compiler")
    with monkeypatch.context() as patch:
        patch.setattr(build, "FOLDER", tmp_path)
        assert_fails("failed with 1")
    (tmp_path / "pd-cluster").mkdir(exist_ok=True)
    (tmp_path / "pd-cluster").chmod(0o777)
    assert_fails("can be written by other users")


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 65_535, 65_536, 300_001])
def test_copies_past_the_cache(ops: CpuOps, nbytes: int) -> None:
    """Copies exactly `nbytes` bytes, from and to any address."""
    copy = streaming_copy()
    assert copy is not None
    source = torch.randint(0, 256, (nbytes + 100,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
    for to, of in ((0, 0), (1, 0), (0, 3), (33, 7)):
        target = torch.zeros(nbytes + 200, dtype=torch.uint8)
        expected = target.clone()
        expected[to : to + nbytes] = source[of : of + nbytes]
        copy(target[to : to + nbytes], source[of : of + nbytes])
        assert torch.equal(target, expected)
