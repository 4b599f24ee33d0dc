"""Each used operator of torch-npu, in 16 bits and with real models' shapes, against float64 on the host.

Run by scripts/npu_check.sh on NPUs, and with shorter contexts by tests/model/test_npu.py on simulated NPUs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from pd_cluster.devices.device import Device, bind, synchronize, use
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.forward_batch import build_batch
from pd_cluster.model.layers.attention.sdpa import Scoring
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.attention_parity import AttentionCase, Tensors, content_of, worst_share
from tests.support.spread import spread

NPU = Device("npu")
BLOCK_SIZE = 128
IS_SIMULATED = "PD_CLUSTER_TEST_TORCH_NPU" in os.environ
STALE = 3e4  # fills slots that no sequence has written, so that reading one ruins the row
Sequences = list[tuple[int, int]]  # query_len, context_len

EDGES = (1, 2, 127, 128, 129)
DECODE: Sequences = [(1, n) for n in (*EDGES, *((600,) if IS_SIMULATED else (1000, 4096, 16129, 32768)))]
CHUNKED: Sequences = [(40, 300), (17, 17)] if IS_SIMULATED else [(512, 8192), (300, 32768), (129, 129)]
MIXED: Sequences = [(1, 300), (70, 70), (1, 1), (33, 400), *([] if IS_SIMULATED else [(1, 32768), (700, 2000)])]
STEPS = {"decode": DECODE, "chunked": CHUNKED, "mixed": MIXED}
# (query heads, key heads): whole models, and one rank of two
HEADS = {"Llama 8B": (32, 8), "Qwen 7B": (28, 4), "Llama 70B, eighth": (8, 1), "without groups": (8, 8)}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 100},
    "sinks": {"has_sinks": True},
    "both": {"window": 130, "has_sinks": True},
}


@pytest.fixture(autouse=True)
def device() -> Iterator[str]:
    """Yields torch's name of the NPU, then waits for the NPU, so that a failing launch fails its own test."""
    use(bind("npu", (), 0))
    yield NPU.torch_name
    synchronize(NPU)


def pool_of(case: AttentionCase, num_blocks: int) -> KVPool:
    layout = KVLayout(1, case.num_kv_heads, keys_and_values(case.head_dim), case.block_size, case.dtype)
    pool = KVPool(layout, num_blocks, NPU)
    for plane in pool.layer(0):
        plane.fill_(STALE)
    return pool


def attended(case: AttentionCase, contents: list[Tensors], scoring: Scoring, tables: list[list[int]]) -> torch.Tensor:
    """Returns [num_tokens, num_heads, head_dim] on the host; the pool already holds each sequence's prefix."""
    from pd_cluster.model.kernels.npu.npu_attention import NpuAttention

    there = NPU.torch_name
    pool = pool_of(case, 1 + max(max(table) for table in tables))
    try:
        requests = []
        for i, ((query_len, context_len), content, table) in enumerate(
            zip(case.sequences, contents, tables, strict=True)
        ):
            prefix = context_len - query_len
            for at, block in enumerate(table):
                num_tokens = min(case.block_size, prefix - at * case.block_size)
                for plane, new in zip(pool.layer(0), (content.keys, content.values), strict=True):
                    if num_tokens > 0:
                        start = at * case.block_size
                        plane[block][:num_tokens] = new[start : start + num_tokens].to(there)
            request = Request(str(i), RequestSpec([0] * context_len, Sampling()), tables=[list(table)])
            request.num_computed_tokens = prefix
            requests.append((request, query_len))
        batch = build_batch(requests, pool)
        query = torch.cat([each.query for each in contents]).to(there)
        keys, values = (
            torch.cat([getattr(each, kind)[-len(each.query) :] for each in contents]).to(there)
            for kind in ("keys", "values")
        )
        if scoring.sinks is not None:
            scoring = replace(scoring, sinks=scoring.sinks.to(there))
        way = NpuAttention(NPU, "TND")
        return way.write_and_attend(0, query.transpose(0, 1), keys, values, batch, scoring).cpu()
    finally:
        pool.close()


def worst_error(sequences: Sequences, **shape: Any) -> float:
    """Returns the largest error divided by the bound that follows from the precision."""
    case = AttentionCase(sequences=sequences, block_size=BLOCK_SIZE, **shape)
    generator = torch.Generator().manual_seed(11)
    counts = [-(-context_len // BLOCK_SIZE) for _, context_len in sequences]
    order = torch.randperm(1 + sum(counts), generator=generator).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    contents = [content_of(case, *each, torch.empty(0), generator) for each in sequences]
    sinks = torch.randn(case.num_heads, generator=generator).to(case.torch_dtype) if case.has_sinks else None
    scoring = Scoring(case.head_dim**-0.5, case.window, None, sinks)
    error = worst_share(case, contents, scoring, attended(case, contents, scoring, tables))
    print(f"error: {error:.2f} of the bound")
    return error


@pytest.mark.parametrize(("heads", "features"), spread(list(HEADS), list(FEATURES)))
@pytest.mark.parametrize("steps", STEPS)
def test_attention(steps: str, heads: str, features: str) -> None:
    num_heads, num_kv_heads = HEADS[heads]
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": 128, "dtype": "bfloat16"}
    assert worst_error(STEPS[steps], **shape, **FEATURES[features]) < 1


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "dtype"),
    [(32, 128, "float16"), (8, 64, "bfloat16")],  # the operator's documentation allows no other head sizes
)
def test_attention_of_another_kind(num_heads: int, head_dim: int, dtype: str) -> None:
    assert worst_error(MIXED, num_heads=num_heads, num_kv_heads=8, head_dim=head_dim, dtype=dtype) < 1


@pytest.mark.parametrize("head_dim", [64, 192] if IS_SIMULATED else [64, 96, 192, 256])
def test_heads_of_other_sizes_are_right_or_refused(head_dim: int) -> None:
    """Shows whether `--npu-head-dims wide` works on this device; the operator must not crash the device."""
    from pd_cluster.model.kernels.npu.head_dim_probe import why_not

    layout = KVLayout(1, 2, keys_and_values(head_dim), BLOCK_SIZE, "bfloat16")
    why = why_not(NPU, layout, 8, has_window=True, has_sinks=True)
    print(f"head_dim {head_dim}: {why or 'computed rightly'}")
    assert worst_error([(1, 5)], num_heads=2, num_kv_heads=2, head_dim=128, dtype="bfloat16") < 1


def test_sequences_share_their_prefix() -> None:
    """The pool has far fewer blocks than the sequences would need without sharing."""
    case = AttentionCase(
        sequences=[(1, 400)] * 24, num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_size=BLOCK_SIZE
    )
    content = content_of(case, 1, 400, torch.empty(0), torch.Generator().manual_seed(5))
    tables = [[2, 0, 1, 3 + i] for i in range(24)]  # all blocks except the last are shared
    scoring = Scoring(128**-0.5, None, None, None)
    found = attended(case, [content] * 24, scoring, tables)
    assert worst_share(case, [content] * 24, scoring, found) < 1


@pytest.mark.parametrize("window", [1, 24, 60])
def test_a_window_of_w_shows_exactly_w_keys_as_in_transformers(window: int) -> None:
    """All keys are equal and each value marks one key, so a row's result shows which keys it saw."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    from pd_cluster.model.kernels.npu.npu_attention import NpuAttention

    num_tokens = 60  # computed in chunks, and one by one
    pool = KVPool(KVLayout(1, 1, keys_and_values(128), BLOCK_SIZE, "bfloat16"), num_blocks=1, device=NPU)
    request = Request("r", RequestSpec([0] * num_tokens, Sampling()), tables=[[0]])
    attention, values = NpuAttention(NPU, "TND"), torch.eye(num_tokens, 128, dtype=torch.bfloat16)[:, None]
    rows = []
    for count in (40, 17, 1, 1, 1):
        start = request.num_computed_tokens
        batch = build_batch([(request, count)], pool)
        zeros = torch.zeros(1, count, 128, dtype=torch.bfloat16, device=NPU.torch_name)
        own = values[start : start + count].to(NPU.torch_name)
        found = attention.write_and_attend(0, zeros, zeros.transpose(0, 1), own, batch, Scoring(1.0, window))
        rows.append(found[:, 0, :num_tokens].float().cpu())
        request.num_computed_tokens += count
    pool.close()
    seen = torch.cat(rows) > 0
    at = torch.arange(num_tokens)
    is_visible = sliding_window_causal_mask_function(window)
    expected = is_visible(torch.tensor(0), torch.tensor(0), at[:, None], at[None])
    assert torch.equal(seen, expected)
    assert seen.sum(1).tolist() == [min(window, i + 1) for i in range(num_tokens)]


# ---- the other operators


def compare(name: str, actual: torch.Tensor, expected: torch.Tensor, num_roundings: int) -> None:
    """Asserts that each row's error is at most `num_roundings` roundings of its largest number."""
    scale = expected.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    error = float(((actual.double().cpu() - expected).abs() / scale).max())
    bound = num_roundings * torch.finfo(actual.dtype).eps / 2
    print(f"{name}: error {error:.1e}, bound {bound:.1e}")
    assert not math.isnan(error)
    assert error <= bound


def randn(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


NUM_ROWS = (1, 7) if IS_SIMULATED else (1, 7, 64, 4096)


@pytest.mark.parametrize(("num_rows", "width"), spread(NUM_ROWS, [1024, 4096, 8192]))
def test_norms(num_rows: int, width: int, device: str) -> None:
    x, weight = randn(num_rows, width) * 3, randn(width, seed=4) + 1
    found = torch.ops.npu.npu_rms_norm(x.to(device), weight.to(device), 1e-5)[0]
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    compare(f"norm {num_rows} x {width}", found, expected, 2)


@pytest.mark.parametrize(("num_rows", "width"), spread(NUM_ROWS, [3072, 14336]))
def test_gates(num_rows: int, width: int, device: str) -> None:
    x = randn(num_rows, 2 * width)
    left, right = x.double().chunk(2, dim=-1)
    found = torch.ops.npu.npu_swiglu(x.to(device), dim=-1)
    compare(f"gate {num_rows} x {width}", found, functional.silu(left) * right, 2)


@pytest.mark.parametrize("num_heads", [8, 32])
def test_rotation(num_heads: int, device: str) -> None:
    x, angles = randn(50, num_heads, 128), torch.rand(50, 64, dtype=torch.float64) * 3e4
    cos, sin = (torch.cat((each, each), dim=-1).bfloat16() for each in (angles.cos(), angles.sin()))
    given = (each[None, :, None].to(device) for each in (cos, sin))
    found = torch.ops.npu.npu_rotary_mul(x[None].to(device), *given, "half")[0]
    left, right = x.double().chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1)
    compare("rotation", found, x.double() * cos.double()[:, None] + turned * sin.double()[:, None], 4)


def test_written_slots_hold_exactly_what_was_written_and_no_other_slot_changes(device: str) -> None:
    keys, values = randn(70, 8, 128), randn(70, 8, 128, seed=4)
    slots = torch.randperm(6 * BLOCK_SIZE, generator=torch.Generator().manual_seed(6))[:70]
    pools = [torch.full((6, BLOCK_SIZE, 8, 128), STALE, dtype=torch.bfloat16, device=device) for _ in range(2)]
    torch.ops.npu.npu_scatter_pa_kv_cache(
        keys.to(device), values.to(device), *pools, slots.to(device), cache_mode="Norm"
    )
    for pool, new in zip(pools, (keys, values), strict=True):
        expected = torch.full((6 * BLOCK_SIZE, 8, 128), STALE, dtype=torch.bfloat16)
        expected[slots] = new
        assert torch.equal(pool.cpu().view_as(expected), expected)


@pytest.mark.parametrize("shape", [(8, 4096, 3584), (128, 2048, 768)], ids=["8 large experts", "128 small experts"])
def test_grouped_products(shape: tuple[int, int, int], device: str) -> None:
    """Some experts have no rows. Rows after the last group have no expert; their undefined result is not compared."""
    num_experts, inner, columns = (shape[0], shape[1] // 8, shape[2] // 8) if IS_SIMULATED else shape
    counts = torch.randint(0, 6, (num_experts,), generator=torch.Generator().manual_seed(2))
    counts[::3] = 0
    num_rows = int(counts.sum())
    x, weights = randn(num_rows + 9, inner), randn(num_experts, inner, columns, seed=8) / inner**0.5
    (found,) = torch.ops.npu.npu_grouped_matmul(
        [x.to(device)],
        [weights.to(device)],
        group_list=counts.cumsum(0).to(device),
        split_item=2,
        group_type=0,
        group_list_type=0,
    )
    experts = torch.arange(num_experts).repeat_interleave(counts)
    expected = torch.stack([row @ weights[i].double() for row, i in zip(x[:num_rows].double(), experts, strict=True)])
    compare("grouped products", found[:num_rows], expected, 4)
