"""The Triton attention without a GPU: interpreted, against the SDPA reference, and compiled for target GPUs."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.model.kernels.cuda.attention.attention_configs import AttentionConfigs, TileConfig, configs_for
from pd_cluster.model.kernels.cuda.attention.attention_plan import (
    MAX_SPLITS,
    PROGRAMS_PER_SM,
    SPLIT_KEYS,
    PlanRules,
    most_splits,
    padded_items,
    plan_attention,
    plan_decode,
    plan_padded,
    workers_for,
)
from tests.support.triton_child import TritonChild, triton_child

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
TOLERANCE = 1e-5  # of float32
SHARED_NBYTES = {90: 227 << 10, 80: 99 << 10}  # limit per program; 80 also represents 86, 89 and 120
H100_SMS = 132
MIXED = [(1, 40), (3, 60), (17, 17), (1, 270), (1, 1)]
LONG = [(130, 300), (1, 300), (17, 130)]

# heads, KV heads, head_dim, block_size, window, softcap, sinks, keys of a split
SHAPES: list[tuple[int, int, int, int, int | None, float | None, bool, int]] = [
    (2, 2, 16, 8, None, None, False, 256),
    (4, 2, 16, 16, 1, None, False, 64),
    (4, 1, 16, 32, 5, 3.0, True, 32),
    (7, 1, 16, 64, 64, None, True, 256),
    (8, 1, 64, 8, 64, 5.0, False, 64),
    (4, 2, 64, 16, None, None, True, 32),
    (2, 2, 80, 16, 5, None, True, 64),
    (7, 1, 80, 32, None, 30.0, False, 32),
    (8, 1, 128, 16, None, None, False, 64),
    (4, 1, 128, 8, 64, None, False, 32),
    (2, 1, 192, 16, 1, 5.0, True, 256),
    (20, 1, 16, 16, None, None, False, 64),  # more heads than a product's minimum rows
    (9, 9, 128, 16, None, None, False, 64),  # a token's keys exceed what a program writes at once
]


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonChild]:
    with triton_child(True, tmp_path_factory.mktemp("triton")) as child:
        yield child


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonChild]:
    with triton_child(False, tmp_path_factory.mktemp("triton")) as child:
        yield child


def difference(child: TritonChild, sequences: list[tuple[int, int]], **shape: Any) -> float:
    found = child.call("triton_attention", "parity", sequences=sequences, **shape)
    assert isinstance(found, float)
    return found


def named(shape: tuple[int, int, int, int, int | None, float | None, bool, int]) -> dict[str, Any]:
    names = ("num_heads", "num_kv_heads", "head_dim", "block_size", "window", "softcap", "has_sinks", "split_keys")
    return dict(zip(names, shape, strict=True))


@needs_triton
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_as_sdpa_in_float32(interpreter: TritonChild, shape: Any) -> None:
    assert difference(interpreter, MIXED, **named(shape)) < TOLERANCE


@needs_triton
@pytest.mark.parametrize(("rows", "keys", "window"), [(32, 16, 64), (64, 64, None)])
def test_long_chunks_in_tiles_of_other_sizes(
    interpreter: TritonChild, window: int | None, rows: int, keys: int
) -> None:
    shape = named((4, 2, 16, 16, window, None, False, 64))
    assert difference(interpreter, LONG, rows=rows, keys=keys, **shape) < TOLERANCE


def limits_of(sequences: list[tuple[int, int]], pictures: list[tuple[int, int]]) -> list[int]:
    """Returns the end of each row's visible keys; `pictures`: rows [first, stop), each within one sequence."""
    limits = [context - query_len + at + 1 for query_len, context in sequences for at in range(query_len)]
    for first, stop in pictures:
        limits[first:stop] = [limits[stop - 1]] * (stop - first)
    return limits


@needs_triton
@pytest.mark.parametrize(
    ("rows", "keys", "window", "is_uniform"), [(16, 32, 24, True), (64, 64, None, True), (16, 32, None, False)]
)
def test_tokens_that_see_later_ones(
    interpreter: TritonChild, is_uniform: bool, window: int | None, rows: int, keys: int
) -> None:
    """Tokens of a picture see the whole picture."""
    sequences = [(70, 70), (1, 41), (33, 53), (5, 5)]
    limits = limits_of(sequences, [(3, 40), (41, 44), (71, 90), (104, 109)])
    shape = {**named((4, 2, 16, 16, window, None, False, 64)), "rows": rows, "keys": keys, "is_uniform": is_uniform}
    assert difference(interpreter, sequences, limits=limits, **shape) < TOLERANCE


def random_shape(draw: random.Random) -> tuple[list[tuple[int, int]], dict[str, Any]]:
    def sequence() -> tuple[int, int]:
        query_len = draw.choice([1, 1, 2, 3, 8, 17, 40])
        return query_len, query_len + draw.choice([0, 1, 15, 16, 31, 32, 33, draw.randrange(150)])

    group = draw.randint(1, 9)
    num_kv_heads = draw.randint(1, 2)
    shape = {
        "num_heads": group * num_kv_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": 8 * draw.randint(1, 6),
        "block_size": 2 ** draw.randint(3, 7),
        "window": draw.choice([None, 1, 2, 31, 32, 33, draw.randint(1, 200)]),
        "softcap": draw.choice([None, 2.0]),
        "has_sinks": draw.random() < 0.5,
        "split_keys": 64 * draw.randint(1, 4),
        "rows": draw.choice([16, 32]),
        "keys": draw.choice([16, 32, 64]),
        "seed": draw.randrange(1 << 30),
    }
    return [sequence() for _ in range(draw.randint(1, 5))], shape


@needs_triton
@pytest.mark.parametrize("chunk", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 10))])
def test_same_as_sdpa_for_random_shapes(interpreter: TritonChild, chunk: int) -> None:
    for seed in range(chunk * 5, chunk * 5 + 5):
        sequences, shape = random_shape(random.Random(seed))
        assert difference(interpreter, sequences, **shape) < TOLERANCE, (seed, sequences, shape)


@needs_triton
@pytest.mark.parametrize(("split_keys", "window", "has_sinks"), [(512, None, False), (32, 40, True)])
def test_a_captured_plan_serves_other_contexts_and_padding(
    interpreter: TritonChild, window: int | None, has_sinks: bool, split_keys: int
) -> None:
    steps = [[300, 40, 7, 0, 0], [1, 0, 0, 0, 0], [64, 129, 32, 33, 250]]
    told = interpreter.call(
        "triton_attention", "replays", steps=steps, split_keys=split_keys, window=window, has_sinks=has_sinks
    )
    assert len(told) == len(steps)
    for step in told:
        assert step["difference"] < TOLERANCE
        assert step["padding"] == 0


def compile_and_check(compiler: TritonChild, arch: int, dtype: str, **shape: Any) -> None:
    found = compiler.call("triton_compile", "compiled", arch=arch, dtype=dtype, **shape)
    writer = "write_codes_kernel" if shape.get("pool_dtype") else "write_kernel"
    assert set(found) == {"prefill_kernel", "decode_kernel", writer}
    for name, takes in found.items():
        assert takes["shared_nbytes"] <= SHARED_NBYTES[arch], (name, takes)
        assert takes["stack_nbytes"] <= 64, (name, takes)
    prefill, decode = found["prefill_kernel"], found["decode_kernel"]
    assert decode["ordered_counts"] == decode["counts"] == 1, decode  # results are stored first, and merged later
    overlaps = int(shape.get("pdl", False))
    for takes in (prefill, decode):
        assert (takes["waits"], takes["lets_go"], takes["early_accesses"]) == (overlaps, overlaps, 0), takes
    if shape["head_dim"] >= 64 and not shape.get("pool_dtype"):  # tiles are loaded by asynchronous 16-byte copies
        assert prefill["copies_16_bytes"], prefill
        assert decode["copies_16_bytes"], decode
    if dtype != "float32":  # uses tensor cores; on Hopper its own instruction for big tiles
        assert prefill["wgmma" if arch == 90 else "mma"] > 0, prefill
        assert decode["mma"] > 0, decode
    if dtype != "float32" and arch == 90:  # PROGRAMS_PER_SM programs fit; with eight warps only one does
        assert decode["shared_nbytes"] * PROGRAMS_PER_SM <= SHARED_NBYTES[arch], decode
        assert decode["registers"] * 128 * PROGRAMS_PER_SM <= 65536, decode


USUAL = {"head_dim": 128, "group": 4, "block_size": 16, "is_rich": False}
COMPILED: dict[str, dict[str, Any]] = {
    "plain": {},
    "codes": {"pool_dtype": "int8"},
    # With `--deterministic` all key tiles are masked.
    "uniform": {"is_uniform": True},
    # Triton specialises arguments that are 1: one KV head, a window of one token. With `pdl`, a kernel begins
    # before the previous one ends, and accesses no memory until then.
    "ones": {
        "head_dim": 64,
        "group": 8,
        "block_size": 64,
        "is_rich": True,
        "num_kv_heads": 1,
        "window": 1,
        "pdl": True,
    },
    "rich": {"is_rich": True},
    "limits": {"head_dim": 256, "group": 2, "has_limits": True},
    "codes of 4 bits": {"pool_dtype": "int4"},
    "codes of floats": {"pool_dtype": "fp8_e4m3"},
}
QUICK = ("plain", "ones")


@needs_triton
@pytest.mark.parametrize(
    ("name", "arch"),
    [
        *((name, 90) for name in QUICK),
        *(pytest.param(name, 80, marks=pytest.mark.slow) for name in COMPILED if name != "ones"),
        *(pytest.param(name, 90, marks=pytest.mark.slow) for name in COMPILED if name not in QUICK),
    ],
)
def test_kernels_compile_and_fit(compiler: TritonChild, name: str, arch: int) -> None:
    compile_and_check(compiler, arch, "bfloat16", **{**USUAL, **COMPILED[name]})


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "pool_dtype", "is_uniform", "arch"),
    [
        ("bfloat16", "", False, 90),
        *(pytest.param("bfloat16", "", True, arch, marks=pytest.mark.slow) for arch in (80, 90)),
        *(pytest.param("bfloat16", codes, False, 90, marks=pytest.mark.slow) for codes in ("int8", "fp8_e4m3")),
        *(pytest.param("bfloat16", codes, False, 80, marks=pytest.mark.slow) for codes in ("", "int8", "fp8_e4m3")),
        *(pytest.param("float32", "", False, arch, marks=pytest.mark.slow) for arch in (80, 90)),
    ],
)
def test_attention_to_latents_compiles_and_fits(
    compiler: TritonChild, dtype: str, pool_dtype: str, is_uniform: bool, arch: int
) -> None:
    """Uses the widths of DeepSeek, Kimi and GLM."""
    shape = {"num_heads": 128, "widths": (512, 64), "pool_dtype": pool_dtype, "is_uniform": is_uniform}
    check_latents(compiler, arch, dtype, **shape)


@needs_triton
@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_attention_to_listed_latents_compiles_and_fits(compiler: TritonChild, arch: int) -> None:
    """Uses the widths of DeepSeek-V3.2 and GLM-5; each token has a list of slots. float32 would spill registers."""
    check_latents(compiler, arch, "bfloat16", num_heads=128, widths=(512, 64), has_lists=True)


def check_latents(compiler: TritonChild, arch: int, dtype: str, **shape: Any) -> None:
    found = compiler.call("triton_compile", "latents_compiled", arch=arch, dtype=dtype, **shape)
    assert set(found) == {"prefill_kernel", "decode_kernel"}
    for name, takes in found.items():
        assert takes["shared_nbytes"] <= SHARED_NBYTES[arch], (name, takes)
        assert takes["stack_nbytes"] <= 64, (name, takes)
        if dtype == "bfloat16":
            assert takes["mma"] + takes["wgmma"] > 0, (name, takes)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "dtype"),
    [(16, 1, 16, "float32"), (80, 7, 16, "float16"), (128, 32, 256, "bfloat16"), (256, 4, 16, "float32")],
)
def test_other_configurations_compile_and_fit(
    compiler: TritonChild, head_dim: int, group: int, block_size: int, dtype: str, arch: int
) -> None:
    compile_and_check(compiler, arch, dtype, head_dim=head_dim, group=group, block_size=block_size, is_rich=True)


TILES_OF_16 = AttentionConfigs(TileConfig(16, 32, 4, 2), TileConfig(16, 32, 4, 2))


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 300)), min_size=1, max_size=8), st.sampled_from([1, 3, 4, 16])
)
def test_tiles_have_every_query_once_and_most_work_first(sequences: list[tuple[int, int]], group: int) -> None:
    query_lens, prefixes = np.array(sequences).T
    plan = plan_attention(query_lens, query_lens + prefixes, PlanRules(group, 2, TILES_OF_16, H100_SMS))
    per_tile = 16 // group
    seen = [(seq, 0) for seq in plan.decode_seqs.tolist()]
    work = []
    for seq, first in plan.tiles.tolist():
        last = min(first + per_tile, query_lens[seq])
        seen += [(seq, query) for query in range(first, last)]
        work.append(prefixes[seq] + last)
    assert sorted(seen) == [(seq, query) for seq, n in enumerate(query_lens) for query in range(n)]
    assert work == sorted(work, reverse=True)


@pytest.mark.parametrize(
    ("head_dim", "group", "named"), [(264, 1, "head_dim 264"), (20, 1, "head_dim 20"), (64, 33, "33 query heads")]
)
def test_shapes_that_the_kernels_do_not_take_are_named(head_dim: int, group: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        configs_for(head_dim, 16, group, (9, 0))


@pytest.mark.parametrize(("capability", "arch"), [((8, 6), (8, 0)), ((10, 3), (9, 0)), ((12, 0), (8, 0))])
def test_other_generations_use_the_table_that_fits_them(capability: tuple[int, int], arch: tuple[int, int]) -> None:
    assert configs_for(128, 16, 4, capability) == configs_for(128, 16, 4, arch)
    assert configs_for(128, 16, 4, (8, 0)) != configs_for(128, 16, 4, (9, 0))


# ---- splits of decoded contexts, distributed evenly over programs


@needs_triton
@pytest.mark.parametrize(
    ("lens", "window"),
    [
        ([*range(5, 18), 4096, *range(18, 36)], None),  # more keys than 63 splits of 32, so its splits are wider
        ([*range(5, 18), 2500, *range(18, 36)], 1500),
        ([1 + at % 70 for at in range(149)] + [300], None),  # more rows than programs scan at once
    ],
    ids=["long", "window", "many"],
)
def test_a_long_row_among_short_ones(interpreter: TritonChild, lens: list[int], window: int | None) -> None:
    """Programs share a long row's splits, and its numbers equal those alone."""
    shape = {"lens": lens, "window": window, "num_sms": 4, "split_keys": 32}
    error, is_same_alone = interpreter.call("triton_attention", "among_others", **shape)
    assert error < TOLERANCE
    assert is_same_alone


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 200_000), st.one_of(st.none(), st.integers(1, 40_000)))
def test_no_context_has_more_splits_than_the_workspace_holds(context: int, window: int | None) -> None:
    """Repeats the kernel's arithmetic on the host."""
    seen_from = max(0, context - window) if window else 0
    keys = SPLIT_KEYS * max(1, -(-(context - seen_from) // (SPLIT_KEYS * (MAX_SPLITS - 1))))
    first = seen_from // keys
    num_splits = max(-(-context // keys), first + 1) - first
    assert num_splits <= most_splits(context) <= MAX_SPLITS


def test_programs_fill_the_device_and_no_more() -> None:
    """Few splits get one program each; many are shared by as many programs as run concurrently."""
    found = [workers_for(*items, H100_SMS) for items in ((4, 8), (32 * 64, 8), (10_000, 1), (0, 8))]
    assert found == [4, 33, PROGRAMS_PER_SM * H100_SMS, 1]


def test_a_plan_for_decode_depends_on_the_padded_size_only() -> None:
    plan = plan_decode(8, 4096, 8, TILES_OF_16, H100_SMS)
    assert plan.all_decode
    assert plan.max_splits == 4096 // SPLIT_KEYS
    assert plan.workspace_numel(32, 128) == 8 * 32 * plan.max_splits * 129
    assert plan_decode(8, SPLIT_KEYS, 8, TILES_OF_16, H100_SMS).workspace_numel(32, 128) == 0


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 900)), min_size=1, max_size=9), st.sampled_from([1, 3, 4]))
def test_a_padded_plan_holds_every_step_of_its_size(sequences: list[tuple[int, int]], group: int) -> None:
    """A padded plan has the tiles and sequences of the step's plan; padding refers to the sequence without tokens."""
    query_lens, prefixes = np.array(sequences).T
    context_lens = query_lens + prefixes
    num_tokens, num_seqs = int(query_lens.sum()) + 1, len(sequences)
    rules = PlanRules(group, 2, TILES_OF_16, H100_SMS)
    own = plan_attention(query_lens, context_lens, rules)
    decode_seqs, tiles = padded_items(query_lens, context_lens, num_tokens, num_seqs, group, TILES_OF_16)
    padded = plan_padded(num_tokens, num_seqs, 1000, rules)
    assert (decode_seqs.shape, tiles.shape) == (padded.decode_seqs.shape, padded.tiles.shape)
    assert not padded.all_decode
    assert padded.max_splits >= own.max_splits
    assert decode_seqs.tolist() == own.decode_seqs.tolist() + [num_seqs] * (num_seqs - len(own.decode_seqs))
    assert tiles.tolist() == own.tiles.tolist() + [[num_seqs, 0]] * (len(tiles) - len(own.tiles))
