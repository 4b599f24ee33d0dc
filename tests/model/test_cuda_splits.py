"""Splits of decoded contexts: a row's own, dealt out evenly over the programs, and no more than there is memory for."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.model.cuda.attention_configs import AttentionConfigs, TileConfig
from pd_cluster.model.cuda.plan import (
    MAX_SPLITS,
    PROGRAMS_PER_SM,
    SPLIT_KEYS,
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
H100_SMS = 132
TILES_OF_16 = AttentionConfigs(TileConfig(16, 32, 4, 2), TileConfig(16, 32, 4, 2))


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonChild]:
    with triton_child(True, tmp_path_factory.mktemp("triton")) as child:
        yield child


@needs_triton
@pytest.mark.timeout(240)
@pytest.mark.parametrize("has_window", [False, True])
def test_a_long_row_among_short_ones(interpreter: TritonChild, has_window: bool) -> None:
    """Of 32 rows one has 32,768 keys: every program works on it, and its numbers are those that it has alone."""
    lens = [37 + 11 * at for at in range(31)]
    lens.insert(13, 20_000 if has_window else 32_768)
    window = 12_000 if has_window else None
    found = interpreter.call("triton_work", "long_among_short", lens=lens, window=window, num_sms=10)
    assert found["difference"] < TOLERANCE
    assert found["is_same_alone"]
    num_splits = [-(-length // SPLIT_KEYS) for length in lens]
    num_splits[13] = -(-20_000 // SPLIT_KEYS) - 8_000 // SPLIT_KEYS if has_window else -(-32_768 // (3 * SPLIT_KEYS))
    assert found["splits"] == num_splits
    num_workers = PROGRAMS_PER_SM * 10
    assert found["programs"] == [min(each, num_workers) for each in num_splits]
    assert max(found["load"]) - min(found["load"]) <= 1, "splits are dealt out evenly"


@needs_triton
def test_rows_beyond_one_search_and_contexts_with_wider_splits(interpreter: TritonChild) -> None:
    """There are 150 rows, which programs count in two portions; one of them has more keys than 63 splits of 32."""
    lens = [1 + at % 70 for at in range(149)] + [32 * (MAX_SPLITS - 1) + 5]
    found = interpreter.call("triton_work", "long_among_short", lens=lens, window=None, num_sms=4, split_keys=32)
    assert found["difference"] < TOLERANCE
    assert found["is_same_alone"]
    assert found["splits"] == [-(-length // 32) for length in lens[:-1]] + [-(-lens[-1] // 64)]


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 200_000), st.one_of(st.none(), st.integers(1, 40_000)))
def test_no_context_has_more_splits_than_the_workspace_holds(context: int, window: int | None) -> None:
    """The kernel's arithmetic, once more on the host."""
    seen_from = max(0, context - window) if window else 0
    keys = SPLIT_KEYS * max(1, -(-(context - seen_from) // (SPLIT_KEYS * (MAX_SPLITS - 1))))
    first = seen_from // keys
    num_splits = max(-(-context // keys), first + 1) - first
    assert num_splits <= most_splits(context) <= MAX_SPLITS
    assert num_splits <= most_splits(max(context, 200_000))


@pytest.mark.parametrize(
    ("num_items", "num_kv_heads", "workers"),
    [
        (4, 8, 4),  # one sequence of 1,024 tokens: each split has a program
        (32 * 64, 8, 33),  # as many as run side by side
        (64, 1, 64),
        (10_000, 1, PROGRAMS_PER_SM * H100_SMS),
        (0, 8, 1),
    ],
)
def test_programs_fill_the_device_and_no_more(num_items: int, num_kv_heads: int, workers: int) -> None:
    assert workers_for(num_items, num_kv_heads, H100_SMS) == workers


def test_a_plan_for_decode_depends_on_the_padded_size_only() -> None:
    plan = plan_decode(8, 4096, 8, TILES_OF_16, H100_SMS)
    assert plan.all_decode
    assert plan.max_splits == 4096 // SPLIT_KEYS
    assert plan.workspace_numel(32, 128) == 8 * 32 * plan.max_splits * 129
    assert plan_decode(8, SPLIT_KEYS, 8, TILES_OF_16, H100_SMS).workspace_numel(32, 128) == 0


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 900)), min_size=1, max_size=9), st.sampled_from([1, 3, 4]))
def test_a_padded_plan_holds_every_step_of_its_size(sequences: list[tuple[int, int]], group: int) -> None:
    """The same tiles and decoded sequences as the step's own plan has; the rest names the sequence without tokens."""
    query_lens, prefixes = np.array(sequences).T
    context_lens = query_lens + prefixes
    num_tokens, num_seqs = int(query_lens.sum()) + 1, len(sequences)
    own = plan_attention(query_lens, context_lens, group, 2, TILES_OF_16, H100_SMS)
    decode_seqs, tiles = padded_items(query_lens, context_lens, num_tokens, num_seqs, group, TILES_OF_16)
    padded = plan_padded(num_tokens, num_seqs, 1000, group, 2, TILES_OF_16, H100_SMS)
    assert (decode_seqs.shape, tiles.shape) == (padded.decode_seqs.shape, padded.tiles.shape)
    assert not padded.all_decode
    assert padded.max_splits >= own.max_splits
    assert decode_seqs.tolist() == own.decode_seqs.tolist() + [num_seqs] * (num_seqs - len(own.decode_seqs))
    assert tiles.tolist() == own.tiles.tolist() + [[num_seqs, 0]] * (len(tiles) - len(own.tiles))
